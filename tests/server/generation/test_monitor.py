"""The monitor over a fake engine: what viewers know is what the engine has, through crashes; it asks only while there are viewers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import protocol
from server.api_protocol import Shown
from server.errors import Overloaded
from server.generation import monitor, viewers
from server.generation.viewers import Viewer
from tests.support.cache_client import CacheClient
from tests.support.fake_engine import FakeEngine, Served, serve
from tests.support.fake_fleet import FakeFleet
from tests.support.wire import EventParser

BODY = {"prompt": "abc", "max_tokens": 40, "temperature": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks as often as the event loop runs."""
    monkeypatch.setattr(monitor, "LOOK_SECONDS", 0)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def ready(engine: FakeEngine, folder: Path) -> Served:
    served = serve(folder, engine)
    await until(lambda: served.client.accepting)
    return served


class Watching:
    """Takes from a viewer what its connection would write."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer
        self.cache, self.stats = CacheClient(), list[dict[str, Any]]()
        self.reads = True
        self.parser = EventParser()
        viewer.listen(self.wake)

    def wake(self) -> None:
        if self.reads:
            for event in self.parser.feed(b"".join(self.viewer.take())):
                data = json.loads(event.data or "")
                self.cache.take(data) if event.kind == "cache" else self.stats.append(data)


async def ask(served: Served, **fields: Any) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://test") as http:
        assert (await http.post("/v1/completions", json=BODY | fields)).status_code == 200


async def same(served: Served, watching: Watching) -> None:
    """Compares the viewer's state with a dump."""
    dump = json.loads(await served.client.cache_dump())
    await until(lambda: (watching.cache.engine, watching.cache.view) >= (dump["engine"], dump["view"]))
    if watching.cache.view == dump["view"]:
        assert watching.cache.problems(dump) == []
        watching.compared = getattr(watching, "compared", 0) + 1  # type: ignore[attr-defined]
