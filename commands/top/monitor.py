"""The events of GET /monitor, and what they say about a server: the pages and sequences of its engine, and rates over the last seconds.

Invariant: the state is that of the last cache event that continued it: changes of another engine, or after a view that has not come, are
left out until the next whole event. It reads no clock: times are the server's. It knows nothing of terminals.
"""

from array import array
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from commands.bench.client import Endpoint, ReplyError, refusal, talk
from server.protocol import FREE, SHARED

RATE_SECONDS, QUANTILE_SECONDS = 5.0, 60.0
"""Rates are those of so many seconds, quantiles of latencies too."""


class Refused(ReplyError):
    """An answer that would be the same again; the message says what to do."""


class Row(msgspec.Struct, array_like=True):
    """One open sequence."""

    id: int
    request: str
    state: str
    num_prompt: int
    num_cached: int
    num_computed: int
    num_output: int
    num_pages: int
    num_preemptions: int


class CacheEvent(msgspec.Struct):
    """Pages and sequences: all of them, or those that have changed."""

    engine: int
    view: int
    whole: bool
    num_pages: int
    cells: list[int]
    sequences: list[Row]
    ended: list[int]


class Totals(msgspec.Struct):
    """Counts since the server's start."""

    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    requests: dict[str, int]


class Histogram(msgspec.Struct):
    """Seconds, counted by upper bounds; the last count is of those above all bounds."""

    bounds: list[float]
    counts: list[int]
    sum: float


class Stats(msgspec.Struct):
    """The server's figures at a time."""

    time: float
    status: str
    restarts: int
    model: str
    running: int
    waiting: int
    totals: Totals
    time_to_first_token: Histogram
    inter_token_latency: Histogram
    step_time: Histogram
    device: str = ""
    """Empty, as the ratio is 0, while the first engine is loaded."""
    multi_head_ratio: float = 0.0


class Event(NamedTuple):
    """One server-sent event."""

    name: str
    data: bytes


async def events(endpoint: Endpoint, key: str | None) -> AsyncIterator[Event]:
    """The events of GET /monitor as they come. Raises OSError, ReplyError where the answer ends or is no such stream, and Refused."""
    headers = {"accept": "text/event-stream"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    name, data, tail = "", b"", b""
    async with aclosing(talk(endpoint, endpoint.request("GET", "/monitor", headers=headers))) as pieces:
        async for status, piece in pieces:
            if status != 200:
                raise _refusal(status, piece, key)
            *lines, tail = (tail + piece).split(b"\n")
            for line in lines:
                field, _, value = line.rstrip(b"\r").partition(b":")
                if field == b"event":
                    name = value.strip().decode("latin-1")
                elif field == b"data":
                    data += value.lstrip()
                elif not line.strip() and data:
                    yield Event(name, data)
                    name, data = "", b""
    raise ReplyError("the server has ended the connection")


def _refusal(status: int, body: bytes, key: str | None) -> ReplyError:
    """The error for an answer that is no stream."""
    if status == 401:
        return Refused("it needs a key: --key, or the environment variable ONEHEAD_KEY" if key is None else "it does not accept the key")
    if status in (404, 405):
        return Refused("it has no GET /monitor: its option server.ui is false, or it is of another version")
    return ReplyError(f"GET /monitor is answered with {refusal(status, body)}")


class Monitor:
    """What the events of one server have said so far."""

    def __init__(self) -> None:
        self.engine = self.view = -1
        self.kinds, self.owners = bytearray(), array("q")
        """Of each page: its kind, and the sequence that owns it, -1 where none does."""
        self.sequences: dict[int, Row] = {}
        self.history: deque[Stats] = deque()
        """The figures of the last QUANTILE_SECONDS, the oldest first."""
        self._outputs: deque[tuple[float, dict[int, int]]] = deque(maxlen=3)
        """Times, and the number of output tokens of each sequence then."""

    @property
    def status(self) -> str:
        """The server's status in words, as its last stats event has it."""
        return self.history[-1].status if self.history else "unknown"

    @property
    def has_engine(self) -> bool:
        """Whether an engine's pages and sequences are known, and figures of the server since it was loaded."""
        return self.engine >= 0 and bool(self.history and self.history[-1].device)

    @property
    def is_complete(self) -> bool:
        """Whether pages, sequences and rates are known."""
        return self.has_engine and len(self._outputs) == self._outputs.maxlen

    def take(self, event: Event) -> None:
        """One event; one with another name is left out. Raises ReplyError where it is not as it should be."""
        try:
            if event.name == "cache":
                self._take_cache(msgspec.json.decode(event.data, type=CacheEvent))
            elif event.name == "stats":
                self._take_stats(msgspec.json.decode(event.data, type=Stats))
        except (msgspec.DecodeError, ValueError) as error:
            raise ReplyError(f"an event of GET /monitor cannot be read: {error}") from None

    def _take_cache(self, event: CacheEvent) -> None:
        if event.whole:
            self.engine = event.engine
            self.kinds, self.owners = bytearray(event.num_pages), array("q", [-1]) * event.num_pages
            self.sequences = {}
        elif (event.engine, event.view) != (self.engine, self.view + 1):
            return
        self.view = event.view
        cells = event.cells
        for first, count, kind, owner in zip(cells[::5], cells[1::5], cells[2::5], cells[3::5], strict=True):
            if not 0 <= first <= first + count <= len(self.kinds) or not FREE <= kind <= SHARED:
                raise ValueError(f"there are {len(self.kinds)} pages and 4 kinds; got {count} from page {first} on, of kind {kind}")
            self.kinds[first : first + count] = bytes([kind]) * count
            self.owners[first : first + count] = array("q", [owner]) * count
        self.sequences |= {row.id: row for row in event.sequences}
        for id in event.ended:
            self.sequences.pop(id, None)

    def _take_stats(self, stats: Stats) -> None:
        history = self.history
        if history and stats.time == history[-1].time:
            return  # A connection begins with the last figures, which the one before had.
        if history and (stats.totals.generation_tokens < history[-1].totals.generation_tokens or stats.time < history[-1].time):
            history.clear()  # Another server than before: its counts began at 0.
        history.append(stats)
        while stats.time - history[0].time > QUANTILE_SECONDS:
            history.popleft()
        self._outputs.append((stats.time, {id: row.num_output for id, row in self.sequences.items()}))

    def span(self, seconds: float) -> tuple[Stats, Stats]:
        """The oldest figures that are at most so many seconds old, and the latest. There must be one."""
        last = self.history[-1]
        return next(each for each in self.history if last.time - each.time <= seconds), last

    def tokens_per_second(self, row: Row) -> float | None:
        """Of one sequence; None where it is too new."""
        known = [(time, outputs[row.id]) for time, outputs in self._outputs if row.id in outputs]
        if len(known) < 2:
            return None
        (start, before), (end, now) = known[0], known[-1]
        return (now - before) / (end - start)


def quantiles(before: Histogram | None, now: Histogram, shares: Sequence[float]) -> list[float] | None:
    """Of the values that were counted between two states of a histogram, of all where `before` is None; straight lines within a bucket.
    None where there were none.
    """
    earlier = [0] * len(now.counts) if before is None else before.counts
    counts = [after - count for after, count in zip(now.counts, earlier, strict=True)]
    total, bounds = sum(counts), [0.0, *now.bounds, now.bounds[-1]]  # Above the last bound nothing is known but that bound.
    found = []
    for share in shares if total > 0 else ():
        left = share * total
        for count, low, high in zip(counts, bounds, bounds[1:], strict=True):
            if count and left <= count:
                found.append(low + (high - low) * left / count)
                break
            left -= count
    return found or None
