"""The second half of the recorded corpus: requests that are refused, broken HTTP, and the three
servers with their options.

Invariant: as in `corpus`, every answer is determined by the table. Where a refusal depends on load,
a stream that is held open makes the load. This table knows HTTP and the documented bounds of
fields; it knows no module of the server.
"""

from collections.abc import Iterator
from typing import Any

from tests.trials.corpus import (
    BEARER,
    CHAT,
    COMPLETIONS,
    EVENTS,
    GENERATE,
    INFILL,
    JSON_HEADERS,
    KEY,
    MESSAGES,
    METRICS_BEARER,
    METRICS_KEY,
    OTHER_BEARER,
    OTHER_KEY,
    ROOT,
    Row,
    Server,
    bare,
    digest,
    generating,
    http,
    post,
    reading,
    resuming,
)

# Field, value: refused on every route that has the field, as unknown on the others.
BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", 5000),
    ("top_p", 0),
    ("top_p", 1.01),
    ("min_p", 2),
    ("typical_p", 0),
    ("repetition_penalty", 0),
    ("frequency_penalty", 3),
    ("presence_penalty", "none"),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"4096": 1}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [5000]),
    ("seed", -2),
    ("seed", 2**63),
    ("seed", 1.5),
    ("min_tokens", 100),
    ("stop_token_ids", [1] * 129),
    ("stop_token_ids", [9999]),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", 5),
    ("ignore_eos", "yes"),
    ("best_of", 0),
    ("best_of", 129),
    ("watermark", True),
    ("top_n_tokens", 6),
    ("truncate", 0),
    ("grammar", {"type": "regex"}),
    ("grammar", {"type": "regex", "value": "("}),
    ("grammar", {"type": "xml"}),
    ("grammar", {"type": "json", "value": {"type": "unheard"}}),
    ("n", 0),
    ("n", True),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("stream_options", {"include_usage": True}),
    ("response_format", {"type": "json_schema"}),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/missing"}}},
    ),
    ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}),
    ("structured_outputs", {"grammar": "start: ("}),
    ("structured_outputs", {"choice": []}),
    ("truncate_prompt_tokens", 0),
    ("request_id", "not an id"),
    ("service_tier", "flex"),
    ("model", "gpt-4"),
    ("tools", [{}]),
    ("max_tokens", 0),
    ("max_tokens", 100_000),
    ("max_tokens", -1),
    ("max_new_tokens", 3.5),
    ("guided_regex", "a"),
    ("temprature", 1),
    ("suffix", 1),
]
# The same in both dialects.
BAD_BODIES: dict[str, bytes | str] = {
    "empty": "",
    "no JSON": "{nope}",
    "half": '{"inputs": "a"',
    "a list": "[]",
    "a text": '"a"',
    "a key twice": '{"prompt": "a", "prompt": "b"}',
    "NaN": '{"prompt": "a", "temperature": NaN}',
    "too large a number": '{"prompt": "a", "temperature": 1e999}',
    "a lone surrogate": '{"prompt": "\\ud800"}',
    "a number of thousands of digits": '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
    "nested": '{"prompt": ' + "[" * 70 + "]" * 70 + "}",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "missing": "{}",
    "nulls": '{"prompt": null, "inputs": null, "messages": null}',
    "an unknown key with controls": '{"\\u0007bell\\n": 1, "inputs": "a", "prompt": "a"}',
}
GOOD = '{"inputs": "a", "parameters": {"max_new_tokens": 2}}'
GOOD_COMPLETION = {"prompt": "a", "max_tokens": 2, "temperature": 0}
MEDIA: dict[str, tuple[str, ...]] = {
    "no content-type": (),
    "text/plain": ("content-type: text/plain",),
    "a form": ("content-type: application/x-www-form-urlencoded",),
    "latin-1": ("content-type: application/json; charset=latin-1",),
    "utf-8 stated": ("content-type: Application/JSON; charset=UTF-8",),
    "gzip": (*JSON_HEADERS, "content-encoding: gzip"),
    "identity": (*JSON_HEADERS, "content-encoding: identity"),
}
WRONG_METHODS: list[tuple[str, str]] = [
    *(
        (method, path)
        for path in (GENERATE, ROOT, COMPLETIONS, INFILL)
        for method in ("GET", "PUT", "OPTIONS", "HEAD")
    ),
    *(("GET", path) for path in (EVENTS, CHAT, "/tokenize", "/detokenize")),
    *(
        (method, path)
        for path in ("/ready", "/metrics", "/info", "/v1/models", "/docs")
        for method in ("POST", "DELETE", "OPTIONS")
    ),
]
UNKNOWN_ROUTES = [
    "/nothing",
    "/v1/nothing",
    "/v1",
    "/generate/",
    "/v2/generate",
    "//generate",
    "/v1/../health",
    "/live%0a",
    "/Live",
]
LINE = "POST /generate HTTP/1.1\r\nhost: localhost\r\n"
FRAMED = f"content-type: application/json\r\ncontent-length: {len(GOOD)}\r\n\r\n{GOOD}"
CHUNKED = "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = "connection: close\r\n"
# Broken or unusual HTTP, as it goes over the socket.
RAW: dict[str, str | bytes] = {
    "chunks": LINE
    + CHUNKED
    + f"5\r\n{GOOD[:5]}\r\n{len(GOOD) - 5:x};ext=1\r\n{GOOD[5:]}\r\n0\r\n\r\n",
    "trailers": LINE + CHUNKED + f"{len(GOOD):x}\r\n{GOOD}\r\n0\r\nx-trailer: 1\r\n\r\n",
    "a chunk's size that is none": LINE + CHUNKED + "zz\r\nabc\r\n0\r\n\r\n",
    "no host": LINE.replace("host: localhost\r\n", "") + FRAMED,
    "two hosts": LINE + "host: y\r\n" + FRAMED,
    "a host with a path": LINE.replace("host: localhost", "host: localhost/y") + FRAMED,
    "an unknown method": LINE.replace("POST", "BREW") + FRAMED,
    "a lower-case method": LINE.replace("POST", "post") + FRAMED,
    "no method at all": "hello\r\n\r\n",
    "a negative length": LINE + "content-length: -1\r\n\r\n",
    "two lengths": LINE + "content-length: 1\r\n" + FRAMED,
    "length and chunks": LINE + "transfer-encoding: chunked\r\n" + FRAMED,
    "an unknown coding": LINE + "transfer-encoding: xchunked\r\n\r\n",
    "a folded header": LINE + "x-a: b\r\n c\r\n" + FRAMED,
    "a space before the colon": LINE + "x-a : b\r\n" + FRAMED,
    "NUL in a header": LINE + "x-a: \0\r\n" + FRAMED,
    "a header without a name": LINE + ": b\r\n" + FRAMED,
    "101 headers": LINE + "".join(f"x-{i}: y\r\n" for i in range(101)) + FRAMED,
    "a head above the limit": LINE + f"x-a: {'b' * 40_000}\r\n" + FRAMED,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
    "HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an offer of HTTP/2": LINE
    + "upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABkAARAAAAA\r\n"
    + FRAMED,
    "CONNECT": "CONNECT x:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "HTTP/1.0": "GET /live HTTP/1.0\r\n\r\n",
    "HTTP/3.0": "GET /live HTTP/3.0\r\nhost: localhost\r\n\r\n",
    "an absolute target": "GET http://x/live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "an asterisk": "OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a query": "GET /live?a=b&a HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "connection: close": LINE + LAST + FRAMED,
    "expect": LINE + "expect: 100-continue\r\n" + FRAMED,
    "empty lines before": "\r\n\r\n" + LINE + FRAMED,
}


