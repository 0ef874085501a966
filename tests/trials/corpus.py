"""The requests of the recorded corpus, as data: what is sent to which server, in which order.

Invariant: every answer is determined by the table. Sampling is greedy, seeded, or limited to one
token (`top_k` 1, for `best_of`, which takes no seed), and the requests of a server are sent one
after another. The table knows HTTP and the documented fields of the API; it knows no module of the
server and nothing of how answers are compared.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KEY, OTHER_KEY, METRICS_KEY = "corpus-key", "corpus-other-key", "corpus-metrics-key"
JSON_HEADERS = ("content-type: application/json",)
BEARER, OTHER_BEARER, METRICS_BEARER = (
    f"authorization: Bearer {key}" for key in (KEY, OTHER_KEY, METRICS_KEY)
)
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}{{ '\\n' }}{% endfor "
    "%}{% if add_generation_prompt %}# assistant:{% endif %}"
)
Fields = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One request. `request` may hold `{NAME}` for the id of the resumable stream that an earlier
    row `saves` as NAME.

    `responses`: how many answers to read from the connection. `first_event`: read only the first
    event, and close. `ends`: record only the last event, and `head`: only status and headers, where
    timing decides what comes before or at all. `during`: stream requests that stay open while this
    row is answered. `settle`: wait until the server takes requests again. `until`: ask again until
    the status is this one. `metrics` and `openapi` name the comparison of the body, where it is not
    made byte by byte.
    """

    name: str
    request: bytes
    responses: int = 1
    saves: str = ""
    first_event: bool = False
    ends: bool = False
    head: bool = False
    during: tuple["Row", ...] = ()
    settle: bool = False
    until: int = 0
    metrics: bool = False
    openapi: bool = False


@dataclass(frozen=True)
class Server:
    """A server and its requests.

    `chat`: it serves the embedded model with a chat template added. `draining`: requests that are
    sent after SIGTERM. `bearer`: the header with a key that it takes, if it needs one.
    """

    name: str
    options: tuple[str, ...]
    rows: list[Row]
    chat: bool = False
    draining: tuple[Row, ...] = ()
    bearer: str = ""


