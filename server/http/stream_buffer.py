"""Resumable streams: buffers of numbered events, from which a client reads on after its connection
was lost.

A StreamBuffer holds the last events of one stream; the StreamStore owns all buffers, within bounds
on bytes and time. It does no I/O: time is an argument, a reader is woken by a callback, an event is
opaque bytes. Invariants: event numbers are 1, 2, 3, ... without gaps; a reader gets each event
after its last one exactly once, or is told that some were dropped; a new reader supersedes the one
before it.
"""

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from server.errors import MalformedBody, NotFound, StreamExpired

Wake = Callable[[], Callable[[], object] | None]
"""Called when there is something to read; what it returns is called next."""
EVENT_OVERHEAD = 64
"""Estimated bytes of memory for an event besides its data."""
MAX_EXPIRED = 10_000
"""Number of expired streams whose ids are remembered."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The bounds of a StreamStore."""

    seconds: float = 60.0
    """Time for which an ended stream is kept."""
    stream_bytes: int = 2**20
    """Most bytes of one stream."""
    total_bytes: int = 64 * 2**20
    """Most bytes of all streams."""
    detach_seconds: float = 30.0
    """Time after which a running stream without a reader is cancelled."""
    max_detached: int = 64
    """Most running streams without a reader."""


@dataclass(slots=True, eq=False)
class Reader:
    """The connection that reads a stream. `wake` is called when `take` or a property has something
    new.
    """

    buffer: "StreamBuffer"
    last_seen: int
    wake: Wake

    def tell(self) -> None:
        """Calls `wake`, and what it returns."""
        if (write := self.wake()) is not None:
            write()

    @property
    def superseded(self) -> bool:
        """Whether a newer reader has taken over the stream."""
        return self.buffer.reader is not self

    @property
    def finished(self) -> bool:
        """Whether the stream has ended and all its events were taken."""
        return self.buffer.ended and self.last_seen >= self.buffer.num_events

    def take(self, most: int) -> tuple[bool, list[tuple[int, bytes]]]:
        """Whether events were dropped before they could be taken, and up to `most` new events as
        (number, data).
        """
        gap, events = self.buffer.after(self.last_seen, most)
        if events:
            self.last_seen = events[-1][0]
        return gap, events


class StreamBuffer:
    """The last events of one stream."""

    def __init__(
        self, id: str, owner: str, stop: Callable[[str], None], now: float, client: str
    ) -> None:
        self.id = id
        self.owner = owner
        self.client = client
        self._stop = stop
        self._stopped = False
        self.num_events = 0
        self.num_bytes = 0
        self.ended = False
        self.idle_since = now
        """Time when it lost its reader, or ended."""
        self.reader: Reader | None = None
        self.on_expire: Callable[[], object] = lambda: None
        """Called when the stream is no longer kept."""
        self.is_restored = False
        """Whether an earlier server began it, whose last events this one may have to make again."""
        self.is_queued = False
        """Whether it has yet to go on; nobody is missed as its reader."""
        self.gap_event = b""
        """The event for a reader whose next event was dropped."""
        self._events: deque[bytes] = deque()

    def stop(self, reason: str) -> None:
        """Cancels the stream, if it has neither ended nor been cancelled."""
        if not self._stopped and not self.ended:
            self._stopped = True
            self._stop(reason)

    def append(self, event: bytes) -> int:
        """Adds an event. Returns the bytes that it takes."""
        self._events.append(event)
        self.num_events += 1
        size = len(event) + EVENT_OVERHEAD
        self.num_bytes += size
        return size

    def tell(self) -> None:
        """Wakes the reader, after events were added or the stream has ended."""
        if self.reader is not None:
            self.reader.tell()

    def drop_oldest(self) -> int:
        """Drops the oldest event and returns the freed bytes; 0 if there is only one, which is
        kept.
        """
        if len(self._events) < 2:
            return 0
        size = len(self._events.popleft()) + EVENT_OVERHEAD
        self.num_bytes -= size
        return size

    def after(self, seen: int, most: int) -> tuple[bool, list[tuple[int, bytes]]]:
        """Whether events after number `seen` were dropped, and the first events after it that are
        kept, up to `most`, as (number, data).
        """
        first = self.num_events - len(self._events) + 1
        start = max(0, seen + 1 - first)
        kept = [self._events[i] for i in range(start, min(start + most, len(self._events)))]
        return seen + 1 < first, list(enumerate(kept, first + start))


