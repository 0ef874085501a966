"""Resumable streams over HTTP, for both dialects; GET and DELETE /v1/streams/{id}.

The events of a stream are written into a StreamBuffer as they come, and every connection, the first
one included, reads from the buffer. With a journal a later server goes on with it: it asks for the
same again, with the tokens that there were. Invariant: a lost connection does not affect
generation. It treats events as opaque bytes.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server import protocol
from server.errors import GenerationFailed, MalformedBody, RequestError, StreamCancelled
from server.generation.arrivals import Wake
from server.generation.clients import EVERYBODY
from server.http import sse
from server.http.answer import Reply, ReplyEvents
from server.http.errors import OPENAI, Dialect
from server.http.exchange import Exchange, exchange_of
from server.http.front import FrontDoor
from server.http.routes import Route
from server.http.stream_buffer import Reader, StreamBuffer, StreamStore
from server.http.stream_journal import Asked, Part, StreamFile, StreamJournal
from server.supervision.journal import Restored

log = logging.getLogger("onehead.api")
KEPT_HEADERS = frozenset({b"content-type", b"host", b"x-stream-resumable"})
"""Headers on which a request's meaning depends. That of its key is not kept."""
REPEAT_SECONDS = 1.0
"""Until a request is made again that an earlier server had taken and this one is too full for."""
MAX_REPEATS = 3
"""Servers that go on with a stream, one after the other, without an event more."""
RETRY = "retry: 1000\n"
SUPERSEDED = b"event: superseded\ndata: {}\n\n"
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]+)\.([0-9]{1,15})")
_GAP = GenerationFailed(
    "some events after the last one you received are no longer kept", code="resume_gap"
)


class StreamWriter:
    """Writes the events of one request into a stream, and into its file if it has one. `id`: that
    of a stream of an earlier server.
    """

    def __init__(self, store: StreamStore, caller: str, client: str, id: str = "") -> None:
        self._store = store
        self._exchange: Exchange | None = None
        self._source: ReplyEvents
        self._last = b""
        self._error_event: Callable[[RequestError], bytes]
        """Of an error that is the stream's, not the reply's."""
        self._file: StreamFile | None = None
        self.tokens: list[tuple[int, protocol.Token]] = []
        """Those of an earlier server, until its events have been made again."""
        self._num_repeated = 0
        """Events to come that are in the stream already."""
        self.buffer = store.open(caller, self._stop, time.monotonic(), client, id)

    def restore(
        self, asked: Asked, parts: Sequence[Part], dialect: Dialect, file: StreamFile
    ) -> None:
        """Writes again what an earlier server had written. Until the request is made again, nobody
        is missed as a reader. A stream with which several servers have begun to go on, and none got
        further, is not asked for again: it may be what ended them.
        """
        self._say_errors_by(dialect, sse.NAMED_EVENTS if asked.is_named else sse.EVENTS)
        self._last = asked.last
        self.tokens = [token for part in parts for token in part.tokens]
        self._append(*(event for part in parts for event in part.events))
        self._num_repeated = self.buffer.num_events
        self._keep(file)
        self.buffer.is_queued = True
        if any(part.has_ended for part in parts):
            self._store.end(self.buffer, time.monotonic())
        elif [part for part in parts[-MAX_REPEATS:] if not part.events][MAX_REPEATS - 1 :]:
            self.fail(f"{MAX_REPEATS} servers have ended since it got further")
        else:
            file.write(Part())

    def begin(self, exchange: Exchange, source: ReplyEvents, file: StreamFile | None) -> None:
        """Writes the events of `source` as they come. The sequences of its reply are closed when
        they end, in any way.
        """
        reply, streams = source.reply, source.reply.streams
        if self.buffer.ended:  # It was cancelled meanwhile.
            streams.close()
            exchange.release()
            return
        self._exchange, self._source, self._last = exchange, source, reply.last
        self.buffer.is_queued = False
        self._say_errors_by(exchange.dialect, reply.form)
        if file is not None:
            self._keep(file)
        streams.keeps_taken = self._file is not None
        self.buffer.idle_since = time.monotonic()
        source.listen(self._push)
        asyncio.get_running_loop().call_soon(self._push)

    def fail(self, reason: str) -> None:
        """Ends a stream that does not go on."""
        if not self.buffer.ended:
            log.warning("a stream of an earlier server does not go on: %s", reason)
            text = f"the server was restarted, and the stream does not go on: {reason}"
            self._end(GenerationFailed(text, code="not_restored"))

    def _say_errors_by(self, dialect: Dialect, form: sse.Form) -> None:
        self._error_event = lambda error: sse.event(dialect.body(error), form)
        self.buffer.gap_event = b"event: error\n" + self._error_event(_GAP)

    def _keep(self, file: StreamFile) -> None:
        self._file, self.buffer.on_expire = file, file.remove

    def _push(self) -> None:
        if self.buffer.ended:
            return
        try:
            events = self._source.take()
            self._write(events, self._source.ended)
        except Exception:
            log.exception("the events of a stream could not be written")
            return self._end(
                RequestError("internal error; the server's log has it under the request id")
            )
        if self._source.ended:
            self._end()
        elif not sse.is_whole(events):
            asyncio.get_running_loop().call_soon(self._push)  # Other streams come first.

    def _write(self, events: Sequence[bytes], has_ended: bool) -> None:
        """Writes events into the file and then, where clients see them, into the stream."""
        new = events[self._num_repeated :]
        self._num_repeated -= min(self._num_repeated, len(events))
        if self._file is not None:
            tokens: list[tuple[int, protocol.Token]] = []
            if self._exchange is not None:
                streams = self._source.reply.streams
                taken, streams.taken = streams.taken, []
                tokens = taken[len(self.tokens) :]
                del self.tokens[: len(taken)]
            if new or tokens or has_ended:
                self._file.write(Part(tokens, new, has_ended))
        self._append(*new)

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
                self._num_repeated = 0
                self._write([self._error_event(error), *filter(None, (self._last,))], True)
        finally:
            self._store.end(self.buffer, time.monotonic())
            if self._exchange is not None:
                self._source.listen(lambda: None)
                self._source.reply.streams.close()
                self._exchange.release()