def http(
    method: str, path: str, body: Any = None, headers: tuple[str, ...] = JSON_HEADERS
) -> bytes:
    """The bytes of a request. A body that is no text and no bytes is sent as JSON."""
    data = (
        body
        if isinstance(body, bytes)
        else body.encode()
        if isinstance(body, str)
        else json.dumps(body).encode()
    )
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers]
    if body is not None:
        lines.append(f"content-length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if body is None else data)


def post(name: str, path: str, body: Any, *headers: str, **options: Any) -> Row:
    return Row(
        f"POST {path} {name}", http("POST", path, body, (*JSON_HEADERS, *headers)), **options
    )


def bare(name: str, method: str, path: str, *headers: str, **options: Any) -> Row:
    """A request without a body."""
    return Row(f"{method} {path} {name}".rstrip(), http(method, path, None, headers), **options)


GENERATE, EVENTS, ROOT = "/generate", "/generate_stream", "/"
COMPLETIONS, CHAT, INFILL = "/v1/completions", "/v1/chat/completions", "/infill"
PROMPT = "class Stack:\n    def __init__(self):"
LONG_PROMPT = "".join(f"def function_{i}(a, b):\n    return a * {i} + b\n\n" for i in range(40))
UNICODE = 'name = "žluťoučký 日本語 😀"\nprint('
MESSAGES = [{"role": "user", "content": "Write a function that adds."}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}

# Sampling fields that every generating route but /infill has. Temperature is set to 0.8 where a row
# gives a seed.
SAMPLING: dict[str, Fields] = {
    "greedy": {},
    "seed": {"seed": 7},
    "largest seed": {"seed": 2**63 - 1},
    "top_k": {"top_k": 5, "seed": 1},
    "top_p": {"top_p": 0.7, "seed": 2},
    "min_p": {"min_p": 0.1, "seed": 3},
    "typical_p": {"typical_p": 0.5, "seed": 4},
    "repetition penalty": {"repetition_penalty": 1.3},
    "frequency and presence": {"frequency_penalty": 1.5, "presence_penalty": -0.5},
    "logit_bias": {"logit_bias": {"100": 50, "200": -100}, "seed": 5},
    "allowed_token_ids": {"allowed_token_ids": [10, 20, 30, 40], "seed": 6},
    "min_tokens": {"min_tokens": 8, "logit_bias": {"0": 100}},
    "stop_token_ids": {"stop_token_ids": [18, 225]},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"0": 20}},
    "ends at once": {"logit_bias": {"0": 100}},
    "all of them": {
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.95,
        "repetition_penalty": 1.1,
        "seed": 8,
    },
}
STOPS: dict[str, Fields] = {
    "stop": {"stop": ["self.", "#\n# -"]},
    "stop that never comes": {"stop": ["never-ever"]},
    "stop of one letter": {"stop": ["e", "#"]},
}
TGI: dict[str, Fields] = {
    **SAMPLING,
    **STOPS,
    "do_sample": {"do_sample": True, "seed": 9},
    "top_n_tokens": {"top_n_tokens": 3},
    "truncate": {"truncate": 3},
    "return_full_text": {"return_full_text": True},
    "token_healing": {"token_healing": True},
    "regex": {"grammar": {"type": "regex", "value": "[a-c]{3,6}-[0-9]+"}},
    "JSON schema": {"grammar": {"type": "json", "value": POINT}},
    "any JSON": {"grammar": {"type": "json_object"}, "logit_bias": {"93": 5}},
    "wrapped schema": {
        "grammar": {"type": "json_schema", "value": {"name": "point", "schema": POINT}},
        "seed": 10,
    },
    "watermark": {"watermark": False},
    "no details": {"details": False},
}
WHOLE_ALONE: dict[str, Fields] = {
    "best_of": {"best_of": 3, "do_sample": True, "top_k": 1},
    "prefill": {"decoder_input_details": True},
    "long": {"truncate": 600},
}
AT_ROOT: dict[str, Fields] = {
    "greedy": {},
    "seed": {"seed": 3},
    "no full text": {"return_full_text": False},
    "stop": {"stop": ["self"]},
}
OPENAI: dict[str, Fields] = {
    **SAMPLING,
    **STOPS,
    "stop as a text": {"stop": "self", "include_stop_str_in_output": True},
    "stop token kept": {
        "stop_token_ids": [18, 225],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    },
    "special tokens": {"skip_special_tokens": False, "logit_bias": {"0": 100}},
    "bad_words": {"bad_words": ["self", "def"]},
    "n": {"n": 3, "seed": 11},
    "token ids": {"return_token_ids": True},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "truncated": {"truncate_prompt_tokens": 4},
    "request_id": {"request_id": "my-own-id_1"},
    "harmless": {
        "user": "a",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "use_beam_search": False,
    },
    "priority and salt": {"priority": -3, "cache_salt": "salt", "timeout_s": 600},
    "JSON schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "point", "schema": POINT, "strict": True},
        }
    },
    "JSON object": {"response_format": {"type": "json_object", "schema": POINT}},
    "text format": {"response_format": {"type": "text"}},
    "regex": {"structured_outputs": {"regex": "(yes|no), [0-9]{2}"}},
    "choice": {"structured_outputs": {"choice": ["alpha", "beta", "gamma"]}},
    "lark": {"structured_outputs": {"grammar": 'start: "x=" NUMBER\nNUMBER: /[0-9]{1,3}/'}},
    "schema in a string": {"structured_outputs": {"json": json.dumps(POINT)}},
}
COMPLETION: dict[str, Fields] = {
    "logprobs": {"logprobs": 3},
    "logprobs of 0": {"logprobs": 0, "seed": 12},
    "named logprobs": {
        "logprobs": 1,
        "logprob_token_ids": [1, 2, 3],
        "return_tokens_as_token_ids": True,
    },
    "echo": {"echo": True},
    "echo and logprobs": {"echo": True, "logprobs": 2},
    "echo alone": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "suffix": {"suffix": "\n    return a\n"},
    "suffix, no healing": {"suffix": "\n    return a\n", "token_healing": False},
    "token_healing": {"prompt": "class Stack:\n    def __in", "token_healing": True},
    "ids": {"prompt": [100, 200, 300, 400], "return_token_ids": True},
    "several texts": {"prompt": ["a = ", "b = ", "import "]},
    "several lists of ids": {"prompt": [[1, 2, 3], [400, 500]], "n": 2, "seed": 13},
    "bare": {"add_special_tokens": False},
    "unicode": {"prompt": UNICODE, "logprobs": 2, "max_tokens": 24},
    "long": {"prompt": LONG_PROMPT},
    "long again": {"prompt": LONG_PROMPT, "logprobs": 1},
    "no max_tokens": {"max_tokens": None},
    "model": {"model": "embedded"},
}
CHATTING: dict[str, Fields] = {
    "stop kept": {"stop": "\n#", "include_stop_str_in_output": True},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 4},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 6},
    "no generation prompt": {"add_generation_prompt": False},
    "conversation": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}],
            },
            {"role": "assistant", "content": "Three.", "name": "x"},
            {"role": "user", "content": "<|endoftext|> Four?"},
        ]
    },
    "no tools": {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "modalities": ["text"],
    },
}
INFILLING: dict[str, Fields] = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 1},
    "samplers": {"seed": 2, "samplers": ["top_k", "temperature"], "top_k": 3},
    "extra files": {
        "temperature": 0,
        "input_extra": [
            {"filename": "a.py", "text": "import os\n", "time": 1},
            {"text": "b = 1\n"},
        ],
    },
    "prompt": {"temperature": 0, "prompt": "    result = ad"},
    "no healing": {"temperature": 0, "token_healing": False},
    "n_indent": {"temperature": 0, "n_indent": 4, "n_predict": 40},
    "stop": {"temperature": 0, "stop": ["\n"]},
    "penalties": {
        "temperature": 0,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "response_fields": {
        "temperature": 0,
        "response_fields": ["content", "stop_type", "timings/predicted_n", "missing/field"],
    },
    "editors": {
        "temperature": 0,
        "cache_prompt": False,
        "model": "any",
        "id_slot": 0,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 60000,
    },
}


