"""Resumable streams over HTTP, for both dialects; GET and DELETE /v1/streams/{id}.

A task writes the events of a stream into a StreamBuffer, and every connection, the first one included, reads from the buffer. Invariant:
a lost connection does not affect generation. It treats events as opaque bytes.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.errors import GenerationFailed, MalformedBody, RequestError, StreamCancelled
from server.http import sse
from server.http.exchange import Dialect, exchange_of
from server.http.routes import Route
from server.http.stream_buffer import Reader, StreamBuffer, StreamStore

RETRY = b"retry: 1000\n"
SUPERSEDED = b"event: superseded\ndata: {}\n\n"
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]+)\.([0-9]{1,15})")
_NUMBER = re.compile(r"[0-9]{1,15}")
_GAP = GenerationFailed("some events after the last one you received are no longer kept", code="resume_gap")


class StreamPublisher:
    """Runs the tasks that write resumable streams, and makes the responses that read them."""

    def __init__(self, store: StreamStore, keep_alive: float) -> None:
        self.store = store
        self.keep_alive = keep_alive
        self._tasks: set[asyncio.Task[None]] = set()

    def publish(
        self,
        http: HttpRequest,
        events: AsyncIterator[list[bytes]],
        close: Callable[[], None],
        error_event: Callable[[RequestError], bytes],
        headers: dict[str, str],
        last: bytes = b"",
    ) -> Response:
        """Starts a task that writes `events` into a new stream, and returns the first response that reads it. `close` is called when the
        events end, in any way; `last` is the last event.
        """
        exchange = exchange_of(http)
        exchange.outlives_response = True
        reasons: list[str] = []

        def stop(reason: str) -> None:
            reasons.append(reason)
            task.cancel()

        buffer = self.store.open(exchange.caller, stop, time.monotonic())
        buffer.gap_event = b"event: error\n" + error_event(_GAP)

        async def write() -> None:
            try:
                async for batch in sse.with_error_events(events, error_event, last):
                    for event in batch:
                        self._append(buffer, event)
            except asyncio.CancelledError:
                reason = reasons[0] if reasons else "the server is shutting down"
                self._append(buffer, error_event(StreamCancelled(reason, code="cancelled")))
                if last:
                    self._append(buffer, last)
            finally:
                close()
                exchange.release()
                self.store.end(buffer, time.monotonic())

        task = asyncio.create_task(write())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return self.follow(buffer, 0, headers)

    def _append(self, buffer: StreamBuffer, event: bytes) -> None:
        number = buffer.num_events + 1
        self.store.append(buffer, f"id: {buffer.id}.{number}\n".encode() + (RETRY if number == 1 else b"") + event)

    def follow(self, buffer: StreamBuffer, seen: int, headers: dict[str, str]) -> Response:
        """A response with the events after number `seen`. Raises MalformedBody if there is no such event yet."""
        changed = asyncio.Event()
        reader = self.store.attach(buffer, seen, changed.set)
        return sse.EventResponse(
            _events(reader, changed),
            lambda: self.store.detach(reader, time.monotonic()),
            {**headers, "x-stream-id": buffer.id},
            self.keep_alive,
            # Without an empty line, which some clients would take for an empty event with the last id.
            comment=b": keep-alive\n",
        )


async def _events(reader: Reader, changed: asyncio.Event) -> AsyncIterator[list[bytes]]:
    while True:
        changed.clear()
        gap, events = reader.take()
        if gap:
            yield [reader.buffer.gap_event]
        for begin in range(0, len(events), sse.MAX_EVENTS_PER_WRITE):
            yield [event for _, event in events[begin : begin + sse.MAX_EVENTS_PER_WRITE]]
        if reader.superseded:
            yield [SUPERSEDED]
            return
        if reader.finished:
            return
        if not events:
            await changed.wait()


class StreamRoutes:
    """Handlers of /v1/streams/{id}."""

    def __init__(self, publisher: StreamPublisher) -> None:
        self.publisher = publisher

    def routes(self) -> list[Route]:
        path = "/v1/streams/{stream_id}"
        return [
            Route(path, ("GET",), self.resume, Dialect.OPENAI, tag="streams"),
            Route(path, ("DELETE",), self.cancel, Dialect.OPENAI, tag="streams", status=204),
        ]

    async def resume(self, http: HttpRequest, stream_id: str) -> Response:
        """Read a resumable stream again.

        The events after the one that `Last-Event-ID` or `after` names: those there are at once, then the others as they come.
        """
        buffer = self._find(http, stream_id)
        seen = _last_seen(http, buffer.id)
        if buffer.ended and seen == buffer.num_events:
            return Response(status_code=204)
        return self.publisher.follow(buffer, seen, {})

    async def cancel(self, http: HttpRequest, stream_id: str) -> Response:
        """Cancel a resumable stream.

        Closing its connection does not cancel it: it goes on for server.detach_grace seconds.
        """
        self._find(http, stream_id).stop("the stream was cancelled")
        return Response(status_code=204)

    def _find(self, http: HttpRequest, stream_id: str) -> StreamBuffer:
        return self.publisher.store.find(stream_id, exchange_of(http).caller)


def _last_seen(http: HttpRequest, stream_id: str) -> int:
    """The number of the last event that the client received, 0 by default. Raises MalformedBody."""
    ids = http.headers.getlist("last-event-id")
    if ids:
        match = _EVENT_ID.fullmatch(ids[0])
        if len(ids) > 1 or match is None or match[1] != stream_id:
            raise MalformedBody("`Last-Event-ID` is no event of this stream; it must be as the stream gave it", code="invalid_event_id")
        return int(match[2])
    after = http.query_params.getlist("after")
    if len(after) > 1 or (after and _NUMBER.fullmatch(after[0]) is None):
        raise MalformedBody("`after` must be the number of an event: digits, once", code="invalid_event_id")
    return int(after[0]) if after else 0
