"""Invalid request bodies, as the bytes sent over a socket and the answers expected.

Each input is sent to every route that it applies to. Where a bound differs between the dialects,
the row says which. Inputs that look invalid but are accepted are here too, with status 200. The
names B01, B02, ... only number the kinds of input, to tell them apart in the output of pytest;
test_front.py goes on with them for invalid HTTP. This module knows nothing of processes and
sockets.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
ALL, OPENAI = (GENERATE, COMPLETIONS, CHAT), (COMPLETIONS, CHAT)
SECRET = "xyzzy-plugh"
"""Text in every prompt, which no error and no log line may contain."""
KEYS = ("key-Of-the-first", "key-Of-the-second")
KEY_HASHES = ",".join(hashlib.sha256(key.encode()).hexdigest() for key in KEYS)
MODEL = "tiny"
CONTEXT, VOCABULARY, FEW_PAGES = 512, 300, 4
LETTER_A = 65
"""The test tokenizer's token of "a"; each of its tokens is one byte."""
MAX_BODY, MAX_HEADERS = 2 * 2**20, 32_768
INVALID = 0
"""Stands for the status of a refused field: 422 in TGI's dialect, 400 in OpenAI's."""
MALFORMED, OK = 400, 200
STREAM = b"{stream}"
JSON = "content-type: application/json\r\n"
BEARER = f"authorization: Bearer {KEYS[0]}\r\n"


@dataclass(frozen=True)
class Case:
    """A request and its answer. `request` may hold STREAM, for the id of a finished resumable
    stream of the first key.

    `words` are in the message, all of them; `code` is a field of its own in OpenAI's dialect.
    `protocol`: refused before any route was known, so the body is OpenAI's whatever the path.
    `closes`: the connection ends with this answer, so nothing after it was run. `guarded`: for the
    server that has keys, few pages and short patience. `sequences`: how many a 200 has generated.
    `shows`: what its JSON must be. `headers`: names that the answer must have. `more`: sent again
    and again after the request until there is an answer.
    """

    id: str
    name: str
    path: str
    request: bytes
    status: int
    words: tuple[str, ...] = ()
    code: str | None = None
    protocol: bool = False
    closes: bool = False
    guarded: bool = False
    sequences: int = 1
    shows: Callable[[Any], bool] | None = None
    headers: tuple[str, ...] = ()
    more: bytes = b""

    @property
    def label(self) -> str:
        return f"{self.id} {self.name[:48]} {self.path[:24]}"


def document(path: str, fields: str, prompt: str = json.dumps(SECRET)) -> str:
    """A body whose prompt is the JSON `prompt`, with further `fields`, which are JSON members in
    OpenAI's spelling.
    """
    if '"max_tokens"' not in fields and '"max_completion_tokens"' not in fields:
        fields = f'"max_tokens":2,{fields}'.rstrip(",")
    if path == GENERATE:
        fields = fields.replace('"max_tokens"', '"max_new_tokens"')
        return f'{{"inputs":{prompt},"parameters":{{{fields}}}}}'
    if path == COMPLETIONS:
        return f'{{"prompt":{prompt},{fields}}}'
    return f'{{"messages":[{{"role":"user","content":{prompt}}}],{fields}}}'


GOOD = {path: document(path, '"temperature":1') for path in ALL}


def post(path: str, body: str | bytes, headers: str = JSON, method: str = "POST") -> bytes:
    data = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: "
        f"{len(data)}\r\n\r\n"
    )
    return head.encode("latin-1") + data


def status_on(path: str, status: int) -> int:
    return status or (422 if path == GENERATE else 400)


# --- bodies that are no JSON object: (id, name, body of a good one, words)

