"""Resumable streams over HTTP, for both dialects; GET and DELETE /v1/streams/{id}.

The events of a stream are written into a StreamBuffer as they come, and every connection, the first
one included, reads from the buffer. Invariant: a lost connection does not affect generation. It
treats events as opaque bytes.
"""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.errors import GenerationFailed, MalformedBody, RequestError, StreamCancelled
from server.generation.arrivals import Wake
from server.http import sse
from server.http.exchange import Dialect, Exchange, exchange_of
from server.http.routes import Route
from server.http.stream_buffer import Reader, StreamBuffer, StreamStore

log = logging.getLogger("onehead.api")
RETRY = "retry: 1000\n"
SUPERSEDED = b"event: superseded\ndata: {}\n\n"
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]+)\.([0-9]{1,15})")
_NUMBER = re.compile(r"[0-9]{1,15}")
_GAP = GenerationFailed(
    "some events after the last one you received are no longer kept", code="resume_gap"
)


class StreamWriter:
    """Writes the events of one request into a new stream as they come. `close` is called when they
    end, in any way.
    """

    def __init__(
        self,
        store: StreamStore,
        exchange: Exchange,
        source: sse.Source,
        close: Callable[[], None],
        error_event: Callable[[RequestError], bytes],
        last: bytes,
    ) -> None:
        self._store, self._exchange, self._source = store, exchange, source
        self._close, self._error_event, self._last = close, error_event, last
        self.buffer = store.open(exchange.caller, self._stop, time.monotonic(), exchange.client)
        self.buffer.gap_event = b"event: error\n" + error_event(_GAP)
        source.listen(self._push)
        asyncio.get_running_loop().call_soon(self._push)

    def _push(self) -> None:
        if self.buffer.ended:
            return
        try:
            events = self._source.take()
            self._append(*events)
        except Exception:
            log.exception("the events of a stream could not be written")
            return self._end(
                RequestError("internal error; the server's log has it under the request id")
            )
        if self._source.ended:
            self._end()
        elif not sse.is_whole(events):
            asyncio.get_running_loop().call_soon(self._push)  # Other streams come first.

    def _append(self, *events: bytes) -> None:
        buffer = self.buffer
        numbered = (
            f"id: {buffer.id}.{number}\n{'' if number > 1 else RETRY}".encode() + event
            for number, event in enumerate(events, buffer.num_events + 1)
        )
        self._store.append(buffer, *numbered)

    def _stop(self, reason: str) -> None:
        self._end(StreamCancelled(reason, code="cancelled"))

    def _end(self, error: RequestError | None = None) -> None:
        try:
            if error is not None:
                self._append(self._error_event(error), *filter(None, (self._last,)))
        finally:
            self._store.end(self.buffer, time.monotonic())
            self._source.listen(lambda: None)
            self._close()
            self._exchange.release()


class StreamPublisher:
    """Writes resumable streams, and makes the responses that read them."""

    def __init__(self, store: StreamStore, keep_alive: float) -> None:
        self.store = store
        self.keep_alive = keep_alive

    def publish(
        self,
        http: HttpRequest,
        source: sse.Source,
        close: Callable[[], None],
        error_event: Callable[[RequestError], bytes],
        headers: dict[str, str],
        last: bytes = b"",
    ) -> Response:
        """Writes the events of `source` into a new stream as they come, and returns the first
        response that reads it. `close` is called when the events end, in any way; `last` is the
        last event.
        """
        exchange = exchange_of(http)
        exchange.outlives_response = True
        writer = StreamWriter(self.store, exchange, source, close, error_event, last)
        return self.follow(writer.buffer, 0, headers)

    def follow(self, buffer: StreamBuffer, seen: int, headers: dict[str, str]) -> Response:
        """A response with the events after number `seen`. Raises MalformedBody if there is no such
        event yet.
        """
        reader = self.store.attach(buffer, seen)
        return sse.EventResponse(
            ReaderEvents(reader),
            lambda: self.store.detach(reader, time.monotonic()),
            {**headers, "x-stream-id": buffer.id},
            self.keep_alive,
            # Without an empty line, which some clients would take for an empty event with the last
            # id.
            sse.EVENTS._replace(comment=b": keep-alive\n"),
        )


class ReaderEvents:
    """The events that one connection reads from a buffer."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._left: deque[bytes] = deque()
        """Taken from the buffer, and not yet written."""
        self.ended = False

    def listen(self, wake: Wake) -> None:
        self._reader.wake = wake

    def take(self) -> list[bytes]:
        if self.ended:
            return []
        if not self._left:
            gap, events = self._reader.take()
            self._left.extend([self._reader.buffer.gap_event] * gap)
            self._left.extend(event for _, event in events)
        batch = [
            self._left.popleft() for _ in range(min(len(self._left), sse.MAX_EVENTS_PER_WRITE))
        ]
        if not self._left and (self._reader.superseded or self._reader.finished):
            self.ended = True
            return [*batch, SUPERSEDED] if self._reader.superseded else batch
        return batch


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

        The events after the one that `Last-Event-ID` or `after` names: those there are at once,
        then the others as they come.
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
            raise MalformedBody(
                "`Last-Event-ID` is no event of this stream; it must be as the stream gave it",
                code="invalid_event_id",
            )
        return int(match[2])
    after = http.query_params.getlist("after")
    if len(after) > 1 or (after and _NUMBER.fullmatch(after[0]) is None):
        raise MalformedBody(
            "`after` must be the number of an event: digits, once", code="invalid_event_id"
        )
    return int(after[0]) if after else 0
