"""RemoteEngineClient: an EngineClient in an API process, over messages to the front process, which has the engine.

Invariant: every question is answered by the front process, in the order of the messages, so that what follows an answer finds its sequence
known. It knows no sockets: `send` sends a message, and `on_message` gets each one that is received.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

import msgspec

from server import api_protocol, protocol
from server.generation.arrivals import Arrivals
from server.generation.clients import EVERYBODY, Terms
from server.generation.request import Choice
from server.generation.reservation import Reservation
from server.generation.viewers import Viewers
from server.supervision.engine import NativeTokens, PlainStream
from server.supervision.journal import SequenceEvent, Written

Deliver = Callable[[Choice, SequenceEvent], None]


class RemoteReservation(Reservation):
    """A request that the front process counts. `stream`: that of the live stream which its sequences belong to already."""

    wants_origin = True

    def __init__(self, engine: "RemoteEngineClient", number: int, caller: str, client: str, terms: Terms, stream: str = "") -> None:
        super().__init__(caller, client, terms)
        self.number = number
        self.stream = stream
        self.arrival = 0.0
        self.repeated = asyncio.Event()
        """Set when every event so far of the sequences that it took over has come."""
        self.opened: tuple[Sequence[Choice], Deliver] | None = None
        """The sequences that are, or are being, opened for it."""
        self._engine = engine
        self._is_released = self._is_closed = False

    async def confirmed(self) -> None:
        await self._engine.answer(self.number)

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._engine.send(api_protocol.Release(self.number))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._engine.forget(self)
            self.opened = None  # Breaks reference cycles.
            self._engine.send(api_protocol.Close(self.number))


class RemoteEngineClient:
    """The engine of the front process."""

    def __init__(self, max_open: int, status: api_protocol.EngineStatus, send: Callable[[api_protocol.FromApi], None]) -> None:
        self.arrivals = Arrivals()
        self.viewers = Viewers(self.arrivals, lambda: send(api_protocol.Watch(True)))
        self.state = status
        """As the front process told it last."""
        self.num_refused = 0
        self.send = send
        self._max_open = max_open
        self._numbers = itertools.count(1)
        self._questions: dict[int, asyncio.Future[api_protocol.Answer]] = {}
        """Answers that are awaited, by the number of the request."""
        self._reservations: dict[int, RemoteReservation] = {}
        """Those whose sequences are being opened."""
        self._attached: dict[int, RemoteReservation] = {}
        """Those for which events are being repeated."""
        self._open: dict[int, tuple[Choice, Deliver]] = {}
        """The sequences that may get events."""
        self._native: dict[int, NativeTokens] = {}
        """Those whose tokens native code writes."""
        self.add_native: Callable[[int, int, PlainStream], NativeTokens | None] = lambda id, next_index, plain: None
        """Has native code write the tokens of a sequence from an index on, where it can."""

    @property
    def max_open(self) -> int:
        return self._max_open

    @property
    def ready(self) -> protocol.Ready | None:
        return self.state.ready

    @property
    def status(self) -> str:
        return self.state.status

    @property
    def accepting(self) -> bool:
        return self.state.accepting

    @property
    def healthy(self) -> bool:
        return self.state.healthy

    @property
    def draining(self) -> bool:
        return self.state.draining

    def reserve(self, caller: str, client: str = "", terms: Terms = EVERYBODY, key: bytes | None = None) -> RemoteReservation:
        reservation = RemoteReservation(self, self._ask(), caller, client, terms)
        self.send(api_protocol.Reserve(reservation.number, caller, client, terms.as_list(), key))
        return reservation

    def attached(self, live: api_protocol.LiveStream, caller: str) -> RemoteReservation:
        """A reservation of a live stream that was found: `open` takes its sequences over, with every event so far."""
        terms, origin = Terms.of_list(live.terms), live.origin
        reservation = RemoteReservation(self, next(self._numbers), caller, live.client, terms, origin.stream)
        reservation.samplings, reservation.arrival = live.samplings, live.arrival
        reservation.reply_id, reservation.created = origin.reply_id, origin.created
        return reservation

    async def open(
        self, reservation: Reservation, choices: Sequence[Choice], submits: Sequence[protocol.Submit], prompt_tokens: int, deliver: Deliver
    ) -> None:
        assert isinstance(reservation, RemoteReservation)
        reservation.opened = choices, deliver
        number = self._ask(reservation.number)
        self._reservations[number] = reservation
        if reservation.stream:
            self._attached[number] = reservation
            for choice in choices:
                choice.arrival = reservation.arrival
            self.send(api_protocol.Attach(number, reservation.stream))
        else:
            places: dict[int, int] = {}
            indices = [places.setdefault(id(submit.prompt), len(places)) for submit in submits]
            prompts = list({id(submit.prompt): submit.prompt for submit in submits}.values())
            bare = [msgspec.structs.replace(submit, prompt=[]) for submit in submits]
            sequences = list(zip(indices, bare, strict=True))
            origin = reservation.origin
            self.send(api_protocol.Open(number, prompts, sequences, prompt_tokens, choices[0].arrival, origin))
        await self.answer(number)
        if reservation.stream:
            await reservation.repeated.wait()

    def write_natively(self, choice: Choice, plain: PlainStream) -> None:
        if choice.id in self._open:
            self.collect(choice)
            native = self.add_native(choice.id, choice.num_tokens, plain)
            if native is not None:
                self._native[choice.id] = native

    def collect(self, choice: Choice) -> None:
        native, entry = self._native.get(choice.id), self._open.get(choice.id)
        if native is None or entry is None:
            return
        ids, last = native.collect()
        if ids:
            choice.num_tokens += len(ids)
            choice.last = last
            entry[1](choice, Written(ids, last))

    def end(self, choice: Choice, outcome: str) -> None:
        self.collect(choice)
        self._remove(choice)
        self.send(api_protocol.End(choice.id, outcome))

    def forget(self, reservation: RemoteReservation) -> None:
        """Gives the sequences of a request no more events."""
        self._questions.pop(reservation.number, None)
        self._reservations.pop(reservation.number, None)
        self._attached.pop(reservation.number, None)
        for choice in reservation.opened[0] if reservation.opened else ():
            self._remove(choice)

    def _remove(self, choice: Choice) -> None:
        self._open.pop(choice.id, None)
        if (native := self._native.pop(choice.id, None)) is not None:
            native.remove()

    def count_refused(self) -> None:
        self.num_refused += 1

    def count_ignored(self, names: Sequence[str]) -> None:
        """Not counted: the front process has the metrics."""

    async def exposition(self, cache: bool = False) -> bytes:
        self.send(api_protocol.Scrape(number := self._ask(), cache))
        answer = await self.answer(number)
        assert isinstance(answer, api_protocol.Exposition)
        return answer.text

    async def cache_dump(self) -> bytes:
        return await self.exposition(cache=True)

    async def find_stream(self, stream: str, caller: str) -> api_protocol.StreamFound:
        """A resumable stream that this process does not have. Raises NotFound or StreamExpired."""
        self.send(api_protocol.FindStream(number := self._ask(), stream, caller))
        answer = await self.answer(number)
        assert isinstance(answer, api_protocol.StreamFound)
        return answer

    def _ask(self, number: int = 0) -> int:
        """The number of a request, whose next answer may be awaited."""
        number = number or next(self._numbers)
        self._questions[number] = asyncio.get_running_loop().create_future()
        return number

    async def answer(self, number: int) -> api_protocol.Answer:
        """The answer of the front process. Raises the RequestError by which it declines."""
        try:
            answer = await self._questions[number]
        finally:
            self._questions.pop(number, None)
        if isinstance(answer, api_protocol.Declined):
            raise answer.problem.error
        return answer

    def on_message(self, message: api_protocol.Answer | api_protocol.Repeated | api_protocol.Shown | api_protocol.SequenceMessage) -> None:
        """Takes a message of the front process."""
        match message:
            case protocol.Tokens():
                self._on_tokens(message)
            case protocol.Started():
                self._on_started(message)
            case protocol.PromptScores() | protocol.Failed():
                if (entry := self._open.get(message.id)) is not None:
                    entry[1](entry[0], message)
            case api_protocol.Repeated():
                if (reservation := self._attached.pop(message.request, None)) is not None:
                    reservation.repeated.set()
            case api_protocol.Shown():
                self.viewers.show(message)
                if not self.viewers.shows:
                    self.send(api_protocol.Watch(False))
            case _:
                self._on_answer(message)

    def _on_tokens(self, message: protocol.Tokens) -> None:
        now, open_sequences = time.monotonic(), self._open
        for token in message.tokens:
            if (entry := open_sequences.get(token.id)) is None:
                continue  # Ended while it was on its way.
            choice, deliver = entry
            self.collect(choice)
            if token.index < choice.num_tokens:
                continue  # Native code has written it meanwhile.
            if choice.num_tokens == 0:
                choice.first = now
            choice.last = now
            choice.num_tokens += 1
            deliver(choice, token)

    def _on_started(self, message: protocol.Started) -> None:
        now = time.monotonic()
        for id, num_cached in zip(message.ids, message.cached, strict=True):
            if (entry := self._open.get(id)) is not None:
                entry[0].started, entry[0].num_cached = now, num_cached

    def _on_answer(self, answer: api_protocol.Answer) -> None:
        reservation = self._reservations.pop(answer.request, None)
        if isinstance(answer, api_protocol.Opened) and reservation is not None and reservation.opened is not None:
            choices, deliver = reservation.opened
            for choice, id in zip(choices, answer.ids, strict=True):
                choice.id = id
                self._open[id] = choice, deliver
        future = self._questions.get(answer.request)
        if future is not None and not future.done():
            future.set_result(answer)