DEEP = 10**5
BROKEN: list[tuple[str, str, Callable[[str], str | bytes], tuple[str, ...]]] = [
    # The code is the status as a number, as vLLM has it; the words for it are in the message.
    ("B01", "empty body", lambda good: b"", ("empty",)),
    ("B02", "only white space", lambda good: b" \r\n\t", ("empty",)),
    ("B03", "truncated", lambda good: good[:-1], ("not JSON",)),
    (
        "B03",
        "truncated in a string",
        lambda good: good[: good.index(SECRET) + 3],
        ("not JSON",),
    ),
    ("B04", "trailing garbage", lambda good: good + "x", ("not JSON",)),
    ("B05", "two documents", lambda good: good + good, ("not JSON",)),
    ("B06", "an array", lambda good: "[" + good + "]", ("must be a JSON object",)),
    ("B06", "a string", lambda good: f'"{SECRET}"', ("must be a JSON object",)),
    ("B06", "a number", lambda good: "3", ("must be a JSON object",)),
    ("B06", "null", lambda good: "null", ("must be a JSON object",)),
    (
        "B12",
        "arrays 10^5 deep",
        lambda good: good[:-1] + ',"x":' + "[" * DEEP + "]" * DEEP + "}",
        ("deeper than 64",),
    ),
    ("B12", "objects that never close", lambda good: '{"a":' * DEEP, ("deeper than 64",)),
    ("B15", "a comment", lambda good: good[:-1] + "/* no */}", ("not JSON",)),
    ("B15", "single quotes", lambda good: good.replace('"', "'"), ("not JSON",)),
    ("B15", "a trailing comma", lambda good: good[:-1] + ",}", ("not JSON",)),
    (
        "B15",
        "a byte order mark",
        lambda good: b"\xef\xbb\xbf" + good.encode(),
        ("not JSON",),
    ),
    ("B16", "UTF-16", lambda good: good.encode("utf-16"), ("not JSON",)),
    ("B16", "UTF-16 without a mark", lambda good: good.encode("utf-16-le"), ("not JSON",)),
    ("B16", "UTF-32", lambda good: good.encode("utf-32"), ("not JSON",)),
    (
        "B17",
        "invalid UTF-8",
        lambda good: good.encode().replace(b"xyzzy", b"xy\xe9y"),
        ("not JSON",),
    ),
    (
        "B18",
        "overlong UTF-8",
        lambda good: good.encode().replace(b"xyzzy", b"xy\xc0\x80"),
        ("not JSON",),
    ),
    (
        "B18",
        "a surrogate in UTF-8",
        lambda good: good.encode().replace(b"xyzzy", b"xy\xed\xa0\x80"),
        ("not JSON",),
    ),
    ("B20", "a lone surrogate", lambda good: good.replace("xyzzy", "\\ud800"), ("not JSON",)),
    (
        "B21",
        "a reversed pair",
        lambda good: good.replace("xyzzy", "\\udc00\\ud800"),
        ("not JSON",),
    ),
    (
        "B22",
        "a lone surrogate in a key",
        lambda good: good[:-1] + ',"a\\uDFFF":1}',
        ("not JSON",),
    ),
]

# --- members: (id, what they are, members, status, words), in the parameters of TGI's dialect

BIASES = ",".join(f'"{i}":1' for i in range(DEEP))
ENUM = json.dumps(["x" * 16] * 5000)
DEEP_SCHEMA = '{"items":' * 10_000 + "{}" + "}" * 10_000
MEMBERS: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("B07", '"temperature":NaN', MALFORMED, ("not JSON",)),
    ("B08", '"temperature":Infinity', MALFORMED, ("not JSON",)),
    ("B08", '"temperature":-Infinity', MALFORMED, ("not JSON",)),
    ("B09", '"temperature":1e999', INVALID, ("finite",)),
    ("B10", '"frequency_penalty":-0.0', OK, ()),
    ("B10", '"min_p":-0.0', OK, ()),
    ("B14", f'"{"k" * 10**6}":1', OK, ()),
    ("B22", '"stop":["a","\\ud800"]', MALFORMED, ("not JSON",)),
    ("B38", f'"max_tokens":1{"0" * 5000}', MALFORMED, ("not JSON", "number")),
    # Null is the default everywhere; only the end token is allowed, so that the rest of the context
    # is short.
    ("B38", '"max_tokens":null,"allowed_token_ids":[0]', OK, ()),
    ("B39", '"min_tokens":3', INVALID, ("min_tokens", "2", "Given: 3")),
    ("B39", f'"max_tokens":null,"min_tokens":{CONTEXT + 1}', INVALID, ("min_tokens",)),
    ("B40", '"temperature":1e-320', OK, ()),
    ("B50", '"logit_bias":{"1":NaN}', MALFORMED, ("not JSON",)),
    ("B50", f'"logit_bias":{{{BIASES}}}', INVALID, ()),
    ("B54", f'"x":{DEEP_SCHEMA}', MALFORMED, ("deeper than 64",)),
]