@dataclass
class StreamPublisher:
    """Writes resumable streams, and makes the responses that read them. `journal` keeps them for a
    later server of the same `model`, which says all that an answer depends on besides its request.
    """

    store: StreamStore
    keep_alive: float
    journal: StreamJournal | None = None
    model: Callable[[], str] = lambda: ""
    restored: list[tuple[Asked, StreamWriter]] = field(default_factory=list)
    """Streams of an earlier server that have not ended."""

    def publish(self, http: HttpRequest, source: ReplyEvents) -> Response:
        """Writes the events of `source` into a stream as they come, and returns the first response
        that reads it, or an empty one if an earlier server has begun it. The sequences of its reply
        are closed when the events end, in any way.
        """
        exchange = exchange_of(http)
        body, exchange.body = exchange.body, b""
        exchange.outlives_response = True
        if isinstance(exchange.stream, StreamWriter):
            exchange.stream.begin(exchange, source, None)
            return Response(status_code=204)
        headers = source.reply.headers(streamed=True)
        writer = StreamWriter(self.store, exchange.caller, exchange.client)
        writer.begin(exchange, source, self._file(http, writer.buffer.id, source.reply, body))
        return self.follow(writer.buffer, 0, headers)

    def _file(
        self, http: HttpRequest, stream_id: str, reply: Reply, body: bytes
    ) -> StreamFile | None:
        """A file for a new stream if there is a journal. What scores its prompt is not kept: the
        scores are no part of the tokens.
        """
        submits, reservation = reply.streams.submits, reply.streams.reservation
        if self.journal is None or submits[0].score_prompt:
            return None
        exchange = exchange_of(http)
        asked = Asked(
            stream_id=stream_id,
            caller=exchange.caller,
            client=exchange.client,
            key=reservation.key,
            request_id=exchange.request_id,
            reply_id=reservation.reply_id,
            created=reservation.created,
            path=http.scope["path"],
            headers=[pair for pair in http.headers.raw if pair[0] in KEPT_HEADERS],
            body=body,
            submits=[*submits],
            model=self.model(),
            is_named=reply.form.named,
            last=reply.last,
        )
        return self.journal.open(asked)

    def restore(self, door: FrontDoor) -> None:
        """Opens the streams of an earlier server, so that their readers find them."""
        if self.journal is None:
            return
        for asked, parts, file in self.journal.read():
            writer = StreamWriter(self.store, asked.caller, asked.client, asked.stream_id)
            writer.restore(asked, parts, door.table.dialect(asked.path), file)
            if not writer.buffer.ended:
                self.restored.append((asked, writer))
        if self.restored:
            log.info("%d streams of an earlier server are to go on", len(self.restored))

    async def go_on(self, door: FrontDoor) -> None:
        """Asks again for what the streams of an earlier server were asked for, once the engine is
        ready.
        """
        # While it drains they are left to the next server.
        while self.restored and not door.client.admission.draining:
            asked, writer = self.restored.pop(0)
            if writer.buffer.ended:
                continue
            if asked.model != self.model():
                writer.fail("it was begun by another model, or another version of the server")
                continue
            try:
                status = await _repeat(door, asked, writer)
            except Exception:  # Which the application has logged.
                status = 500
            if status in (429, 503):  # It is as full as it was; the others are not kept waiting.
                self.restored.append((asked, writer))
                await asyncio.sleep(REPEAT_SECONDS / len(self.restored))
            elif status != 204:
                writer.fail(f"the request was refused with status {status}")

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


