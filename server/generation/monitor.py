"""Monitor: shows viewers how the engine uses its KV cache, and the server's counts.

Invariant: the engine is asked only while somebody watches or waits for a dump, every LOOK_SECONDS,
and only once it has answered before. Each event is encoded once. A viewer that does not keep up has
at most the latest event of each kind to take. It knows no connections.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from server.errors import Overloaded
from server.generation.arrivals import Arrivals, Wake
from server.metrics import Metrics
from server.protocol import CacheView, Look
from server.supervision.supervisor import State, Supervisor

LOOK_SECONDS, STATS_SECONDS = 0.25, 1.0
BYTES_PER_SECOND = 2**21
"""Of `cache` events: after a larger one the pause is longer, as it holds up the event loop."""
MAX_VIEWERS = 64
RETRY_SECONDS = 10
NONE = -1


class Viewer:
    """One connection that watches, as the source of its response's events (http.sse.Source).
    `events`: the latest of each kind that it has not taken.
    """

    def __init__(self, monitor: "Monitor", events: dict[str, bytes]) -> None:
        self.events = events
        self._monitor = monitor
        self.wake: Wake = lambda: None
        """Has what there is to take be taken."""

    @property
    def ended(self) -> bool:
        return self._monitor.ended

    def listen(self, wake: Wake) -> None:
        self.wake = wake

    def take(self) -> list[bytes]:
        events, self.events = self.events, {}
        return [*events.values()]


class Monitor:
    """Watches one supervisor's engine. `status`: the state of the server in words."""

    def __init__(
        self,
        supervisor: Supervisor,
        metrics: Metrics,
        arrivals: Arrivals,
        status: Callable[[], str],
    ) -> None:
        self._supervisor, self._metrics = supervisor, metrics
        self._arrivals, self._status = arrivals, status
        self.viewers = list[Viewer]()
        self.ended = False
        self._latest: dict[str, bytes] = {}
        """The latest event of each kind; empty while nobody watches."""
        self._dump: asyncio.Future[bytes] | None = None
        """The next dump of the cache, as JSON; None if none is asked for."""
        self._watching: asyncio.Task[None] | None = None
        self._asked = NONE
        """The engine that has not answered yet, as the number of those that were started before
        it."""
        self._shown = NONE, NONE
        """The engine of the view that was shown last, and the view's number."""

    def join(self) -> Viewer:
        """A new viewer, until it is removed from `viewers`. Raises Overloaded."""
        if len(self.viewers) >= MAX_VIEWERS:
            raise Overloaded(
                f"{len(self.viewers)} viewers watch this server; at most {MAX_VIEWERS} may; try "
                "again later",
                RETRY_SECONDS,
                code="too_many_viewers",
            )
        if not self.viewers:  # What was shown before may be old.
            self._latest, self._shown = {}, (NONE, NONE)
        viewer = Viewer(self, dict(self._latest))
        self.viewers.append(viewer)
        self._begin()
        return viewer

    async def dump(self) -> bytes:
        """The state of the cache as the engine's own lists have it, as JSON, the same for all who
        ask meanwhile. Viewers are shown the same state. Waits while no engine is ready.
        """
        self._dump = self._dump or asyncio.get_running_loop().create_future()
        self._begin()
        return await asyncio.shield(self._dump)

    def end(self) -> None:
        """Ends the viewers' responses."""
        self.ended = True
        for viewer in self.viewers:
            self._arrivals.add(viewer.wake)

    def _begin(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        stats_due = 0.0
        while self.viewers or self._dump:
            self._look()
            if (now := time.monotonic()) >= stats_due:
                stats_due = now + STATS_SECONDS
                self._show("stats", self._stats())
            size = len(self._latest.get("cache", b""))
            await asyncio.sleep(max(LOOK_SECONDS, size / BYTES_PER_SECOND))
        self._latest = {}

    def _look(self) -> None:
        """Asks the engine, unless it has not answered yet."""
        engine = self._metrics.num_restarts
        if self._supervisor.state is State.READY and self._asked != engine:
            self._asked = engine
            self._supervisor.look(Look(self._dump is not None))

    def on_view(self, view: CacheView) -> None:
        """Takes the engine's answer."""
        ready, before, self._shown = self._supervisor.ready, self._shown, (self._asked, view.number)
        assert ready is not None
        head = {
            "engine": self._asked,
            "step": view.step,
            "view": view.number,
            "num_pages": ready.num_pages,
            "page_size": ready.page_size,
        }
        self._asked = NONE
        if before != self._shown:
            cells = memoryview(view.runs).cast("q").tolist()
            self._show("cache", head | {"cells": cells, "sequences": view.sequences})
        if view.dump is not None and self._dump is not None:
            self._dump.set_result(msgspec.json.encode(head | view.dump))
            self._dump = None

    def _show(self, kind: str, data: dict[str, Any]) -> None:
        """Passes an event to every viewer, in the place of one of the kind that it has not
        taken.
        """
        event = b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(data))
        self._latest[kind] = event
        for viewer in self.viewers:
            viewer.events[kind] = event
            self._arrivals.add(viewer.wake)

    def _stats(self) -> dict[str, Any]:
        stats = {"time": time.time(), "status": self._status(), **self._metrics.stats()}
        if (ready := self._supervisor.ready) is not None:
            stats |= {
                "device": ready.device,
                "page_size": ready.page_size,
                "num_pages": ready.num_pages,
                "multi_head_ratio": ready.multi_head_bytes_per_token / ready.kv_bytes_per_token,
                "page_bytes": ready.page_bytes,
            }
        return stats
