"""Viewers: the connections of one process that watch the server, and what each of them has not taken yet.

Invariant: a viewer that does not keep up has at most one event of each kind to take. What it was to take before is dropped, and once it
takes again, the whole state of the cache is asked for. Events are opaque bytes, the same for all viewers.
"""

from collections.abc import Callable
from typing import Any

from server.api_protocol import Shown
from server.errors import Overloaded
from server.generation.arrivals import Arrivals, Wake

MAX_VIEWERS = 64
"""Viewers of one process."""
RETRY_SECONDS = 10


class Viewer:
    """One connection, as the source of its response's events (http.sse.Source)."""

    def __init__(self, viewers: "Viewers") -> None:
        self._viewers = viewers
        self._stats = self._cache = b""
        self._waits_for_whole, self._is_behind = True, False
        self._wake: Wake = lambda: None

    @property
    def ended(self) -> bool:
        return self._viewers.ended

    def listen(self, wake: Wake) -> None:
        self._wake = wake

    def write_natively(self, client: Any) -> None:
        """Every event comes from Python."""

    def take(self) -> list[bytes]:
        events = [event for event in (self._stats, self._cache) if event]
        self._stats = self._cache = b""
        if self._is_behind:
            self._is_behind, self._waits_for_whole = False, True
            self._viewers.ask_whole()
        return events

    def show(self, shown: Shown) -> None:
        """Adds what there is to take."""
        self._stats = shown.stats or self._stats
        if shown.is_whole:
            self._cache, self._waits_for_whole, self._is_behind = shown.cache, False, False
        elif shown.cache and not self._waits_for_whole:
            self._is_behind = self._is_behind or bool(self._cache)
            self._cache = b"" if self._is_behind else shown.cache
        self._viewers.arrivals.add(lambda: self._wake())


class Viewers:
    """The viewers of one process. `ask_whole` is called when one of them needs the whole state of the cache: at first, and after a gap."""

    def __init__(self, arrivals: Arrivals, ask_whole: Callable[[], None]) -> None:
        self.arrivals, self.ask_whole = arrivals, ask_whole
        self.shows: list[Callable[[Shown], None]] = []
        """Viewer.show of each, and in a front process what shows it to those of an API process."""
        self.ended = False

    def join(self) -> Viewer:
        """A new viewer, until its `show` is removed. Raises Overloaded."""
        if len(self.shows) >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} viewers watch this server, which is the limit; try again later"
            raise Overloaded(text, RETRY_SECONDS, code="too_many_viewers")
        viewer = Viewer(self)
        self.shows.append(viewer.show)
        self.ask_whole()
        return viewer

    def show(self, shown: Shown) -> None:
        """Shows it to all."""
        for show in self.shows:
            show(shown)

    def end(self) -> None:
        """Ends the responses."""
        self.ended = True
        self.show(Shown())
