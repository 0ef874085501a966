"""Resumable streams: numbered events kept for readers that lose their connection and come back.

A StreamBuffer holds the last events of one stream, whole; a StreamStore owns them all, within bounds of bytes and time. Pure: time is an
argument, a waiting reader is a callback, what an event says is bytes. Invariants: event numbers are 1, 2, 3, ... without gap; a reader
gets each number behind its own once, or is told that some are gone; of two readers the newer one wins.
"""

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

EVENT_OVERHEAD = 64
"""Bytes that an event costs besides its own."""
MAX_EXPIRED = 10_000
"""Streams that are remembered as expired."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Bounds: seconds after the last event, bytes of one stream and of all, seconds without a reader, streams without one."""

    seconds: float = 60.0
    stream_bytes: int = 2**20
    total_bytes: int = 64 * 2**20
    detach_seconds: float = 30.0
    max_detached: int = 64


class UnknownStream(Exception):
    """No such stream, or somebody else's: which of the two is not for the asker to know."""


class ExpiredStream(Exception):
    """The stream was the asker's and is not kept any more."""


class FutureEvent(Exception):
    """An event is named that there has not been."""


class Reader:
    """Somebody who follows a stream; `wake` is called when there is something new."""

    def __init__(self, buffer: "StreamBuffer", last_seen: int, wake: Callable[[], None]) -> None:
        self.buffer = buffer
        self.last_seen = last_seen
        self.wake = wake

    @property
    def superseded(self) -> bool:
        """Whether another one follows the stream now."""
        return self.buffer.reader is not self

    @property
    def finished(self) -> bool:
        """Whether nothing will come any more."""
        return self.buffer.ended and self.last_seen >= self.buffer.num_events

    def take(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """What is new, by number; and whether some of it is gone already."""
        gap, events = self.buffer.after(self.last_seen)
        if events:
            self.last_seen = events[-1][0]
        return gap, events


class StreamBuffer:
    """One stream's events, of which the last are kept."""

    def __init__(self, id: str, owner: str, stop: Callable[[str], None], now: float) -> None:
        self.id = id
        self.owner = owner
        self._stop = stop
        self._stopped = False
        self.num_events = 0
        self.num_bytes = 0
        self.ended = False
        self.idle_since = now
        """When it lost its reader, or ended."""
        self.reader: Reader | None = None
        self.gap_event = b""
        """What to tell a reader for whom it is too late."""
        self._events: deque[bytes] = deque()

    def stop(self, reason: str) -> None:
        """Has it end before its time, once."""
        if not self._stopped and not self.ended:
            self._stopped = True
            self._stop(reason)

    def append(self, event: bytes) -> int:
        """Adds an event; the bytes that it takes."""
        self._events.append(event)
        self.num_events += 1
        size = len(event) + EVENT_OVERHEAD
        self.num_bytes += size
        if self.reader is not None:
            self.reader.wake()
        return size

    def drop_oldest(self) -> int:
        """Forgets the oldest event that is kept; the bytes that are free now. The newest is never forgotten."""
        if len(self._events) < 2:
            return 0
        size = len(self._events.popleft()) + EVENT_OVERHEAD
        self.num_bytes -= size
        return size

    def after(self, seen: int) -> tuple[bool, list[tuple[int, bytes]]]:
        """Every event kept of those after number `seen`; and whether some of them are not kept. Raises FutureEvent."""
        if seen > self.num_events:
            raise FutureEvent
        first = self.num_events - len(self._events) + 1
        start = max(0, seen + 1 - first)
        kept = [self._events[i] for i in range(start, len(self._events))]
        return seen + 1 < first, list(enumerate(kept, first + start))


class StreamStore:
    """All resumable streams of a server."""

    def __init__(self, retention: Retention, new_id: Callable[[], str] = lambda: secrets.token_urlsafe(24)) -> None:
        self.retention = retention
        self._new_id = new_id
        self._streams: OrderedDict[str, StreamBuffer] = OrderedDict()
        """Running ones, and ended ones in the order in which they ended."""
        self._ended: OrderedDict[str, StreamBuffer] = OrderedDict()
        self._expired: OrderedDict[str, str] = OrderedDict()
        """Id -> owner."""
        self.num_bytes = 0

    @property
    def num_detached(self) -> int:
        """Running streams that nobody reads."""
        return len(self._detached())

    def open(self, owner: str, stop: Callable[[str], None], now: float) -> StreamBuffer:
        """A new stream of `owner`. `stop` is called with a reason, at most once, where the stream is to end before its time."""
        buffer = StreamBuffer(self._new_id(), owner, stop, now)
        self._streams[buffer.id] = buffer
        return buffer

    def find(self, id: str, owner: str) -> StreamBuffer:
        """The stream of that id. Raises UnknownStream or ExpiredStream."""
        buffer = self._streams.get(id)
        if buffer is not None and buffer.owner == owner:
            return buffer
        if buffer is None and self._expired.get(id) == owner:
            raise ExpiredStream
        raise UnknownStream

    def append(self, buffer: StreamBuffer, event: bytes) -> None:
        """Adds an event, at the cost of what is oldest: of ended streams first, then of this one."""
        self.num_bytes += buffer.append(event)
        while buffer.num_bytes > self.retention.stream_bytes and (freed := buffer.drop_oldest()):
            self.num_bytes -= freed
        while self.num_bytes > self.retention.total_bytes:
            oldest = next((ended for ended in self._ended.values() if ended is not buffer), None)
            if oldest is not None:
                self._expire(oldest)
            elif freed := buffer.drop_oldest():
                self.num_bytes -= freed
            else:
                break

    def end(self, buffer: StreamBuffer, now: float) -> None:
        """No more events will come."""
        buffer.ended = True
        buffer.idle_since = now
        self._ended[buffer.id] = buffer
        if buffer.reader is not None:
            buffer.reader.wake()

    def attach(self, buffer: StreamBuffer, seen: int, wake: Callable[[], None]) -> Reader:
        """Follows a stream behind event `seen`; whoever did so until now is superseded. Raises FutureEvent."""
        buffer.after(seen)
        old, buffer.reader = buffer.reader, Reader(buffer, seen, wake)
        if old is not None:
            old.wake()
        return buffer.reader

    def detach(self, reader: Reader, now: float) -> None:
        """The reader has gone; the stream goes on without it for a while."""
        buffer = reader.buffer
        if not reader.superseded:
            buffer.reader = None
            if not buffer.ended:
                buffer.idle_since = now
                self._detach_oldest()

    def sweep(self, now: float) -> None:
        """Forgets what ended long ago, and cancels what nobody has read for long."""
        for buffer in list(self._ended.values()):
            if now - buffer.idle_since < self.retention.seconds:
                break
            if buffer.reader is None:
                self._expire(buffer)
        for buffer in self._detached():
            if now - buffer.idle_since >= self.retention.detach_seconds:
                buffer.stop(f"nobody read this stream for {self.retention.detach_seconds:g} s")

    def _detached(self) -> list[StreamBuffer]:
        return [buffer for buffer in self._streams.values() if buffer.reader is None and not buffer.ended]

    def _detach_oldest(self) -> None:
        detached = sorted(self._detached(), key=lambda buffer: buffer.idle_since)
        for buffer in detached[: max(0, len(detached) - self.retention.max_detached)]:
            buffer.stop(f"more than {self.retention.max_detached} streams have nobody who reads them")

    def _expire(self, buffer: StreamBuffer) -> None:
        del self._streams[buffer.id], self._ended[buffer.id]
        self.num_bytes -= buffer.num_bytes
        self._expired[buffer.id] = buffer.owner
        if len(self._expired) > MAX_EXPIRED:
            self._expired.popitem(last=False)
