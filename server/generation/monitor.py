"""Monitor: asks the engine how its KV cache is used, and shows that to viewers, together with the server's counts.

Invariant: the engine is asked at most every LOOK_SECONDS, for a whole state or a dump at most every WHOLE_SECONDS, only once it has
answered before, and not at all without viewers. Each event is encoded once. It knows no connections.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from server.generation.arrivals import Arrivals
from server.generation.viewers import Shown, Viewers
from server.metrics import Metrics
from server.protocol import CacheState, CacheView, Look
from server.supervision.supervisor import State, Supervisor

LOOK_SECONDS, WHOLE_SECONDS = 0.1, 1.0
NONE = -1


class Monitor:
    """Watches one supervisor's engine. `status`: the state of the server in words."""

    def __init__(self, supervisor: Supervisor, metrics: Metrics, arrivals: Arrivals, status: Callable[[], str]) -> None:
        self._supervisor, self._metrics, self._status = supervisor, metrics, status
        self.viewers = Viewers(arrivals, self.ask_whole)
        self._dump: asyncio.Future[bytes] | None = None
        """The next dump of the cache, as JSON; None if none is asked for."""
        self._watching: asyncio.Task[None] | None = None
        self._asked = NONE
        """The engine that has not answered yet, as the number of those that were started before it."""
        self._last = NONE, NONE
        """The engine of the last view, and the view's number."""
        self._needs_whole = False
        self._whole_due = 0.0

    def ask_whole(self) -> None:
        """Shows the whole state of the cache to the viewers that wait for it."""
        self._needs_whole = True
        self._begin()

    def dump(self) -> "asyncio.Future[bytes]":
        """Gets a dump of the cache, the same for all who ask meanwhile; not to be cancelled. Viewers are shown the same state."""
        self._dump = self._dump or asyncio.get_running_loop().create_future()
        self._begin()
        return self._dump

    def _begin(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while self.viewers.shows or self._dump:
            self._look()
            if time.monotonic() >= self.viewers.stats_due:
                self.viewers.show(Shown(stats=_event(b"stats", self._stats())))
            await asyncio.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        """Asks the engine, unless it has not answered yet."""
        engine, now = self._metrics.num_restarts, time.monotonic()
        if self._supervisor.state is State.READY and self._asked != engine:
            self._asked, is_due = engine, now >= self._whole_due
            look = Look(is_due and self._needs_whole, is_due and self._dump is not None)
            if look.whole or look.dump:
                self._whole_due = now + WHOLE_SECONDS
            self._supervisor.look(look)

    def on_view(self, view: CacheView) -> None:
        """Takes the engine's answer."""
        ready, before, self._last = self._supervisor.ready, self._last, (self._asked, view.number)
        assert ready is not None
        head = {"engine": self._asked, "step": view.step, "view": view.number, "num_pages": ready.num_pages, "page_size": ready.page_size}
        is_first, self._asked = before[0] != self._asked, NONE

        def event(is_whole: bool, state: CacheState) -> bytes:
            cells, sequences, ended = state
            numbers = memoryview(cells).cast("q").tolist()
            return _event(b"cache", head | {"whole": is_whole, "cells": numbers, "sequences": sequences, "ended": ended})

        changes = event(is_first, view.changes) if before != self._last else b""
        whole = event(True, view.whole) if view.whole else changes if is_first else b""
        if changes or whole:
            self._needs_whole = self._needs_whole and not whole
            self.viewers.show(Shown(whole, changes))
        if view.dump is not None and self._dump is not None:
            self._dump.set_result(msgspec.json.encode(head | view.dump))
            self._dump = None

    def _stats(self) -> dict[str, Any]:
        stats = {"time": time.time(), "status": self._status(), **self._metrics.stats()}
        if (ready := self._supervisor.ready) is not None:
            ratio = ready.multi_head_bytes_per_token / ready.kv_bytes_per_token
            stats |= {"device": ready.device, "page_size": ready.page_size, "num_pages": ready.num_pages, "multi_head_ratio": ratio}
            stats["page_bytes"] = ready.page_bytes
        return stats


def _event(kind: bytes, data: dict[str, Any]) -> bytes:
    """A server-sent event, as it is written to every viewer."""
    return b"event: %b\ndata: %b\n\n" % (kind, msgspec.json.encode(data))