def fields_of(given: Fields, name: str) -> Fields:
    """A row's fields with a limit of tokens called `name`, and the temperature that fits its
    seed.
    """
    limit = 40 if {"grammar", "response_format", "structured_outputs"} & given.keys() else 12
    temperature = (
        {"temperature": 0.8}
        if "seed" in given
        else {}
        if name == "max_new_tokens"
        else {"temperature": 0}
    )
    return {name: limit} | temperature | given


def tgi(given: Fields, prompt: str = PROMPT) -> Fields:
    return {"inputs": prompt, "parameters": fields_of({"details": True} | given, "max_new_tokens")}


def generating() -> Iterator[Row]:
    """Every generating route with every field, as a whole answer and as a stream."""
    for name, given in TGI.items():
        yield post(name, GENERATE, tgi(given))
        yield post(name, EVENTS, tgi(given))
    for name, given in WHOLE_ALONE.items():
        yield post(name, GENERATE, tgi(given, LONG_PROMPT))
    for name, given in AT_ROOT.items():
        yield post(name, ROOT, tgi(given))
        yield post(f"{name}, stream", ROOT, {**tgi(given), "stream": True})
    yield post(
        "stream true",
        GENERATE,
        {
            **tgi({}),
            "stream": True,
            "options": {"use_cache": False},
            "use_cache": True,
            "model": "any",
        },
    )
    yield post("unicode", GENERATE, tgi({"top_n_tokens": 5, "max_new_tokens": 24}, UNICODE))
    yield post("unicode, stream", EVENTS, tgi({"max_new_tokens": 24}, UNICODE))
    usage = {"include_usage": True}
    for name, given in (OPENAI | COMPLETION).items():
        body = fields_of({"prompt": PROMPT} | given, "max_tokens")
        yield post(name, COMPLETIONS, body)
        yield post(f"{name}, stream", COMPLETIONS, body | {"stream": True})
    for name, given in (OPENAI | CHATTING).items():
        body = fields_of({"messages": MESSAGES} | given, "max_tokens")
        yield post(name, CHAT, body)
        yield post(f"{name}, stream", CHAT, body | {"stream": True})
    for route, start in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        body = fields_of(start, "max_tokens") | {"stream": True}
        yield post("usage", route, body | {"stream_options": usage})
        yield post(
            "continuous usage",
            route,
            body | {"stream_options": usage | {"continuous_usage_stats": True}},
        )
    yield post(
        "best_of",
        COMPLETIONS,
        {
            "prompt": PROMPT,
            "n": 2,
            "best_of": 4,
            "max_tokens": 8,
            "seed": 5,
            "temperature": 1,
            "logprobs": 1,
        },
    )
    for name, given in INFILLING.items():
        body = {
            "input_prefix": "def add(a, b):\n",
            "input_suffix": "\n    return a\n",
            "n_predict": 16,
        } | given
        yield post(name, INFILL, body)
        yield post(f"{name}, stream", INFILL, body | {"stream": True})


TOKENIZE: dict[str, Fields] = {
    "inputs": {"inputs": PROMPT},
    "inputs unicode": {"inputs": UNICODE, "parameters": {"max_new_tokens": 4}},
    "prompt": {"prompt": PROMPT},
    "prompt names": {"prompt": UNICODE, "return_token_strs": True, "add_special_tokens": False},
    "messages": {"messages": MESSAGES},
    "messages alone": {"messages": MESSAGES, "add_generation_prompt": False, "model": "embedded"},
    "nothing": {},
    "two": {"inputs": "a", "prompt": "b"},
    "flags beside inputs": {"inputs": "a", "return_token_strs": True},
    "unknown model": {"prompt": "a", "model": "gpt-4"},
    "empty": {"inputs": ""},
}
DETOKENIZE: dict[str, Fields] = {
    "ids": {"tokens": [100, 200, 300]},
    "special": {"tokens": [0, 1, 2], "model": ""},
    "none": {"tokens": []},
    "too large": {"tokens": [4096]},
    "negative": {"tokens": [-1]},
    "texts": {"tokens": ["a"]},
    "missing": {},
}


