"""StreamRecords: the resumable streams of all API processes at the front process, by which each can be read in another one.

A live stream is a StreamRecord, from which an API process makes its events again; an ended one is the events that its API process kept.
Invariant: a stream is live, ended or expired, one of the three; a live one without an API process is cancelled after `detach_seconds`.
Sans-I/O: time is an argument.
"""

import logging

from server.api_processes.open_requests import OpenRequest, StreamRecord
from server.api_protocol import EndedStream, LiveStream, StreamFound
from server.errors import NotFound
from server.generation.engine_client import LocalEngineClient
from server.http.stream_buffer import Retention, StreamStore

log = logging.getLogger("onehead")

NOT_REPEATABLE = frozenset({"cancelled", "timeout"})
"""Outcomes of sequences that their events do not tell."""


class StreamRecords:
    """Finds streams by id and caller."""

    def __init__(self, client: LocalEngineClient, retention: Retention) -> None:
        self._client = client
        self._retention = retention
        self._live: dict[str, OpenRequest] = {}
        self._ended = StreamStore(retention)

    @property
    def orphans(self) -> list[tuple[str, OpenRequest, StreamRecord]]:
        """The live streams without an API process."""
        live = self._live.items()
        return [(id, request, request.record) for id, request in live if request.owner is None and request.record is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the events of ended streams, and of what makes those of live ones."""
        return self._ended.num_bytes + sum(len(request.record.frames) for request in self._live.values() if request.record is not None)

    def add(self, request: OpenRequest, record: StreamRecord) -> None:
        """Adds the stream of a request whose sequences have been opened."""
        request.record, record.num_running = record, len(request.sequences)
        self._live[record.origin.stream] = request

    def find(self, number: int, stream: str, caller: str) -> StreamFound:
        """The answer to FindStream. Raises NotFound or StreamExpired."""
        request = self._live.get(stream)
        if request is not None and request.record is not None and request.reservation.caller == caller:
            record, reservation = request.record, request.reservation
            terms = reservation.terms.as_list()
            return StreamFound(number, None, LiveStream(record.origin, reservation.client, terms, record.samplings, record.arrival))
        buffer = self._ended.find(stream, caller)
        return StreamFound(number, EndedStream(buffer.kept, buffer.num_events, buffer.gap_event))

    def live(self, stream: str) -> tuple[OpenRequest, StreamRecord]:
        """The request of a live stream. Raises NotFound."""
        request = self._live.get(stream)
        if request is None or request.record is None:
            raise NotFound("there is no such stream", code="stream_not_found")
        return request, request.record

    def end(self, request: OpenRequest, stream: str, ended: EndedStream, now: float) -> None:
        """Keeps the events of a stream that has ended, in place of what makes them."""
        self._ended.restore(stream, request.reservation.caller, ended.events, ended.num_events, ended.gap, now)
        self._forget(request)

    def close(self, request: OpenRequest) -> None:
        """Ends a request; the stream that it may have is no more."""
        self._forget(request)
        request.close(self._client)

    def on_owner_gone(self, request: OpenRequest, now: float) -> None:
        """Ends a request whose API process has ended, or keeps its stream for another one."""
        request.owner = None
        if request.record is None:
            request.close(self._client)
        elif request.record.outcomes & NOT_REPEATABLE:
            self._expire(request)
        else:
            request.record.idle_since = now
            for _, other, _ in self.orphans[self._retention.max_detached :]:
                self._expire(other)

    def sweep(self, now: float) -> None:
        """Drops ended streams that were kept long enough, and cancels live ones that no API process has asked for in time."""
        self._ended.sweep(now)
        for id, request, record in self.orphans:
            is_running = record.num_running > 0
            if now - record.idle_since >= (self._retention.detach_seconds if is_running else self._retention.seconds):
                log.info("the stream %s... is dropped: its API process ended, and it was not asked for", id[:4])
                self._expire(request)

    def _expire(self, request: OpenRequest) -> None:
        if request.record is not None:
            self._ended.expire(request.record.origin.stream, request.reservation.caller)
        self.close(request)

    def _forget(self, request: OpenRequest) -> None:
        if request.record is not None:
            del self._live[request.record.origin.stream]
            request.record = None
