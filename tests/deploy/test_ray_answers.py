"""Answers on their way through the ingress; without Ray."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deploy.ray import answers
from server.errors import BodyTooLarge, GenerationFailed, StreamExpired, Unavailable
from server.http.errors import OPENAI, TGI, Dialect
from tests.support.fake_engine import serve
from tests.support.wire import parse_event

EVENTS = b'id: s.1\ndata: {"a": 1}\n\ndata: {"b": 2}\n\n: keep-alive\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    "path",
    [
        "/x?y=/z",
        "@host.example/x",
        "5/x",
        ":80@host.example",
        "//host.example/x",
        "http://host.example/x",
        "*",
        "",
    ],
)
def test_no_path_leads_to_another_host(path: str) -> None:
    parts = urlsplit(answers.server_url("http://127.0.0.1:4567", path))
    assert (parts.scheme, parts.netloc, parts.path[:1]) == ("http", "127.0.0.1:4567", "/")
    if path.startswith("/"):
        assert parts.geturl() == f"http://127.0.0.1:4567{path}"


@pytest.mark.parametrize("size", range(1, len(EVENTS) + 1))
async def test_events_stay_whole_however_they_arrive(size: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(EVENTS), size):
            yield EVENTS[start : start + size]

    passed = [piece async for piece in answers.whole_events(pieces())]
    assert b"".join(passed) == EVENTS
    assert all(piece.endswith(b"\n\n") for piece in passed)


async def test_a_part_of_an_event_is_held_back_and_passed_on_at_the_end() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: 1\n\ndata: "
        yield b"2"

    assert [piece async for piece in answers.whole_events(pieces())] == [b"data: 1\n\n", b"data: 2"]


def test_metrics_of_replicas_become_one_exposition() -> None:
    first = (
        '# HELP a Help of a.\n# TYPE a counter\na{x="{1}"} 1.0\n# HELP b Help of b.\n# TYPE b '
        "gauge\nb 2.0\n"
    )
    second = (
        '# HELP a Help of a.\n# TYPE a counter\na{x="2"} 3.0\n# HELP c Help of c.\n# TYPE c '
        "gauge\nc NaN\n"
    )
    assert answers.labelled({"r1": first, "r2": second}).splitlines() == [
        "# HELP a Help of a.",
        "# TYPE a counter",
        'a{x="{1}",replica="r1"} 1.0',
        'a{x="2",replica="r2"} 3.0',
        "# HELP b Help of b.",
        "# TYPE b gauge",
        'b{replica="r1"} 2.0',
        "# HELP c Help of c.",
        "# TYPE c gauge",
        'c{replica="r2"} NaN',
    ]


@pytest.mark.parametrize(
    ("path", "dialect"),
    [
        ("/v1/completions", OPENAI),
        ("/infill?x=1", OPENAI),
        ("/generate", TGI),
    ],
)
def test_errors_have_the_forms_of_the_servers_own(path: str, dialect: Dialect) -> None:
    def shape(body: dict[str, object]) -> object:
        """Everything but the message and the code."""
        inner = body["error"]
        return (
            {**inner, "message": "", "code": ""}
            if isinstance(inner, dict)
            else {**body, "error": ""}
        )

    assert shape(json.loads(answers.unavailable(path))) == shape(dialect.body(Unavailable("")))
    assert shape(json.loads(answers.too_large(path, 5))) == shape(dialect.body(BodyTooLarge("")))
    first, *done = answers.lost(path).decode().removesuffix("\n\n").split("\n\n")
    assert shape(json.loads(parse_event(first).data or "")) == shape(
        dialect.body(GenerationFailed(""))
    )
    assert done == (["data: [DONE]"] if dialect is OPENAI else [])


async def test_the_paths_of_openais_dialect_are_the_servers(tokenizer_folder: Path) -> None:
    """Of all of its routes, and of a path that it does not have. Below /v1 the proxy tells every
    error so, on Anthropic's routes too.
    """
    table = serve(tokenizer_folder).app.table
    paths = [*(route.path for route in table.routes), "/v1/nothing", "/nothing"]
    assert len(paths) > 20
    assert [path for path in paths if answers.openai(path)] == [
        path
        for path in paths
        if table.dialect(path).body is OPENAI.body or path.startswith("/v1/messages")
    ]


def test_a_stream_of_a_replica_that_has_ended_has_expired() -> None:
    ours = json.loads(answers.expired())["error"]
    assert ours["code"] == "stream_expired"
    assert ours | {"message": ""} == OPENAI.body(StreamExpired("", code="stream_expired"))["error"]