# --- values of one field: (id, routes, field, values, status, words beside the field's name)

VALUES: list[tuple[str, tuple[str, ...], str, tuple[Any, ...], int, tuple[str, ...]]] = [
    (
        "B36",
        ALL,
        "stop_token_ids",
        ([-1], [1.0], [True], ["1"], [None], [[1]], [1] * 129),
        INVALID,
        (),
    ),
    ("B36", ALL, "stop_token_ids", ([VOCABULARY], [1, 2**30]), INVALID, (str(VOCABULARY),)),
    ("B36", ALL, "allowed_token_ids", ([-1], [VOCABULARY], []), INVALID, ()),
    ("B38", ALL, "max_tokens", (-2, 1.5, "5", True, [], 2**31, 2**63, 10**400), INVALID, ()),
    ("B38", (GENERATE,), "max_tokens", (-1,), INVALID, (">= 1",)),
    ("B38", (GENERATE, CHAT), "max_tokens", (0,), INVALID, (">= 1",)),
    ("B38", (COMPLETIONS,), "max_tokens", (0,), INVALID, ("0 with `echo`",)),
    ("B40", ALL, "temperature", (-1, 2.0001, "1", [], {}, True), INVALID, ()),
    ("B40", (GENERATE,), "temperature", (0, -0.0), INVALID, ("> 0",)),
    ("B40", OPENAI, "temperature", (0, -0.0), OK, ()),
    ("B41", ALL, "top_p", (0, 1.0001, -0.1, "x", True), INVALID, ()),
    # Zero and below is off, in both dialects.
    ("B42", ALL, "top_k", (-1, 0, VOCABULARY), OK, ()),
    ("B42", ALL, "top_k", (-2, 1.5, True, "1", VOCABULARY + 1, 2**31), INVALID, ()),
    ("B43", ALL, "min_p", (-0.1, 1.1, "0"), INVALID, ()),
    ("B44", ALL, "frequency_penalty", (-2.0001, 2.0001, 1e300, False), INVALID, ()),
    ("B44", ALL, "presence_penalty", (-2.0001, 2.0001), INVALID, ()),
    ("B44", ALL, "repetition_penalty", (0, -1, 1e308), INVALID, ()),
    ("B45", OPENAI, "n", (0, -1, 129, 10**9, True), INVALID, ()),  # Up to 128 are allowed.
    ("B45", (GENERATE,), "best_of", (0, -1, 129, 10**9, True), INVALID, ()),
    ("B46", (COMPLETIONS,), "logprobs", (21, -1, "1"), INVALID, ()),
    ("B46", (CHAT,), "logprobs", (1, "x"), INVALID, ()),
    ("B46", (CHAT,), "top_logprobs", (21, -1, True, 1), INVALID, ()),
    ("B46", OPENAI, "prompt_logprobs", (21, -1, True), INVALID, ()),
    ("B46", (GENERATE,), "top_n_tokens", (6, -1, True), INVALID, ()),
    ("B47", ALL, "seed", (-2, 2**63, 2**64, 1.5, "x", True), INVALID, ()),
    ("B47", ALL, "seed", (-1, 0, 2**63 - 1, 1.0), OK, ()),
    (
        "B48",
        ALL,
        "stop",
        ([SECRET] * 17, [""], ["x" * 10**4], [None], [3], [[SECRET]], 3, {}),
        INVALID,
        (),
    ),
    ("B48", ALL, "stop", (["a", "a"], []), OK, ()),
    (
        "B50",
        ALL,
        "logit_bias",
        ({"x": 1}, {"-1": 1}, {"1e3": 1}, {"01": 1}, {"\u0663": 1}, {"1": "x"}, []),
        INVALID,
        (),
    ),
    ("B50", ALL, "logit_bias", ({str(VOCABULARY): 1}, {"1": 101}, {"1": -101}), INVALID, ()),
    ("B50", ALL, "logit_bias", ({str(i): 1 for i in range(1025)},), INVALID, ("1024",)),
    (
        "B51",
        ALL,
        "temprature",
        (1.0, False, ""),
        INVALID,
        ("not a known field", "did you mean `temperature`?"),
    ),
    # What clients send as a matter of course and what changes nothing:
    # tests/server/http/test_fields.py has the whole list.
    ("B51", OPENAI, "user", ("someone",), OK, ()),
    ("B51", OPENAI, "store", (True,), OK, ()),
    (
        "B52",
        (GENERATE, COMPLETIONS),
        "tools",
        ([{"type": "function"}],),
        INVALID,
        ("not supported",),
    ),
    ("B52", (GENERATE, COMPLETIONS), "tools", ([],), OK, ()),
    ("B52", (CHAT,), "tools", ([{"type": "function"}],), INVALID, ("is required",)),
    ("B52", ALL, "image_url", ("http://127.0.0.1:9/",), INVALID, ("not supported: text alone",)),
    ("B52", ALL, "prompt_embeds", ("AAAA",), INVALID, ("not supported: text alone",)),
    ("B52", ALL, "chat_template", ("{{ 1 }}",), INVALID, ("server.chat_template",)),
    ("B52", (GENERATE, CHAT), "suffix", ("x",), INVALID, ("not supported",)),
    # Structured output is supported: only formats that do not exist are refused.
    (
        "B52",
        OPENAI,
        "response_format",
        ({"type": "xml"}, {"type": "json_schema"}, "json", {}),
        INVALID,
        (),
    ),
    (
        "B52",
        (GENERATE,),
        "response_format",
        ({"type": "json_object"},),
        INVALID,
        ("did you mean `grammar`?",),
    ),
    # TGI's body takes any `model` next to `inputs`; in `parameters`, where these cases put it, it
    # is ignored.
    ("B55", (GENERATE,), "model", (MODEL, "../../etc/passwd"), OK, ()),
    ("B55", OPENAI, "model", ("x" * 10**4, 3, []), INVALID, ()),
    ("B55", OPENAI, "model", (MODEL, None, "", "dummy", "tgi"), OK, ()),
]
# --- the same, with members of one dialect alone: (id, path, members, status, words)

