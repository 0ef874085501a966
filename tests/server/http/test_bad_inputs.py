"""Bad input on TGI's routes is refused in TGI's form, quickly, and before the engine gets a
request.

The application is the one that `onehead serve` runs; only the engine's process is replaced. Every
token of the test tokenizer is one byte, so lengths of prompts can be read off.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.config import ServerSection
from tests.support.fake_engine import READY, FakeEngine, Served, serve

JSON = {"content-type": "application/json"}
SECRET = "xyzzy-plugh"
"""A text in every prompt and stop string below, which no answer to a bad request may repeat."""
PREFIX = "Input validation error: "
CANARY = {"inputs": "def f(", "parameters": {"max_new_tokens": 8, "seed": 3, "do_sample": True}}


async def start(
    tokenizer_folder: Path, engine: FakeEngine | None = None, section: ServerSection | None = None
) -> Served:
    """The application over a ready engine."""
    served = serve(tokenizer_folder, engine, section)
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    return served


@pytest.fixture
async def served(tokenizer_folder: Path) -> Served:
    return await start(tokenizer_folder)


async def send(
    served: Served, body: Any, path: str = "/generate", headers: Any = JSON, method: str = "POST"
) -> httpx.Response:
    """`body` as it is where it is bytes (or an iterator of them), as JSON otherwise."""
    transport = httpx.ASGITransport(served.app, raise_app_exceptions=False)
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", trust_env=False
    ) as client:
        return await client.request(method, path, content=content, headers=headers)


def assert_refused(response: httpx.Response, status: int, *words: str) -> None:
    """The dialect's error body, with all of `words`, without the client's text, short and safe to
    log.
    """
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body == {"error": body["error"]} | (
        {} if status in (404, 405) else {"error_type": "validation"}
    )
    message = body["error"]
    assert message.isascii() and message.isprintable() and len(message) < 250
    assert SECRET not in message
    assert status != 422 or message.startswith(PREFIX)
    for word in words:
        assert word in message, message


async def assert_canary(served: Served) -> None:
    """A valid request still gets exactly the tokens of the fake engine."""
    response = await send(served, CANARY)
    assert response.status_code == 200, response.text
    expected = served.generation.codec.decode(served.engine.answer(served.engine.submits[-1]))
    assert response.json() == {"generated_text": expected}
    assert served.supervisor.open == {}


class Case(NamedTuple):
    """A request, its status, and what the message must name."""

    name: str
    body: Any
    status: int = 200
    words: tuple[str, ...] = ()


def prompt_and(rest: str) -> bytes:
    """A body that is good up to `rest`."""
    return f'{{"inputs":"{SECRET}"{rest}'.encode()


def with_parameter(name: str, value: Any, **others: Any) -> dict[str, Any]:
    return {"inputs": SECRET, "parameters": {"max_new_tokens": 4, **others, name: value}}


GOOD = prompt_and(',"parameters":{"max_new_tokens":2}}')
DEEP = 10**5

# Fields that TGI's dialect alone has, or whose bounds are its own: name -> [(values, words beside
# the name)]. All values are refused. tests/server/http/test_front.py has what all dialects share.
BAD_PARAMETERS: dict[str, list[tuple[list[Any], tuple[str, ...]]]] = {
    "max_new_tokens": [([0, -1], (">= 1",)), ([2**31, 10**300], ("< 2147483648",))],
    "min_tokens": [([-1], (">= 0",)), ([5], ("<= `max_new_tokens` 4", "Given: 5"))],
    "typical_p": [([0, -0.5], ("> 0",)), ([1.5], ("<= 1",)), ([True], ("number",))],
    "repetition_penalty": [([1e-45, 0.0099], (">= 0.01",)), ([10.001], ("<= 10",))],
    "truncate": [([0], (">= 1",)), ([2**31], ("< 2147483648",)), (["1"], ("integer",))],
    "do_sample": [([1, "true"], ("boolean",))],
    "details": [(["yes"], ("boolean",))],
    "return_full_text": [([1], ("boolean",))],
    "best_of": [([2], ("sampling",))],
    "watermark": [([True, "false"], ("supported only as false",))],
    "decoder_input_details": [([1, "true"], ("boolean",))],
    "token_healing": [([1], ("boolean",))],
    "grammar": [
        (["", [], 1], ("object",)),
        ([{"type": "yaml"}, {"type": "regex"}], ("parameters.grammar",)),
        ([{"type": "json", "value": "{"}, {"type": "json", "value": 1}], ("JSON",)),
    ],
    "adapter_id": [(["../../etc/passwd"], ("not supported: there are no adapters",))],
    "max_tokens": [([1], ("not a known field", "did you mean `max_new_tokens`?"))],
    "n": [([2], ("not supported",))],
    "logprobs": [([1], ("did you mean `details`?",))],
    "stream": [([True], ("`parameters.stream`", "did you mean `stream`?"))],
}
CASES = [
    Case("no inputs", {"parameters": {"max_new_tokens": 4}}, 422, ("`inputs`", "required")),
    Case("an object", {"inputs": {"text": SECRET}}, 422, ("`inputs`", "string")),
    Case("parameters a list", prompt_and(',"parameters":[]}'), 422, ("`parameters`", "object")),
    Case(
        "a misspelt key that forges a log line",
        prompt_and(',"strea\\n\\u202e":1}'),
        422,
        ("`strea\\n\\u202e`",),
    ),
    *(
        Case(f"{name} {str(value)[:24]}", with_parameter(name, value), 422, (name, *words))
        for name, rules in BAD_PARAMETERS.items()
        for values, words in rules
        for value in values
    ),
    Case("truncated", prompt_and(""), 400, ("not JSON",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_bad_body(served: Served, case: Case) -> None:
    assert_refused(await send(served, case.body), case.status, *case.words)
    assert served.engine.submits == [] and served.supervisor.open == {}


@pytest.mark.parametrize("path", ["/generate_stream", "/"])
@pytest.mark.parametrize("stream", [None, True])
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
async def test_bad_body_elsewhere(
    served: Served, case: Case, path: str, stream: bool | None
) -> None:
    """Other routes, and streams: a failure before the first byte is sent has an error status."""
    body = (
        case.body
        if isinstance(case.body, bytes) or stream is None
        else case.body | {"stream": stream}
    )
    assert_refused(await send(served, body, path), case.status, *case.words)
    assert served.engine.submits == []


GOOD_PARAMETERS: dict[str, list[Any]] = {
    "max_new_tokens": [1, 5.0, None],
    "min_tokens": [0, 4, None],
    "temperature": [2.0, 1, 1e-320, None],
    "top_p": [1.0, 1e-9, 1],
    "top_k": [-1, 0, 257],
    "min_p": [0, -0.0, 1],
    "typical_p": [1, 1.0, 0.95],
    "frequency_penalty": [-2, 2, -0.0],
    "repetition_penalty": [0.01, 10, 1],
    "seed": [-1, 0, 1.0, 2**63 - 1, None],
    "stop": [[], ["a", "a"], ["x" * 1024], [f"{i} {SECRET}" for i in range(16)]],
    "stop_token_ids": [[], [256], [1] * 128],
    "logit_bias": [{}, {"0": -100, "256": 100}],
    "truncate": [1, 2**31 - 1],
    "watermark": [False, None],
    "best_of": [1],
    "top_n_tokens": [0, 5],
    "decoder_input_details": [False, True],
    "grammar": [
        None,
        {"type": "text"},
        {"type": "json", "value": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    ],
    "allowed_token_ids": [None, [0], [256]],
    "token_healing": [None, False],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in GOOD_PARAMETERS.items() for value in values],
)
async def test_good_parameter(served: Served, name: str, value: Any) -> None:
    """The bounds are where the refusals say they are."""
    response = await send(served, with_parameter(name, value))
    assert response.status_code == 200, response.text
    assert len(served.engine.submits) == 1


@pytest.mark.parametrize(
    ("num_pages", "length", "parameters", "words"),
    [
        (32, 63, {}, ()),
        (32, 64, {}, ("`inputs`", "less than 64 tokens", "Given: 64")),
        (32, 64, {"max_new_tokens": 1}, ("`inputs`", "less than 64 tokens", "Given: 64")),
        (32, 63, {"max_new_tokens": 1}, ()),
        (
            32,
            63,
            {"max_new_tokens": 2},
            ("`max_new_tokens`", "<= 64", "context", "63 `inputs` tokens and 2 `max_new_tokens`"),
        ),
        (32, 60, {"min_tokens": 5}, ("`min_tokens`", "4", "Given: 5")),
        (32, 10**5, {}, ("`inputs`", "less than 64 tokens", "Given: 100000")),
        (32, 10**5, {"truncate": 10}, ()),
        (32, 10, {"truncate": 64, "max_new_tokens": 55}, ("`max_new_tokens`", "<= 64")),
        (4, 31, {}, ()),
        (4, 32, {}, ("`inputs`", "less than 32 tokens", "Given: 32")),
        (4, 32, {"max_new_tokens": 1}, ("`inputs`", "less than 32 tokens", "Given: 32")),
        (
            4,
            31,
            {"max_new_tokens": 2},
            ("`max_new_tokens`", "<= 32", "4 pages", "31 `inputs` tokens and 2 `max_new_tokens`"),
        ),
    ],
)
async def test_prompt_too_long(
    tokenizer_folder: Path,
    num_pages: int,
    length: int,
    parameters: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    engine = FakeEngine(
        msgspec.structs.replace(
            READY, num_pages=num_pages, capacity=min(64, num_pages * READY.page_size)
        )
    )
    served = await start(tokenizer_folder, engine)
    response = await send(served, {"inputs": "a" * length, "parameters": parameters})
    if words:
        assert_refused(response, 422, *words)
        assert engine.submits == []
    else:
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "text/json"}, 415),
        ({"content-type": "application/jsonx"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "multipart/form-data; boundary=application/json"}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "application/json; x=y; charset=utf-16"}, 415),
        ({"content-type": "application/json, text/plain"}, 415),
        ([("content-type", "application/json"), ("content-type", "text/plain")], 415),
        (JSON | {"content-encoding": "gzip"}, 415),
        (JSON | {"content-encoding": "br"}, 415),
        (
            [
                ("content-type", "application/json"),
                ("content-encoding", "identity"),
                ("content-encoding", "gzip"),
            ],
            415,
        ),
        ({"content-type": "Application/JSON ; x=y"}, 200),
        ({"content-type": 'application/json;charset="UTF-8"'}, 200),
        (JSON | {"content-encoding": "identity"}, 200),
        (JSON | {"accept": "image/png"}, 200),
    ],
)
async def test_media_type(served: Served, headers: Any, status: int) -> None:
    response = await send(served, GOOD, headers=headers)
    if status == 200:
        assert response.status_code == 200
    else:
        assert_refused(response, status)
        assert served.engine.submits == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/generate", 405),
        ("PUT", "/generate", 405),
        ("OPTIONS", "/generate", 405),
        ("TRACE", "/generate", 405),
        ("NONSENSE", "/generate_stream", 405),
        ("DELETE", "/", 405),
        ("POST", "/info", 405),
        ("POST", "/GENERATE", 404),
        ("POST", "/etc/passwd", 404),
    ],
)
async def test_no_such_route(served: Served, method: str, path: str, status: int) -> None:
    response = await send(served, GOOD, path, method=method)
    assert_refused(response, status)
    assert (status == 405) == ("allow" in response.headers)
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize(
    "given_id", ["a" * 65, "a" * 10**4, "a b", "a\x1b[31m", "\u00e9", "", "-_-"]
)
async def test_a_request_id_that_is_no_plain_word_is_replaced(
    served: Served, given_id: str
) -> None:
    response = await send(served, b"", headers=[*JSON.items(), ("x-request-id", given_id.encode())])
    assert_refused(response, 400)
    assert response.headers.get_list("x-request-id") != [given_id]
    assert (await send(served, b"", headers=JSON | {"x-request-id": "Good_id-1"})).headers[
        "x-request-id"
    ] == "Good_id-1"


async def test_body_size(tokenizer_folder: Path) -> None:
    served = await start(tokenizer_folder, section=ServerSection(max_body_bytes=2048))
    response = await send(served, GOOD.ljust(2048))
    assert response.status_code == 200
    assert_refused(await send(served, GOOD.ljust(2049)), 413, "2048 bytes", "server.max_body_bytes")
    assert_refused(await send(served, b"x" * 2049), 413)  # Size comes first.
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1024
            yield b" " * 1024

    assert_refused(await send(served, endless()), 413)
    assert taken <= 4096
    assert len(served.engine.submits) == 1


SLOW = [
    Case("depth", b'{"inputs":' + b"[" * DEEP, 400),
    Case("shallow arrays", b'{"inputs":[' + b"[]," * 650_000 + b"[]]}", 400),
    Case("keys", {f"k{i}": i for i in range(DEEP)}, 422),
    Case("a long key", {"k" * 10**6: 1}, 422),
    Case("long keys", {f"{i:064}"[::-1] + "k" * 900: 1 for i in range(2000)}, 422),
    Case("keys nearly known", {f"parameter{i:03}": 1 for i in range(2000)}, 422),
    Case(
        "unknown keys in many objects",
        {"parameters": [{f"k{i}": 1 for i in range(2000)}] * 40},
        422,
    ),
    Case("stop strings", {"inputs": "a", "parameters": {"stop": ["a"] * 200_000}}, 422),
    Case("bad stop strings", {"inputs": "a", "parameters": {"stop": [1] * 200_000}}, 422),
    Case("bad ids", {"inputs": "a", "parameters": {"stop_token_ids": ["a"] * 200_000}}, 422),
    Case(
        "biases",
        {"inputs": "a", "parameters": {"logit_bias": {str(i): "x" for i in range(DEEP)}}},
        422,
    ),
    Case("quotes never closed", b"{" * 65 + b'"' + b'\\"' * 900_000, 400),
]


@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.name)
async def test_refusing_is_quick(served: Served, case: Case) -> None:
    """Parsing a body blocks the event loop, so its processor time is bounded. Best of three,
    because the machine may be busy.
    """
    body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    assert len(body) < 2 * 2**20
    seconds = []
    for _ in range(3):
        began = time.process_time()
        assert_refused(await send(served, body), case.status)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.2
    assert served.engine.submits == []


@pytest.mark.parametrize(
    "text",
    [
        "  ",
        "\n",
        "\x00\x01\x1f\x7f",
        "\ufffe\uffff\ufeff",
        "\u202e\u200b\u2066",
        "e" + "\u0301" * 20,
        "\U0001f469\u200d\U0001f4bb",
        "\u05e9\u05dc\u05d5\u05dd",
        '"\\\r\n',
        "[{" * 20,
    ],
)
async def test_odd_text_is_text(served: Served, text: str) -> None:
    """Unusual but valid prompts come back unchanged: POST / repeats the prompt."""
    for body in (
        json.dumps({"inputs": text}).encode(),
        json.dumps({"inputs": text}, ensure_ascii=False).encode(),
    ):
        response = await send(served, body, "/")
        assert response.status_code == 200, response.text
        answer = served.engine.answer(served.engine.submits[-1])
        assert response.json() == [
            {"generated_text": text + served.generation.codec.decode(answer)}
        ]


any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=6)
    | st.sampled_from([2**31, 2**63, 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
good_fields = st.sampled_from(
    [(name, value) for name, values in GOOD_PARAMETERS.items() for value in values]
)
bad_fields = st.sampled_from(
    [
        (name, value)
        for name, rules in BAD_PARAMETERS.items()
        for values, _ in rules
        for value in values
    ]
)
odd_fields = st.tuples(st.sampled_from(sorted(GOOD_PARAMETERS)) | st.text(max_size=3), any_json)
parameters = st.lists(good_fields, max_size=5).map(dict) | st.lists(
    good_fields | bad_fields | odd_fields, max_size=4
).map(dict)
good_document = st.fixed_dictionaries(
    {"inputs": st.text(min_size=1, max_size=9)},
    optional={"parameters": parameters, "stream": st.booleans()},
)
document = good_document | st.dictionaries(
    st.sampled_from(["inputs", "parameters", "stream", "x"]), parameters | any_json, max_size=4
)
as_bytes = st.builds(
    lambda value, ascii: json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass"),
    document | any_json,
    st.booleans(),
)
bodies = st.one_of(
    st.builds(lambda value: json.dumps(value).encode(), good_document),
    as_bytes,
    st.binary(max_size=60),
    st.builds(lambda body, cut: body[: cut % (len(body) + 1)], as_bytes, st.integers(0, 500)),
    st.builds(
        lambda body, at, byte: body[:at] + bytes([byte]) + body[at + 1 :],
        as_bytes,
        st.integers(0, 60),
        st.integers(0, 255),
    ),
)
paths = st.sampled_from(["/generate", "/generate_stream", "/"])
media = st.sampled_from(
    [*[JSON] * 9, {}, {"content-type": "text/plain"}, JSON | {"content-encoding": "gzip"}]
)


def assert_answer(response: httpx.Response, path: str) -> None:
    """A 200's body: one object, a list of one, or events of which the last has the text."""
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [
            json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-1]
        ]
        assert [event["index"] for event in events] == list(range(1, len(events) + 1))
        assert [isinstance(event["generated_text"], str) for event in events] == [False] * (
            len(events) - 1
        ) + [True]
    else:
        value = response.json()
        assert isinstance((value[0] if path == "/" else value)["generated_text"], str)


def test_whatever_is_sent_the_answer_fits_and_the_next_request_is_served(
    tokenizer_folder: Path,
) -> None:
    seen: Counter[int] = Counter()
    with asyncio.Runner() as runner:
        served = runner.run(start(tokenizer_folder))

        async def check(body: bytes, path: str, headers: dict[str, str]) -> None:
            num_before = len(served.engine.submits)
            response = await send(served, body, path, headers)
            seen[response.status_code] += 1
            if response.status_code == 200:
                assert_answer(response, path)
            else:
                assert response.status_code in (400, 413, 415, 422)
                assert_refused(response, response.status_code)
            assert len(served.engine.submits) - num_before == (response.status_code == 200)
            await assert_canary(served)

        @settings(
            max_examples=600,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(bodies, paths, media)
        def any_request(body: bytes, path: str, headers: dict[str, str]) -> None:
            runner.run(check(body, path, headers))

        any_request()
    assert min(seen[status] for status in (200, 400, 415, 422)) > 30, seen