class StreamStore:
    """The resumable streams of a server."""

    def __init__(
        self, retention: Retention, new_id: Callable[[], str] = lambda: secrets.token_urlsafe(24)
    ) -> None:
        self.retention = retention
        self._new_id = new_id
        self._streams: OrderedDict[str, StreamBuffer] = OrderedDict()
        """All that are kept, by id."""
        self._ended: OrderedDict[str, StreamBuffer] = OrderedDict()
        """The ended ones among them, in the order in which they ended."""
        self._expired: OrderedDict[str, str] = OrderedDict()
        """Id -> owner of streams that are no longer kept."""
        self.num_bytes = 0
        self._bytes = Counter[str]()
        """Client -> bytes of its streams, where there are any."""

    def _count(self, buffer: StreamBuffer, num_bytes: int) -> None:
        """Counts bytes that were added to a stream, or removed from it."""
        self.num_bytes += num_bytes
        self._bytes[buffer.client] += num_bytes
        if not self._bytes[buffer.client]:
            del self._bytes[buffer.client]

    @property
    def num_detached(self) -> int:
        """Number of running streams without a reader."""
        return len(self._detached())

    def open(
        self, owner: str, stop: Callable[[str], None], now: float, client: str = "", id: str = ""
    ) -> StreamBuffer:
        """Creates a stream of `owner`. `stop` is called, at most once, with the reason for which
        the stream is cancelled. `client`: who shares the bounds with others; the owner by default.
        `id`: that of a stream of an earlier server.
        """
        buffer = StreamBuffer(id or self._new_id(), owner, stop, now, client or owner)
        buffer.is_restored = bool(id)
        self._streams[buffer.id] = buffer
        return buffer

    def find(self, id: str, owner: str) -> StreamBuffer:
        """The stream `id` of `owner`. Raises NotFound or StreamExpired."""
        buffer = self._streams.get(id)
        if buffer is not None and buffer.owner == owner:
            return buffer
        if buffer is None and self._expired.get(id) == owner:
            raise StreamExpired(
                "that stream has expired; send the request again", code="stream_expired"
            )
        # A stream of another caller must look like no stream.
        raise NotFound("there is no such stream", code="stream_not_found")

    def append(self, buffer: StreamBuffer, *events: bytes) -> None:
        """Adds events, and wakes the reader once. Over `stream_bytes` it drops the oldest events of
        this stream; over `total_bytes`, of the client that has the most, whole ended streams, the
        oldest first, and then the oldest events of this or its largest stream.
        """
        for event in events:
            self._count(buffer, buffer.append(event))
            self._drop(buffer)
        buffer.tell()

    def _drop(self, buffer: StreamBuffer) -> None:
        """Drops events until the bounds hold."""
        while buffer.num_bytes > self.retention.stream_bytes and (freed := buffer.drop_oldest()):
            self._count(buffer, -freed)
        while self.num_bytes > self.retention.total_bytes:
            client = max(self._bytes, key=self._bytes.__getitem__)
            oldest = next(
                (
                    ended
                    for ended in self._ended.values()
                    if ended.client == client and ended is not buffer
                ),
                None,
            )
            if oldest is not None:
                self._expire(oldest)
                continue
            own = (
                [buffer]
                if buffer.client == client
                else [stream for stream in self._streams.values() if stream.client == client]
            )
            largest = max(own, key=lambda stream: stream.num_bytes)
            if not (freed := largest.drop_oldest()):
                break
            self._count(largest, -freed)

    def end(self, buffer: StreamBuffer, now: float) -> None:
        """Marks the stream as ended."""
        buffer.ended = True
        buffer.idle_since = now
        self._ended[buffer.id] = buffer
        buffer.tell()

    def attach(self, buffer: StreamBuffer, seen: int, wake: Wake = lambda: None) -> Reader:
        """A new reader of the events after number `seen`, which supersedes the current reader.
        Raises MalformedBody if event `seen` has not come yet, and no server before may have sent
        it.
        """
        if seen > buffer.num_events and (buffer.ended or not buffer.is_restored):
            raise MalformedBody(
                f"that event has not been sent yet; the last one is {buffer.num_events}",
                code="future_event",
            )
        old, buffer.reader = buffer.reader, Reader(buffer, seen, wake)
        if old is not None:
            old.tell()
        return buffer.reader

    def detach(self, reader: Reader, now: float) -> None:
        """Removes a reader that has disconnected; the stream continues for `detach_seconds`."""
        buffer = reader.buffer
        if not reader.superseded:
            buffer.reader = None
            if not buffer.ended:
                buffer.idle_since = now
                self._cancel_longest_detached()

    def sweep(self, now: float) -> None:
        """Drops streams that ended `seconds` ago; cancels running ones without a reader for
        `detach_seconds`.
        """
        for buffer in list(self._ended.values()):
            if now - buffer.idle_since < self.retention.seconds:
                break
            if buffer.reader is None:
                self._expire(buffer)
        for buffer in self._detached():
            if now - buffer.idle_since >= self.retention.detach_seconds:
                buffer.stop(f"this stream had no reader for {self.retention.detach_seconds:g} s")

    def _detached(self) -> list[StreamBuffer]:
        return [
            buffer
            for buffer in self._streams.values()
            if buffer.reader is None and not buffer.ended and not buffer.is_queued
        ]

    def _cancel_longest_detached(self) -> None:
        """Cancels streams without a reader, down to `max_detached`: of the client that has most of
        them the one without for longest.
        """
        # A restart takes the readers of all streams at once.
        detached = [buffer for buffer in self._detached() if not buffer.is_restored]
        detached.sort(key=lambda buffer: buffer.idle_since)
        while len(detached) > self.retention.max_detached:
            held = Counter(buffer.client for buffer in detached)
            longest = max(detached, key=lambda buffer: held[buffer.client])
            detached.remove(longest)
            longest.stop(
                f"more than {self.retention.max_detached} streams have no reader, most of them "
                "this client's"
            )

    def _expire(self, buffer: StreamBuffer) -> None:
        del self._streams[buffer.id], self._ended[buffer.id]
        self._count(buffer, -buffer.num_bytes)
        buffer.on_expire()
        self._expired[buffer.id] = buffer.owner
        if len(self._expired) > MAX_EXPIRED:
            self._expired.popitem(last=False)