COMBINED: list[tuple[str, str, str, int, tuple[str, ...]]] = [
    ("B38", COMPLETIONS, '"max_tokens":0,"echo":true', OK, ()),
    ("B45", COMPLETIONS, '"n":3,"best_of":2', INVALID, ("`best_of`", ">= `n` 3")),
    ("B45", COMPLETIONS, '"best_of":3,"stream":true', INVALID, ("`best_of`", "streaming")),
    ("B45", GENERATE, '"best_of":2,"do_sample":false', INVALID, ("`best_of`", "sampling")),
    (
        "B46",
        COMPLETIONS,
        '"prompt_logprobs":1,"stream":true',
        INVALID,
        ("`prompt_logprobs`", "streaming"),
    ),
    ("B46", CHAT, '"top_logprobs":1,"logprobs":false', INVALID, ("`top_logprobs`",)),
    (
        "B52",
        COMPLETIONS,
        '"suffix":"x"',
        INVALID,
        ("cannot fill in the middle",),
    ),  # This model has no marks for it.
    (
        "B52",
        COMPLETIONS,
        '"response_format":{"type":"json_object"},"structured_outputs":{"regex":"a"}',
        INVALID,
        ("combined",),
    ),
    ("B57", COMPLETIONS, '"stream":"true"', INVALID, ("`stream`", "boolean")),
    ("B57", CHAT, '"stream":1', INVALID, ("`stream`", "boolean")),
    (
        "B57",
        COMPLETIONS,
        '"stream_options":{"include_usage":true}',
        INVALID,
        ("only with `stream`",),
    ),
    ("B57", CHAT, '"stream_options":{}', INVALID, ("only with `stream`",)),
    ("B57", CHAT, '"stream":true,"stream_options":{"x":1}', OK, ()),
    ("B57", COMPLETIONS, '"stream":true,"stream_options":[]', INVALID, ("`stream_options`",)),
]
# Members of the outermost object in TGI's dialect.
OUTERMOST: list[tuple[str, str, tuple[str, ...]]] = [
    ("B51", '"streem":true', ("not a known field", "did you mean `stream`?")),
    ("B52", '"tools":[{}]', ("`tools`", "not supported")),
    ("B57", '"stream":"true"', ("`stream`", "boolean")),
    ("B57", '"stream":1', ("`stream`", "boolean")),
    ("B52", '"max_new_tokens":2', ("did you mean `parameters.max_new_tokens`?",)),
]
UNKNOWN_MODELS = (
    "../../etc/passwd",
    "/abs",
    "C:\\x",
    "%2e%2e",
    "http://127.0.0.1:9/",
    "t\u0456ny",
    MODEL.upper(),
    f"{MODEL} ",
)

