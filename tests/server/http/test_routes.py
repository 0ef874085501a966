"""The route table decides who may call a route and whether it generates; a route that it lacks is
refused at start.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server import protocol
from server.config import ServerSection
from server.generation.request import Request
from server.http.errors import OPENAI, TGI
from server.http.exchange import exchange_of
from server.http.routes import Access, Route
from server.http.tgi.generate import TgiRoutes
from tests.conftest import CHAT_TEMPLATE
from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import READY, FakeEngine, Served, serve

MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
KEYS = {"one": "key-1", "two": "key-2"}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": "def", "parameters": {"max_new_tokens": 2}},
    "/generate_stream": {"inputs": "def", "parameters": {"max_new_tokens": 2}},
    "/": {"inputs": "def", "parameters": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "def", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def"}], "max_tokens": 2},
    "/infill": {"input_prefix": "def", "input_suffix": "x", "n_predict": 2},
    "/completion": {"prompt": "def", "n_predict": 2},
    "/v1/fim/completions": {"prompt": "def", "suffix": "x", "max_tokens": 2},
    "/fim/completions": {"prompt": "def", "max_tokens": 2},
    "/api/generate": {"prompt": "def", "options": {"num_predict": 2}},
    "/api/chat": {"messages": [{"role": "user", "content": "def"}], "options": {"num_predict": 2}},
    "/v1/messages": {"messages": [{"role": "user", "content": "def"}], "max_tokens": 2},
    "/v1/responses": {"input": "def", "max_output_tokens": 2},
    "/v1/decisions": {"input": "", "questions": [{"type": "predicate", "instructions": ""}]},
    "/v1/systemone": {"state": "", "questions": {"q": {"type": "noul"}}},
}


async def make(
    tmp_path: Path,
    template: str | None = CHAT_TEMPLATE,
    crash_after: Sequence[int] = (),
    **options: Any,
) -> Served:
    """A server over a fake engine that is ready. `options`: of its section."""
    make_tokenizer(MARKS).save(str(tmp_path / "tokenizer.json"))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    ready = msgspec.structs.replace(READY, vocab_size=261, capacity=128)
    served = serve(tmp_path, FakeEngine(ready, crash_after=crash_after), ServerSection(**options))
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    return served


def client_of(served: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://test")


async def test_no_path_is_served_that_the_table_lacks(tmp_path: Path) -> None:
    door = (await make(tmp_path)).app
    declared = {
        route.path if route.methods else route.path.removesuffix("/{path:path}")
        for route in door.table.routes
    }
    assert isinstance(door.app, FastAPI)
    assert {str(getattr(route, "path", route)) for route in door.app.routes} == declared


async def test_a_route_that_generates_without_being_declared_to_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = TgiRoutes.routes

    def routes(self: TgiRoutes) -> list[Route]:
        async def more(http: Any) -> Response:
            self.generation.start([Request([1], protocol.Sampling())], exchange_of(http).reserved)
            return JSONResponse({})

        more.__annotations__ = {"http": HttpRequest, "return": Response}
        return [*declared(self), Route("/generate_more", ("POST",), more, TGI)]

    monkeypatch.setattr(TgiRoutes, "routes", routes)
    served = await make(tmp_path)
    async with client_of(served) as client:
        with pytest.raises(AssertionError, match="not declared as `generates`"):
            await client.post("/generate_more")
    assert served.engine.submits == []


VECTORS = {
    *("/v1/embeddings", "/embed", "/embedding", "/embeddings", "/v1/rerank", "/rerank"),
    *("/classify", "/api/embed", "/api/embeddings"),
}
"""Routes that answer with what is made of vectors."""


async def test_every_route_that_generates_does_it_as_the_caller_of_its_key(tmp_path: Path) -> None:
    served = await make(
        tmp_path, api_keys=[hashlib.sha256(key.encode()).hexdigest() for key in KEYS.values()]
    )
    generating = {route.path for route in served.app.table.routes if route.generates}
    # Those of models that generate nothing are tested in test_embeddings.
    assert generating == BODIES.keys() | VECTORS
    async with client_of(served) as client:
        for path in sorted(BODIES):
            salts = []
            for key in KEYS.values():
                answer = await client.post(
                    path, json=BODIES[path], headers={"authorization": f"Bearer {key}"}
                )
                assert answer.status_code == 200, answer.text
                salts.append(served.engine.submits[-1].salt)
            assert [salt.partition(":")[0] for salt in salts] == [
                hashlib.sha256(key.encode()).hexdigest() for key in KEYS.values()
            ], path


async def test_a_path_has_the_access_and_the_dialect_of_its_route(tmp_path: Path) -> None:
    table = (await make(tmp_path)).app.table
    public = {route.path for route in table.routes if route.access is Access.PUBLIC}
    assert public == {"/live", "/ready", "/health", "/ping", "/", "/ui/{path:path}"}
    assert [table.find("/", method).access for method in ("GET", "HEAD", "POST", "PUT")] == [
        *[Access.PUBLIC] * 2,
        *[Access.API_KEY] * 2,
    ]
    for path, dialect in {
        "/generate": TGI,
        "/infill": OPENAI,
        "/detokenize": OPENAI,
        "/v1/nothing": OPENAI,
        "/v1/streams/abc": OPENAI,
        "/nothing": TGI,
    }.items():
        assert table.dialect(path) is dialect, path
    found = table.find("/v1/models/org/name")
    assert (
        found is not None
        and found.path == "/v1/models/{name:path}"
        and table.find("/nothing") is None
    )
