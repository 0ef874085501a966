"""ProcessRequests: the requests of one API process, as the front process keeps them over its LocalEngineClient.

Invariant: whatever an API process does or fails to do, each of its requests is released and each of its sequences is ended, once; a message
about what it does not own is ignored. It does no I/O: `send` and `write` do, and all methods are called from one thread.
"""

import time
from collections.abc import Callable

import msgspec

from server import api_protocol, protocol
from server.api_processes.open_requests import AnyEvent, OpenRequest, RemoteSequence, StreamRecord
from server.api_processes.stream_records import StreamRecords
from server.errors import RequestError
from server.generation.clients import Terms
from server.generation.engine_client import LocalEngineClient
from server.metrics import IDLE


class ProcessRequests:
    """The requests of one API process."""

    def __init__(
        self,
        client: LocalEngineClient,
        records: StreamRecords,
        send: Callable[[api_protocol.ToApi], None],
        write: Callable[[bytearray], None],
    ) -> None:
        self._client = client
        self._records = records
        self._send_now = send
        self._write = write
        self._requests: dict[int, OpenRequest] = {}
        self._sequences: dict[int, RemoteSequence] = {}
        """The open sequences of all requests, by id."""
        self._tokens: list[protocol.Token] = []
        """What has come for the process and is sent at the end of the turn of the event loop."""

    def forward(self, event: AnyEvent) -> None:
        """Sends an event of a sequence: tokens together with the others that come in the same turn of the event loop."""
        if isinstance(event, protocol.Token):
            if not self._tokens:
                self._client.arrivals.add(self._flush)
            self._tokens.append(event)
        else:
            self.send(event)

    def _flush(self) -> None:
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            self._send_now(protocol.Tokens(tokens, IDLE))

    def send(self, message: api_protocol.ToApi) -> None:
        """Sends a message after the tokens that came before it."""
        self._flush()
        self._send_now(message)

    def on_message(self, message: api_protocol.FromApi) -> None:
        """Takes a message about requests."""
        match message:
            case api_protocol.End():
                self._end(message)
            case api_protocol.Release():
                if (request := self._requests.get(message.request)) is not None:
                    request.reservation.release()
            case api_protocol.Close():
                if (request := self._requests.get(message.request)) is not None:
                    self._remove(request)
                    self._records.close(request)
            case api_protocol.StreamEnded():
                if (request := self._requests.get(message.request)) is not None:
                    self._records.end(request, message.stream, message.events, time.monotonic())
            case api_protocol.Reserve() | api_protocol.Open() | api_protocol.FindStream() | api_protocol.Attach() | api_protocol.Scrape():
                try:
                    self._answer(message)
                except RequestError as error:
                    self.send(api_protocol.Declined(message.request, api_protocol.Problem.of(error)))

    def _answer(self, message: api_protocol.Question) -> None:
        """Answers a message. Raises RequestError."""
        match message:
            case api_protocol.Reserve():
                reservation = self._client.reserve(message.caller, message.client, Terms.of_list(message.terms), message.key)
                self._requests[message.request] = OpenRequest(self, message.request, reservation)
                self.send(api_protocol.Admitted(message.request))
            case api_protocol.Open():
                self._open(message)
            case api_protocol.FindStream():
                self.send(self._records.find(message.request, message.stream, message.caller))
            case api_protocol.Attach():
                self._attach(message)
            case api_protocol.Scrape(number, True):
                self._client.monitor.dump().add_done_callback(lambda dump: self.send(api_protocol.Exposition(number, dump.result())))
            case api_protocol.Scrape():
                self.send(api_protocol.Exposition(message.request, self._client.metrics.exposition()))

    def _open(self, message: api_protocol.Open) -> None:
        request, prompts = self._requests[message.request], message.prompts
        submits = [msgspec.structs.replace(submit, prompt=prompts[index]) for index, submit in message.sequences]
        sequences = [
            RemoteSequence(len(submit.prompt), submit.max_new_tokens, arrival=message.arrival, request=request) for submit in submits
        ]
        self._client.submit(request.reservation, sequences, submits, message.prompt_tokens, request.deliver)
        request.sequences, request.open = sequences, {sequence.id: sequence for sequence in sequences}
        self._sequences |= request.open
        if message.origin is not None:
            record = StreamRecord(message.origin, [submit.sampling for submit in submits], message.arrival)
            self._records.add(request, record)
        self.send(api_protocol.Opened(message.request, list(request.open)))

    def _attach(self, message: api_protocol.Attach) -> None:
        """Takes over a live stream, with every event so far."""
        request, record = self._records.live(message.stream)
        if request.owner is not None:
            request.owner.give_up(request)
        request.owner, request.number = self, message.request
        self._requests[message.request] = request
        self._sequences |= request.open
        self.send(api_protocol.Opened(message.request, [sequence.id for sequence in request.sequences]))
        self._write(record.frames)
        self.send(api_protocol.Repeated(message.request))

    def give_up(self, request: OpenRequest) -> None:
        """Leaves a resumable request to another API process."""
        assert request.record is not None
        self._remove(request)
        self.send(api_protocol.DropStream(request.record.origin.stream))

    def _remove(self, request: OpenRequest) -> None:
        del self._requests[request.number]
        for id in request.open:
            del self._sequences[id]

    def _end(self, message: api_protocol.End) -> None:
        sequence = self._sequences.pop(message.id, None)
        if sequence is not None:
            request = sequence.request
            del request.open[message.id]
            if request.record is not None:
                request.record.outcomes.add(message.outcome)
            self._client.end(sequence, message.outcome)

    def watch(self, is_watching: bool) -> None:
        """Takes Watch."""
        viewers = self._client.viewers
        if is_watching:
            viewers.add(self.send)
        elif self.send in viewers.shows:
            viewers.shows.remove(self.send)

    def close(self) -> None:
        """The process has ended: ends its requests, but for resumable ones whose events can be made again."""
        self.watch(False)
        for request in list(self._requests.values()):
            self._remove(request)
            self._records.on_owner_gone(request, time.monotonic())
        self._tokens.clear()