# --- constraints on the output: (id, kind, value, status, words)

CONSTRAINTS: list[tuple[str, str, Any, int, tuple[str, ...]]] = [
    ("B53", "regex", "(a+)+b", OK, ()),  # Followed without backtracking, so it is no bomb.
    ("B53", "regex", "(?:a{1,1000}){1000}", INVALID, ("too complex",)),
    ("B53", "regex", "(?<=a)b", INVALID, ("not a regular expression",)),
    ("B53", "regex", r"(a)\1", INVALID, ("not a regular expression",)),
    ("B53", "regex", "a" * 70_000, INVALID, ("longer than 65536 characters",)),
    (
        "B54",
        "json",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        INVALID,
        (),
    ),
    ("B54", "json", {"$ref": "http://127.0.0.1:9/schema.json"}, INVALID, ("nothing is fetched",)),
    ("B54", "json", {"$ref": "file:///etc/passwd"}, INVALID, ()),
    ("B54", "json", {"enum": ["x" * 16] * 10**5}, INVALID, ("longer than 65536 characters",)),
    ("B54", "json", {"type": "string", "pattern": "(?<=a)b"}, INVALID, ()),
    ("B54", "json", [], INVALID, ()),
]

# --- prompts: (name, value, words)

ODD_TEXTS = (
    "\x00\x01\x1f\x7f",
    "\ufffe\uffff\ufeff",
    "\u202e\u200b\u2066",
    "e" + "\u0301" * 100,
    "\u05e9\u05dc",
    '"\\\r\n',
    "[31m\x1b",
)
TOO_LONG = "context_length_exceeded"
IDS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("a negative id", [1, -1], ("`prompt.1`",)),
    ("an id past the vocabulary", [1, VOCABULARY], (str(VOCABULARY),)),
    ("a float", [1, 2, 1.0], ("`prompt.2`",)),
    ("a boolean", [1, True], ("`prompt.1`",)),
    ("a text", [1, "a"], ("`prompt.1`",)),
    ("a list in a list", [[1], [2, -1]], ("`prompt.1.1`",)),
    ("a list in a list in a list", [[[1]]], ("`prompt.0.0`",)),
    ("an id of 10^400", [10**400], ("`prompt.0`",)),
    ("an empty list", [], ("empty",)),
    ("an empty list in a list", [[]], ("empty",)),
    ("10^5 of them", [1] * 10**5, ("less than", "100000")),
]
LISTS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("more prompts than may be", ["a"] * 257, ("256",)),
    ("texts and ids", ["a", [1]], ("`prompt.1`",)),
    ("a list and an id", [[1], 1], ("`prompt.1`",)),
    ("texts and null", ["a", None], ("`prompt.1`",)),
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