def dialects(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(route, body) with the same fields in each dialect, below a limit of tokens that a field may
    replace.
    """
    yield GENERATE, {"inputs": "a b", "parameters": {"max_new_tokens": 4} | fields}
    yield COMPLETIONS, {"prompt": "a b", "max_tokens": 4, "temperature": 0} | fields
    yield CHAT, {"messages": MESSAGES, "max_tokens": 4, "temperature": 0} | fields
    yield (
        INFILL,
        {"input_prefix": "a", "input_suffix": "b", "n_predict": 4, "temperature": 0} | fields,
    )


# Refusals of one route each: (name, route, body).
SINGLE: list[tuple[str, str, Any]] = [
    ("stream false", EVENTS, {"inputs": "a", "stream": False}),
    ("best_of, stream", EVENTS, {"inputs": "a", "parameters": {"best_of": 2, "do_sample": True}}),
    ("prefill, stream", EVENTS, {"inputs": "a", "parameters": {"decoder_input_details": True}}),
    ("best_of, greedy", GENERATE, {"inputs": "a", "parameters": {"best_of": 2}}),
    (
        "best_of, seed",
        GENERATE,
        {"inputs": "a", "parameters": {"best_of": 2, "do_sample": True, "seed": 1}},
    ),
    ("no inputs", GENERATE, {"parameters": {}}),
    ("empty inputs", GENERATE, {"inputs": ""}),
    ("inputs of another type", GENERATE, {"inputs": ["a"]}),
    ("parameters of another type", GENERATE, {"inputs": "a", "parameters": []}),
    ("a field too high up", GENERATE, {"inputs": "a", "max_new_tokens": 4}),
    (
        "healing and grammar",
        GENERATE,
        {"inputs": "a", "parameters": {"token_healing": True, "grammar": {"type": "json_object"}}},
    ),
    ("too long", GENERATE, {"inputs": "a b " * 4000}),
    ("best_of below n", COMPLETIONS, {"prompt": "a", "n": 3, "best_of": 2}),
    ("too many sequences", COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}),
    ("too many prompts", COMPLETIONS, {"prompt": ["a"] * 257}),
    ("mixed prompts", COMPLETIONS, {"prompt": ["a", [1]]}),
    ("an empty prompt", COMPLETIONS, {"prompt": []}),
    ("an empty list of ids", COMPLETIONS, {"prompt": [[]]}),
    ("ids that are none", COMPLETIONS, {"prompt": [1, "a"]}),
    ("an id too large", COMPLETIONS, {"prompt": [4096]}),
    ("echo and suffix", COMPLETIONS, {"prompt": "a", "suffix": "b", "echo": True}),
    ("ids and healing", COMPLETIONS, {"prompt": [1], "token_healing": True}),
    ("best_of, stream", COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}),
    (
        "two constraints",
        COMPLETIONS,
        {
            "prompt": "a",
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
        },
    ),
    (
        "grammar and ids",
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]},
    ),
    ("named ids without logprobs", COMPLETIONS, {"prompt": "a", "logprob_token_ids": [1]}),
    ("too long", COMPLETIONS, {"prompt": "a b " * 4000}),
    ("no messages", CHAT, {"messages": []}),
    ("a role", CHAT, {"messages": [{"role": "wizard", "content": "a"}]}),
    (
        "an image",
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
    ),
    ("no content", CHAT, {"messages": [{"role": "user"}]}),
    ("two limits", CHAT, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}),
    ("top_logprobs alone", CHAT, {"messages": MESSAGES, "top_logprobs": 2}),
    ("no suffix", INFILL, {"input_prefix": "a"}),
    (
        "an extra file without text",
        INFILL,
        {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "a"}]},
    ),
    ("unknown samplers", INFILL, {"input_prefix": "a", "input_suffix": "b", "samplers": ["dry"]}),
]


def refused() -> Iterator[Row]:
    """What a server without keys refuses, and unusual requests that it takes."""
    for number, (field, value) in enumerate(BAD_FIELDS):
        for route, body in dialects({field: value}):
            if route in (GENERATE, COMPLETIONS) or number % 3 == 0:
                yield post(f"field {number} {field}", route, body)
    for name, route, body in SINGLE:
        yield post(name, route, body)
    for method, path in WRONG_METHODS:
        yield bare("wrong method", method, path)
    for path in UNKNOWN_ROUTES:
        yield bare("unknown route", "GET", path)
        yield post("unknown route", path, GOOD)
    for name, raw in RAW.items():
        yield Row(f"raw {name}", raw if isinstance(raw, bytes) else raw.encode("latin-1"))
    yield Row(
        "raw pipelined",
        (LINE + FRAMED + "GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").encode() * 2,
        responses=4,
    )
    yield Row("raw pipelined garbage", (LINE + FRAMED + "nonsense\r\n\r\n").encode())


def refused_bodies() -> Iterator[Row]:
    """Bodies that are refused before their fields are looked at."""
    for name, text in BAD_BODIES.items():
        for route in (GENERATE, COMPLETIONS):
            yield post(f"body: {name}", route, text)
    for route in (ROOT, CHAT, INFILL, "/tokenize", "/detokenize"):
        yield post("body: no JSON", route, "{nope}")
    for name, headers in MEDIA.items():
        yield Row(f"media {name}", http("POST", GENERATE, GOOD, headers))
        yield Row(f"media {name} v1", http("POST", COMPLETIONS, GOOD_COMPLETION, headers))
    yield post("too large", GENERATE, '{"inputs": "' + "a" * (2 * 2**20) + '"}')


HOLD = post(
    "held open",
    EVENTS,
    {"inputs": "a", "parameters": {"max_new_tokens": 3900, "ignore_eos": True}},
    BEARER,
)
HOLD_TWO = post(
    "two held open",
    COMPLETIONS,
    {
        "prompt": "a",
        "n": 2,
        "max_tokens": 3900,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    },
    BEARER,
)


def guarded() -> Iterator[Row]:
    """A server with keys, small limits, and no chat template."""
    keys = {
        "no key": (),
        "a wrong key": ("authorization: Bearer wrong",),
        "no scheme": (f"authorization: {KEY}",),
        "basic": (f"authorization: Basic {KEY}",),
        "a lower-case scheme": (f"authorization: bearer {KEY}",),
        "twice": (BEARER, BEARER),
        "the other key": (OTHER_BEARER,),
        "the metrics key": (METRICS_BEARER,),
    }
    for name, headers in keys.items():
        yield post(f"key: {name}", GENERATE, GOOD, *headers)
        yield post(f"key: {name}", COMPLETIONS, GOOD_COMPLETION, *headers)
        yield bare(f"key: {name}", "GET", "/v1/models", *headers)
        yield bare(f"key: {name}", "GET", "/metrics", *headers, metrics=True)
    for path in (
        "/live",
        "/ready",
        "/info",
        "/docs",
        "/openapi.json",
        "/nothing",
        "/plan",
        "/version",
        "/v1/streams/x",
        "/live/x",
    ):
        yield bare("without a key", "GET", path)
    yield bare("with a key", "GET", "/openapi.json", BEARER, openapi=True)
    for path in ("/info", "/plan", "/v1/models/second-name", "/nothing"):
        yield bare("with a key", "GET", path, BEARER)
    yield post("large body", GENERATE, {"inputs": "a" * 1100}, BEARER)
    yield post("large body", COMPLETIONS, {"prompt": "a" * 1100}, BEARER)
    chunk = "a" * 600
    body = CHUNKED + f"258\r\n{chunk}\r\n258\r\n{chunk}\r\n0\r\n\r\n"
    yield Row(
        "large body in chunks",
        f"POST /generate HTTP/1.1\r\nhost: localhost\r\n{BEARER}\r\n{body}".encode(),
    )
    yield Row(
        "large head",
        f"GET /live HTTP/1.1\r\nhost: localhost\r\nx-a: {'b' * 40_000}\r\n\r\n".encode(),
    )
    yield post("no chat template", CHAT, {"messages": MESSAGES}, BEARER)
    yield post("no chat template", "/tokenize", {"messages": MESSAGES}, BEARER)
    yield post(
        "stop strings", GENERATE, {"inputs": "a", "parameters": {"stop": ["a"] * 17}}, BEARER
    )
    yield post("stop strings", COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, BEARER)
    yield post("too many at once", COMPLETIONS, {"prompt": "a", "n": 3, "temperature": 0}, BEARER)
    yield post("second name", COMPLETIONS, GOOD_COMPLETION | {"model": "second-name"}, BEARER)
    stream = {
        "inputs": "a",
        "parameters": {"max_new_tokens": 40, "ignore_eos": True},
        "resumable": True,
    }
    yield post("resumable", EVENTS, stream, BEARER, saves="own", head=True)
    yield bare("own, from the second event on", "GET", "/v1/streams/{own}?after=1", BEARER)
    yield bare("another's", "GET", "/v1/streams/{own}", OTHER_BEARER)
    yield bare("another's", "DELETE", "/v1/streams/{own}", OTHER_BEARER)
    yield bare("own without a key", "GET", "/v1/streams/{own}")
    for route, fields in dialects({}):
        yield post("while two are open", route, fields, BEARER, during=(HOLD_TWO,), settle=True)
    yield bare("while two are open", "GET", "/ready", during=(HOLD_TWO,), settle=True)
    yield post(
        "waited too long",
        GENERATE,
        {"inputs": "a", "timeout_s": 0.3},
        BEARER,
        during=(HOLD,),
        settle=True,
    )
    yield post(
        "waited too long",
        COMPLETIONS,
        {"prompt": "a", "timeout_s": 0.3},
        BEARER,
        during=(HOLD,),
        settle=True,
    )
    held = post(
        "with a key of its own",
        EVENTS,
        {"inputs": "a", "parameters": {"max_new_tokens": 3900}},
        BEARER,
        "idempotency-key: one",
    )
    yield post(
        "same Idempotency-Key",
        GENERATE,
        GOOD,
        BEARER,
        "idempotency-key: one",
        during=(held,),
        settle=True,
    )
    yield bare("at the end", "GET", "/metrics", METRICS_BEARER, metrics=True)


LAST_METRICS = bare("at the end", "GET", "/metrics", metrics=True)


def behind_a_proxy() -> Iterator[Row]:
    """A server with a path prefix, one origin of browsers, and no retention of streams."""
    for prefix in ("", "/llm"):
        for path in ("/live", "/v1/models", "/nothing", "/docs"):
            yield bare("prefix", "GET", prefix + path)
        yield post("prefix", f"{prefix}{GENERATE}", GOOD)
        yield post("prefix, refused", f"{prefix}{COMPLETIONS}", {"prompt": "a", "n": 0})
    yield bare("prefix alone", "GET", "/llm")
    yield post("prefix alone", "/llm", GOOD)
    for origin in ("https://page.example", "https://other.example"):
        preflight = (
            f"origin: {origin}",
            "access-control-request-method: POST",
            "access-control-request-headers: content-type",
        )
        yield bare(f"preflight {origin}", "OPTIONS", GENERATE, *preflight)
        yield post(f"origin {origin}", GENERATE, GOOD, f"origin: {origin}")
        yield post(f"origin {origin}, refused", GENERATE, "{", f"origin: {origin}")
    yield post(
        "resumable",
        EVENTS,
        {"inputs": "a", "parameters": {"max_new_tokens": 3}, "resumable": True},
        saves="expired",
    )
    yield bare("expired", "GET", "/v1/streams/{expired}", until=410)
    yield bare("expired", "DELETE", "/v1/streams/{expired}")
    yield Row("a head that never ends", b"GET /live HTTP/1.1\r\nhost: localhost\r\n")
    yield Row(
        "a body that never ends",
        (LINE + "content-type: application/json\r\ncontent-length: 50\r\n\r\n{").encode(),
    )
    yield post("too long for the context", GENERATE, {"inputs": "a b " * 300})
    yield post(
        "up to the context",
        GENERATE,
        {"inputs": "a b " * 70, "parameters": {"details": True, "ignore_eos": True}},
    )
    yield LAST_METRICS


DRAINING = (
    *(
        bare("draining", "GET", path)
        for path in ("/ready", "/health", "/live", "/info", "/nothing")
    ),
    *(post("draining", route, body) for route, body in dialects({})),
)
ONE_THREAD = ("--engine.threads", "1", "--cache.pages", "512")
NO_GRACE = ("--server.lb_grace", "0")
SERVERS = (
    Server(
        "open",
        (*ONE_THREAD, *NO_GRACE),
        [*reading(), *generating(), *resuming(), *refused(), *refused_bodies(), LAST_METRICS],
        chat=True,
    ),
    Server(
        "guarded",
        (
            *ONE_THREAD,
            *NO_GRACE,
            *(
                "--server.api_keys",
                f"{digest(KEY)},{digest(OTHER_KEY)}",
                "--server.metrics_key",
                digest(METRICS_KEY),
            ),
            *(
                "--engine.max_running",
                "1",
                "--server.max_waiting",
                "1",
                "--server.max_body_bytes",
                "1024",
            ),
            *("--server.model_name", "first-name", "--server.served_model_names", "second-name"),
        ),
        list(guarded()),
        bearer=BEARER,
    ),
    Server(
        "proxied",
        (
            *ONE_THREAD,
            *(
                "--server.root_path",
                "/llm",
                "--server.cors_origins",
                "https://page.example",
                "--engine.max_context",
                "256",
            ),
            *("--server.resume_retention", "0"),
            *("--server.lb_grace", "5", "--engine.quantization", "int8"),
        ),
        list(behind_a_proxy()),
        draining=DRAINING,
    ),
)