def reading() -> Iterator[Row]:
    """Probes, documents and what is said of models and tokens."""
    for path in ("/live", "/ready", "/health", "/ping", "/version", "/plan", "/metrics"):
        yield bare("", "GET", path, metrics=path == "/metrics")
        yield bare("", "HEAD", path, metrics=path == "/metrics")
    for path in (
        "/info",
        "/docs",
        "/v1/models",
        "/v1/models/",
        "/v1/models/embedded",
        "/v1/models/a%2Fb",
        "/v1/models/gpt-4",
    ):
        yield bare("", "GET", path)
    yield bare("", "GET", "/openapi.json", openapi=True)
    static = "/static-offline-docs/swagger-ui"
    yield bare("", "GET", f"{static}.css")
    yield bare("", "HEAD", f"{static}-bundle.js")
    yield bare("a range", "GET", f"{static}.css", "range: bytes=0-99")
    yield bare("", "GET", "/static-offline-docs/../model/config.json")
    for name, body in TOKENIZE.items():
        yield post(name, "/tokenize", body)
    for name, body in DETOKENIZE.items():
        yield post(name, "/detokenize", body)
    yield bare("own request id", "GET", "/live", "x-request-id: my_own-id")
    yield bare("request id with a space", "GET", "/live", "x-request-id: my own id")


def resuming() -> Iterator[Row]:
    """Resumable streams: read again whole, in part, while they run, and ended."""
    header = "x-stream-resumable: 1"
    long = {"max_new_tokens": 60, "ignore_eos": True}
    yield post("resumable", EVENTS, {**tgi(long), "resumable": True}, saves="whole")
    path = "/v1/streams/{whole}"
    for query in (
        "",
        "?after=0",
        "?after=57",
        "?after=60",
        "?after=61",
        "?after=x",
        "?after=1&after=2",
    ):
        yield bare("ended", "GET", path + query)
    for number in ("{whole}.0", "{whole}.58", "{whole}.60", "{whole}.99", "another.1", "nonsense"):
        yield bare(f"last-event-id {number}", "GET", path, f"last-event-id: {number}")
    yield post(
        "resumable, left",
        GENERATE,
        {**tgi(long), "stream": True},
        header,
        saves="left",
        first_event=True,
    )
    yield bare("still running", "GET", "/v1/streams/{left}?after=1")
    yield bare("when ended", "DELETE", "/v1/streams/{left}")
    for name, route, start in (
        ("completion", COMPLETIONS, {"prompt": PROMPT}),
        ("chat", CHAT, {"messages": MESSAGES}),
    ):
        body = fields_of(start, "max_tokens") | {"stream": True, "max_tokens": 8}
        yield post("resumable", route, body | {"resumable": True}, saves=name)
        yield bare(name, "GET", f"/v1/streams/{{{name}}}?after=3")
    yield post(
        "resumable",
        INFILL,
        {
            "input_prefix": "a",
            "input_suffix": "b",
            "temperature": 0,
            "n_predict": 4,
            "stream": True,
        },
        header,
    )
    endless: dict[str, tuple[str, Fields]] = {
        "cut-tgi": (EVENTS, tgi({"max_new_tokens": 3500, "ignore_eos": True})),
        "cut-openai": (
            COMPLETIONS,
            {"prompt": PROMPT, "temperature": 0, "max_tokens": 3500, "ignore_eos": True},
        ),
    }
    for name, (route, start) in endless.items():
        body = {**start, "stream": True, "resumable": True}
        yield post("to be cancelled", route, body, saves=name, first_event=True)
        yield bare(name, "DELETE", f"/v1/streams/{{{name}}}")
        yield bare(f"{name} cancelled", "GET", f"/v1/streams/{{{name}}}", ends=True)
    yield bare("unknown", "GET", "/v1/streams/unknown")
    yield bare("unknown", "DELETE", "/v1/streams/unknown")
    for method in ("POST", "HEAD", "PUT"):
        yield bare("wrong method", method, "/v1/streams/unknown")
    yield post("resumable, whole", GENERATE, {**tgi({}), "resumable": True})
    yield post("resumable, whole", COMPLETIONS, {"prompt": "a", "resumable": True})


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