MESSAGES: list[tuple[str, str, Any, int]] = [
    ("B24", "no messages at all", ..., INVALID),
    ("B27", "null", None, INVALID),
    ("B28", "a number", 3, INVALID),
    ("B29", "an object", user(SECRET), INVALID),
    ("B56", "no message", [], INVALID),
    ("B56", "an unknown role", [{"role": "root", "content": SECRET}], INVALID),
    ("B56", "a tool's message without content", [{"role": "tool", "tool_call_id": "1"}], INVALID),
    ("B56", "no role", [{"content": SECRET}], INVALID),
    ("B56", "no content", [{"role": "user"}], INVALID),
    ("B56", "null for content", [user(None)], INVALID),
    ("B56", "a number for content", [user(3)], INVALID),
    (
        "B56",
        "an image",
        [user([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/"}}])],
        INVALID,
    ),
    ("B56", "an unknown member", [user(SECRET) | {"x": 1}], OK),
    ("B56", "1025 messages", [user("")] * 1025, INVALID),
    ("B56", "20,000 messages", [user("")] * 20_000, MALFORMED),
    ("B56", "10^5 messages", [user("")] * 10**5, 413),
    (
        "B56",
        "an order the template refuses",
        [user(""), {"role": "system", "content": SECRET}],
        INVALID,
    ),
]


def body_cases() -> Iterator[Case]:
    """Invalid bytes of a body."""
    for path in ALL:
        for id, name, make, words in BROKEN:
            yield Case(id, name, path, post(path, make(GOOD[path])), MALFORMED, words)
        for id, members, status, words in MEMBERS:
            yield with_members(id, path, members, status, words)
    for id, path, members, status, words in COMBINED:
        yield with_members(id, path, members, status, words)
    for id, members, words in OUTERMOST:
        yield Case(
            id, members, GENERATE, post(GENERATE, f"{GOOD[GENERATE][:-1]},{members}}}"), 422, words
        )


def with_members(
    id: str,
    path: str,
    members: str,
    status: int,
    words: tuple[str, ...] = (),
    code: str | None = None,
) -> Case:
    return Case(
        id, members, path, post(path, document(path, members)), status_on(path, status), words, code
    )


def value_cases() -> Iterator[Case]:
    """An invalid value of one field."""
    for id, routes, field, values, status, words in VALUES:
        for path, value in itertools.product(routes, values):
            named = field.replace("max_tokens", "max_new_tokens") if path == GENERATE else field
            yield with_members(
                id,
                path,
                f'"{field}":{json.dumps(value)}',
                status,
                words if status == OK else (named, *words),
            )
    for path in ALL:
        for id, kind, value, status, words in CONSTRAINTS:
            constraint: Any = (
                {"grammar": {"type": kind, "value": value}}
                if path == GENERATE
                else {"structured_outputs": {kind: value}}
            )
            yield with_members(id, path, json.dumps(constraint)[1:-1], status, words)
    for path, name in itertools.product(OPENAI, UNKNOWN_MODELS):
        yield with_members(
            "B55", path, f'"model":{json.dumps(name)}', 404, ("no such model",), "model_not_found"
        )


def choice_cases() -> Iterator[Case]:
    """Valid requests whose answers show that a field was honoured."""
    for path, field in ((GENERATE, "best_of"), (COMPLETIONS, "n"), (CHAT, "n")):
        request = post(path, document(path, f'"temperature":1.5,"{field}":9'))
        yield Case("B45", f"{field} 9", path, request, OK, sequences=9)
    request = post(GENERATE, document(GENERATE, '"seed":null,"do_sample":true,"details":true'))
    yield Case(
        "B47",
        "a seed is drawn and told",
        GENERATE,
        request,
        OK,
        shows=lambda body: body["details"]["seed"] >= 0,
    )
    for path in OPENAI:
        yield Case("B47", "null for a seed", path, post(path, document(path, '"seed":null')), OK)
    # The output is all of "a": what stops it stays in TGI's text and is cut off in OpenAI's.
    for stops in (["a"], ["aaa"], ["aab", "aaa", "aa"], ["a", "aa"]):
        kept = min((stop for stop in stops if set(stop) == {"a"}), key=len)
        members = f'"max_tokens":3,"allowed_token_ids":[{LETTER_A}],"stop":{json.dumps(stops)}'
        for path in ALL:
            request = post(
                path, document(path, members + (',"details":true' if path == GENERATE else ""))
            )
            yield Case(
                "B49",
                f"stop {stops}",
                path,
                request,
                OK,
                shows=lambda body, kept=kept: stopped(body, kept),
            )


def stopped(body: Any, kept: str) -> bool:
    """Whether a stop string ended the answer at once; TGI's dialect keeps it in the text
    (`kept`).
    """
    if "generated_text" in body:
        return bool(
            body["generated_text"] == kept and body["details"]["finish_reason"] == "stop_sequence"
        )
    (choice,) = body["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text == "" and choice["finish_reason"] == "stop"


def prompt_cases() -> Iterator[Case]:
    """Invalid prompts, and prompts that only look invalid."""
    for path in ALL:
        for text in ODD_TEXTS:
            yield from echoed("B23", text, path)
        yield Case("B26", "white space", path, post(path, document(path, "", '" \\n"')), OK)
        request = post(path, document(path, "", json.dumps("a" * CONTEXT)))
        yield Case(
            "B30",
            "a token too many",
            path,
            request,
            status_on(path, INVALID),
            ("less than", str(CONTEXT)),
            TOO_LONG,
        )
        request = post(path, document(path, "", json.dumps("a" * (CONTEXT - 100))), JSON + BEARER)
        said = (f"{FEW_PAGES} pages", str(CONTEXT - 100) if path != CHAT else "Given")
        yield Case(
            "B31",
            "more than the cache holds",
            path,
            request,
            status_on(path, INVALID),
            said,
            TOO_LONG,
            guarded=True,
        )
    for path, name in ((GENERATE, "inputs"), (COMPLETIONS, "prompt")):
        for id, text in (
            ("B24", "{}"),
            ("B25", '""'),
            ("B27", "null"),
            ("B28", "3"),
            ("B29", "{}"),
        ):
            body = "{}" if id == "B24" else document(path, "", text)
            yield Case(
                id,
                f"{name} {text}",
                path,
                post(path, body),
                status_on(path, INVALID),
                (f"`{name}`",),
            )
    yield Case("B25", "an empty message", CHAT, post(CHAT, document(CHAT, "", '""')), OK)
    for id, bad in (("B36", IDS), ("B37", LISTS)):
        for name, value, words in bad:
            text = json.dumps(value, separators=(",", ":"))
            yield Case(
                id,
                name,
                COMPLETIONS,
                post(COMPLETIONS, document(COMPLETIONS, "", text)),
                400,
                words,
            )
            if len(text) < 10**4 and value:
                yield Case(
                    id,
                    name,
                    GENERATE,
                    post(GENERATE, document(GENERATE, "", text)),
                    422,
                    ("`inputs`", "string"),
                )
                yield Case(
                    id,
                    name,
                    CHAT,
                    post(CHAT, document(CHAT, "", text)),
                    400,
                    ("messages.0.content",),
                )
    for id, name, messages, status in MESSAGES:
        members = {} if messages is ... else {"messages": messages}
        words = () if status == 413 else ("16384",) if status == MALFORMED else ("messages",)
        yield Case(
            id,
            name,
            CHAT,
            post(CHAT, json.dumps({"max_tokens": 2} | members)),
            status or 400,
            words,
        )
    # A special token that a message spells is text: thirteen tokens here, and not one. In a raw
    # prompt it is the token.
    special = '"<|endoftext|>"'
    around = len("# user: ") + len(" \n") + len("# assistant:")
    for path, count in ((CHAT, around + 13), (COMPLETIONS, 1)):
        request = post(path, document(path, "", special))
        yield Case(
            "B56",
            "a message like a token",
            path,
            request,
            OK,
            shows=lambda body, n=count: body["usage"]["prompt_tokens"] == n,
        )


def echoed(id: str, text: str, path: str) -> Iterator[Case]:
    """An odd but valid text: the answer begins with it on routes that can echo the prompt."""
    members = {
        GENERATE: '"return_full_text":true',
        COMPLETIONS: '"echo":true',
        CHAT: '"temperature":1',
    }[path]

    def shows(body: Any) -> bool:
        said = body["generated_text"] if path == GENERATE else body["choices"][0].get("text")
        return said is None or str(said).startswith(text)

    for ascii in (True, False):
        request = post(path, document(path, members, json.dumps(text, ensure_ascii=ascii)))
        yield Case(
            id, f"{text[:4]!r} {'escaped' if ascii else 'as it is'}", path, request, OK, shows=shows
        )
