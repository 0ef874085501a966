"""A server with GET /monitor and nothing else, whose events are a made-up engine's: one step every tick, sequences that come, grow and end.

`python -m tests.support.fake_monitor PORT` serves one to look at.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from commands.top.monitor import Row
from server.protocol import CACHED, FREE, OWNED

BOUNDS = (0.005, 0.01, 0.05, 0.1, 0.5, 1.0)


def event(name: str, data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


class MadeUpEngine:
    """Pages and sequences without a model: `num_running` are run, and three wait."""

    def __init__(self, num_pages: int = 512, page_size: int = 64, num_running: int = 12, seed: int = 0) -> None:
        self.rng, self.page_size, self.num_running = random.Random(seed), page_size, num_running
        self.num_pages, self.engine, self.step, self.view, self.num_begun = num_pages, 0, 0, 0, 0
        self.free, self.cached = list(range(num_pages)), list[int]()
        self.rows: dict[int, Row] = {}
        self.pages: dict[int, list[int]] = {}
        self.counts = dict.fromkeys(("prompt_tokens", "generation_tokens", "preemptions", "prefix_queries", "prefix_hits"), 0)
        self.ended = {"length": 0, "failed": 0}
        self.latencies = {name: [0] * (len(BOUNDS) + 1) for name in ("time_to_first_token", "inter_token_latency", "step_time")}

    def advance(self) -> dict[str, Any]:
        """Computes a step; its cache event."""
        self.step += 1
        while len(self.rows) < self.num_running + 3:
            self._begin()
        running = list(self.rows.values())[: self.num_running]
        cells = [number for row in running for number in self._compute(row)]
        ended = [row.id for row in running if row.num_output > 150 + row.id % 90]
        for id in ended:
            cells += self._end(id)
        if len(self.free) < 50:
            cells += [number for page in self.cached for number in (page, 1, FREE, -1, 0)]
            self.free, self.cached = [*self.free, *self.cached], []
        for counts, place in zip(self.latencies.values(), (2, 0, 0), strict=True):
            counts[min(place + self.rng.randint(0, 2), len(BOUNDS))] += 1
        return self.event(False, cells, list(self.rows.values()), ended)

    def _begin(self) -> None:
        id = self.num_begun
        self.rows[id] = Row(id, f"req-{id:05}", "waiting", self.rng.randint(20, 700), 0, 0, 0, 0, 0)
        self.pages[id], self.num_begun = [], id + 1

    def _compute(self, row: Row) -> Iterator[int]:
        """The cells of the pages that a sequence takes."""
        row.state, row.num_computed = "running", min(row.num_prompt + row.num_output, row.num_computed + 256)
        if row.num_computed >= row.num_prompt:
            row.num_computed, row.num_output = row.num_computed + 1, row.num_output + 1
            self.counts["generation_tokens"] += 1
        pages = self.pages[row.id]
        while len(pages) * self.page_size < row.num_computed and self.free:
            page = self.free.pop(self.rng.randrange(len(self.free)))
            yield from (page, 1, OWNED, row.id, len(pages) * self.page_size)
            pages.append(page)
        row.num_pages = len(pages)

    def _end(self, id: int) -> Iterator[int]:
        """The cells of the pages that a sequence gives back, two of which are kept as a prefix."""
        self.ended["length"] += 1
        self.counts["prompt_tokens"] += self.rows.pop(id).num_prompt
        pages = self.pages.pop(id)
        for number, page in enumerate(pages):
            yield from (page, 1, CACHED if number < 2 else FREE, -1, 0)
        self.cached += pages[:2]
        self.free += pages[2:]

    def whole(self) -> dict[str, Any]:
        """The cache event of everything."""
        cells = [number for page in self.cached for number in (page, 1, CACHED, -1, 0)]
        for id, pages in self.pages.items():
            cells += [number for i, page in enumerate(pages) for number in (page, 1, OWNED, id, i * self.page_size)]
        return self.event(True, cells, list(self.rows.values()), [])

    def event(self, whole: bool, cells: list[int], rows: list[Row], ended: list[int]) -> dict[str, Any]:
        self.view += not whole
        where = {"engine": self.engine, "step": self.step, "view": self.view, "whole": whole}
        where |= {"num_pages": self.num_pages, "page_size": self.page_size}
        return where | {"cells": cells, "sequences": rows, "ended": ended}

    def stats(self, now: float, is_loading: bool = False) -> dict[str, Any]:
        """The stats event at a time, also one of a server whose first engine is not ready."""
        states = [row.state for row in self.rows.values()]
        histograms = {name: {"bounds": BOUNDS, "counts": counts, "sum": sum(counts) * 0.02} for name, counts in self.latencies.items()}
        facts = {"device": "cpu", "page_size": self.page_size, "num_pages": self.num_pages, "multi_head_ratio": 4.0}
        facts["page_bytes"] = 2**16
        return {
            "time": now,
            "status": "starting" if is_loading else "ready",
            "restarts": self.engine,
            "model": "pretrained",
            "running": states.count("running"),
            "waiting": states.count("waiting"),
            "pages_used": sum(map(len, self.pages.values())),
            "pages_cached": len(self.cached),
            "totals": self.counts | {"requests": self.ended},
            **({} if is_loading else facts),
            **histograms,
        }


class FakeMonitor:
    """Answers GET /monitor of one port with the events of one engine, to every viewer; anything else is 404, and 401 without the key. With
    `is_loading` the engine is never ready; a `refusal` is the JSON body of every answer, of status 500.
    """

    def __init__(
        self,
        key: str | None = None,
        missing: bool = False,
        tick: float = 0.02,
        is_loading: bool = False,
        refusal: bytes | None = None,
        **engine: Any,
    ) -> None:
        self.is_loading, self.refusal = is_loading, refusal
        self.engine = MadeUpEngine(**engine)
        self.key, self.missing, self.tick = key, missing, tick
        self.num_connections, self.port = 0, 0
        self.viewers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[None]:
        """Listens and steps meanwhile."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        stepping = asyncio.create_task(self._run())
        try:
            yield
        finally:
            stepping.cancel()
            server.close()
            self.cut()

    def cut(self) -> None:
        """Closes every connection at once."""
        for writer in self.viewers:
            writer.transport.abort()
        self.viewers.clear()

    def send(self, data: bytes) -> None:
        """Sends to every viewer."""
        for writer in self.viewers:
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def _run(self) -> None:
        last = time.time()
        while True:
            await asyncio.sleep(self.tick)
            if not self.is_loading:
                self.send(event("cache", self.engine.advance()))
            if time.time() - last >= 1:
                last = time.time()
                self.send(b": a comment\n\n" + event("stats", self.engine.stats(last, self.is_loading)))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if self.refusal is not None:
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: %d\r\n\r\n%b" % (len(self.refusal), self.refusal))
        elif self.key is not None and f"authorization: Bearer {self.key}\r\n" not in head:
            writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")
        elif self.missing or not head.startswith("GET /monitor "):
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            first = event("stats", self.engine.stats(time.time(), self.is_loading))
            if not self.is_loading:
                first += event("cache", self.engine.whole())
            writer.write(f"{len(first):x}\r\n".encode() + first + b"\r\n")
            self.viewers.add(writer)
            with suppress(OSError):
                await reader.read()
            self.viewers.discard(writer)
        writer.close()


async def _serve(port: int) -> None:
    fake = FakeMonitor(num_running=int(sys.argv[2]) if len(sys.argv) > 2 else 12)
    async with fake.serving(port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
