"""Viewers: the connections that watch the server, and what each of them has not taken yet.

Invariant: after a whole state of the cache, a viewer gets every change, in order. One that does not keep up has at most one event of each
kind to take: what it was to take before is dropped, and once it takes again, a whole state is asked for, which no other viewer gets. Events
are opaque bytes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from server.errors import Overloaded
from server.generation.admission import HELD_PER_FREE
from server.generation.arrivals import Arrivals, Wake

MAX_VIEWERS = 64
RETRY_SECONDS = 10
STATS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Shown:
    """Server-sent events for viewers, empty where there is none: `whole`, the state of the cache, for those that wait for one, and
    `cache`, what has changed, for the others.
    """

    whole: bytes = b""
    cache: bytes = b""
    stats: bytes = b""


class Viewer:
    """One connection, as the source of its response's events (http.sse.Source)."""

    def __init__(self, viewers: "Viewers") -> None:
        self._viewers = viewers
        self._stats = self._cache = b""
        self._waits_for_whole = True
        self._wake: Wake = lambda: None

    @property
    def ended(self) -> bool:
        return self._viewers.ended

    def listen(self, wake: Wake) -> None:
        self._wake = wake

    def take(self) -> list[bytes]:
        events = [event for event in (self._stats, self._cache) if event]
        self._stats = self._cache = b""
        if self._waits_for_whole:
            self._viewers.ask_whole()
        return events

    def show(self, shown: Shown) -> None:
        """Adds the events that are for this viewer to those that it has to take."""
        self._stats = shown.stats or self._stats
        if self._waits_for_whole:
            self._cache, self._waits_for_whole = shown.whole, not shown.whole
        elif shown.cache:
            self._waits_for_whole = bool(self._cache)
            self._cache = b"" if self._waits_for_whole else shown.cache
        self._viewers.arrivals.add(lambda: self._wake())


class Viewers:
    """The viewers of a server. `ask_whole` is called when one of them needs the whole state of the cache: at first, and after a gap."""

    def __init__(self, arrivals: Arrivals, ask_whole: Callable[[], None]) -> None:
        self.arrivals, self.ask_whole = arrivals, ask_whole
        self.shows: dict[Callable[[Shown], None], str] = {}
        """Viewer.show of each -> its client."""
        self.ended = False
        self._stats = Shown()
        self.stats_due = 0.0
        """When the last stats event is a second old."""

    def join(self, client: str = "") -> Viewer:
        """A new viewer, until its `show` is removed. It gets the last stats event at once, unless it is outdated; the whole state of the
        cache is asked for. Raises Overloaded, to a client that has many already also while there are places.
        """
        held, num_free = [*self.shows.values()].count(client), MAX_VIEWERS - len(self.shows)
        if held >= num_free * HELD_PER_FREE or not num_free:
            text = f"{len(self.shows)} viewers watch this server, {held} of this client; at most {MAX_VIEWERS} may, fewer of one client"
            raise Overloaded(f"{text}; try again later", RETRY_SECONDS, code="too_many_viewers")
        viewer = Viewer(self)
        self.shows[viewer.show] = client
        if time.monotonic() < self.stats_due:
            viewer.show(self._stats)
        self.ask_whole()
        return viewer

    def show(self, shown: Shown) -> None:
        """Passes events on to every viewer."""
        if shown.stats:
            self._stats, self.stats_due = shown, time.monotonic() + STATS_SECONDS
        for show in self.shows:
            show(shown)

    def end(self) -> None:
        """Ends the responses."""
        self.ended = True
        self.show(Shown())