async def _repeat(door: FrontDoor, asked: Asked, writer: StreamWriter) -> int:
    """Makes the request of a stream again, as whoever made it first. Returns the status."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": asked.headers,
        "client": None,
        "server": None,
    }
    exchange = exchange_of(scope)
    exchange.stream = writer
    exchange.dialect = door.table.dialect(asked.path)
    exchange.request_id, exchange.caller = asked.request_id, asked.caller
    terms = EVERYBODY if door.api_keys.terms is None else door.api_keys.terms.get(asked.caller)
    if terms is None:
        return 401
    exchange.terms, exchange.client = terms, terms.name or asked.client
    try:
        reservation = door.client.reserve(
            asked.caller, exchange.client, terms, asked.key, is_new=False
        )
    except RequestError as error:
        return error.status
    reservation.restored = Restored(asked.submits, [*writer.tokens])
    reservation.reply_id, reservation.created = asked.reply_id, asked.created
    exchange.reservation = reservation
    status = 0

    async def receive() -> Any:
        return {"type": "http.request", "body": asked.body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    await door(scope, receive, send)
    return status


@dataclass(slots=True)
class ReaderEvents:
    """The events that one connection reads from a buffer."""

    reader: Reader
    ended: bool = False

    def listen(self, wake: Wake) -> None:
        self.reader.wake = wake

    def take(self) -> list[bytes]:
        if self.ended:
            return []
        reader = self.reader
        gap, events = reader.take(sse.MAX_EVENTS_PER_WRITE)
        self.ended = reader.superseded or reader.finished
        return [
            *[reader.buffer.gap_event] * gap,
            *(event for _, event in events),
            *[SUPERSEDED] * reader.superseded,
        ]


@dataclass(slots=True)
class StreamRoutes:
    """Handlers of /v1/streams/{id}."""

    publisher: StreamPublisher

    def routes(self) -> list[Route]:
        path = "/v1/streams/{stream_id}"
        return [
            Route(path, ("GET",), self.resume, OPENAI, tag="streams"),
            Route(path, ("DELETE",), self.cancel, OPENAI, tag="streams", status=204),
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
    numbers = http.query_params.getlist("after") or ["0"]
    given = http.headers.getlist("last-event-id") or [f"{stream_id}.{each}" for each in numbers]
    match = _EVENT_ID.fullmatch(given[0])
    if len(given) > 1 or match is None or match[1] != stream_id:
        raise MalformedBody(
            "`Last-Event-ID` must be an event's id as this stream gave it, or `after` an event's "
            "number: digits, once",
            code="invalid_event_id",
        )
    return int(match[2])
