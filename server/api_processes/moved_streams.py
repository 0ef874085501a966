"""MovedStreams: reads a resumable stream of another API process in this one, by making its events again from its request and tokens.

Invariant: a stream has the same events, with the same numbers, whichever process makes them. It knows no dialects.
"""

import asyncio
import logging
import time

from server import api_protocol
from server.api_protocol import EndedStream, LiveStream
from server.errors import Unavailable
from server.generation.remote_client import RemoteEngineClient, RemoteReservation
from server.generation.reservation import Reservation
from server.http.exchange import Exchange
from server.http.front import FrontDoor
from server.http.origin import repeat
from server.http.stream_buffer import StreamBuffer
from server.http.streams import StreamPublisher
from server.logs import request_id as current_request_id

MOST_TRIES = 2
log = logging.getLogger("onehead.api")


class MovedStreams:
    """streams.Elsewhere, over the front process."""

    def __init__(self, client: RemoteEngineClient, publisher: StreamPublisher, door: FrontDoor) -> None:
        self._client = client
        self._publisher = publisher
        self._door = door
        self._moves: dict[tuple[str, str], asyncio.Task[StreamBuffer]] = {}
        """Moves that are under way, which further readers of the stream wait for too, by id and caller."""

    async def find(self, id: str, caller: str) -> StreamBuffer:
        move = self._moves.get((id, caller))
        if move is None:
            move = self._moves[id, caller] = asyncio.create_task(self._move(id, caller))
            move.add_done_callback(lambda _: self._moves.pop((id, caller)))
        return await asyncio.shield(move)

    def ended(self, reservation: Reservation, buffer: StreamBuffer) -> None:
        assert isinstance(reservation, RemoteReservation)
        ended = EndedStream(buffer.kept, buffer.num_events, buffer.gap_event)
        self._client.send(api_protocol.StreamEnded(reservation.number, buffer.id, ended))

    async def _move(self, id: str, caller: str) -> StreamBuffer:
        for _ in range(MOST_TRIES):
            found = await self._client.find_stream(id, caller)
            if found.live is None:
                assert found.ended is not None
                ended = found.ended
                return self._publisher.store.restore(id, caller, ended.events, ended.num_events, ended.gap, time.monotonic())
            if await self._make_again(found.live, caller):
                return self._publisher.store.find(id, caller)
        raise Unavailable("the stream cannot be read at the moment; try again", retry_after=1)

    async def _make_again(self, live: LiveStream, caller: str) -> bool:
        """Carries the request out again, attached to its sequences, until every event so far is there. Returns False where that cannot be
        done, because the stream has ended meanwhile, or there is no place for its text to be tokenized.
        """
        origin, reservation = live.origin, self._client.attached(live, caller)
        dialect = self._door.table.dialect(origin.path)
        exchange = Exchange(caller=caller, client=live.client, terms=reservation.terms, dialect=dialect, reservation=reservation)
        current_request_id.set(origin.request_id)
        try:
            status = await repeat(self._door.app, origin, exchange)
        except Exception:
            log.exception("a stream could not be moved")
            status = 0
        if status != 204:
            exchange.release()
            return False
        while (writer := self._publisher.writers.get(origin.stream)) is not None and writer.is_behind:
            await asyncio.sleep(0)
        return True
