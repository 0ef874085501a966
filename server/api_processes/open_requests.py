"""OpenRequest: one request of an API process at the front process, and StreamRecord: what makes the events of a resumable one again.

Plain state and its delivery of events; it knows neither messages of requests nor processes.
"""

from dataclasses import dataclass, field
from typing import Protocol

from server import protocol
from server.api_protocol import Origin
from server.generation.admission import AdmittedRequest
from server.generation.engine_client import LocalEngineClient
from server.generation.request import Progress
from server.metrics import IDLE
from server.supervision.journal import SequenceEvent
from server.supervision.transport import framed

AnyEvent = protocol.Token | protocol.PromptScores | protocol.Failed | protocol.Started


class Owner(Protocol):
    """The API process that makes the text of a request."""

    def forward(self, event: AnyEvent) -> None:
        """Sends an event of a sequence."""

    def give_up(self, request: "OpenRequest") -> None:
        """Leaves a resumable request to another API process."""


@dataclass(slots=True, eq=False)
class StreamRecord:
    """A resumable request as it was received, and every event of its sequences so far."""

    origin: Origin
    samplings: list[protocol.Sampling]
    arrival: float
    frames: bytearray = field(default_factory=bytearray)
    """The events, as they are sent to an API process."""
    outcomes: set[str] = field(default_factory=set)
    """Of the sequences that have been ended."""
    num_running: int = 0
    """Sequences without a final event."""
    idle_since: float = 0.0
    """Time when it lost its owner, or when its last sequence got its final event after that."""

    def add(self, event: AnyEvent) -> None:
        """Adds an event."""
        message = protocol.Tokens([event], IDLE) if isinstance(event, protocol.Token) else event
        self.frames += framed(protocol.encode(message))
        if isinstance(event, protocol.Failed) or (isinstance(event, protocol.Token) and event.finish is not None):
            self.num_running -= 1


@dataclass(slots=True, eq=False, kw_only=True)
class RemoteSequence(Progress):
    """A sequence whose text is made in an API process."""

    request: "OpenRequest"


class OpenRequest:
    """A request of the API process `owner`; None for a resumable one whose process has ended, until another one asks for its stream.
    `number`: as the owner calls it.
    """

    def __init__(self, owner: Owner, number: int, reservation: AdmittedRequest) -> None:
        self.owner: Owner | None = owner
        self.number = number
        self.reservation = reservation
        self.sequences: list[RemoteSequence] = []
        self.open: dict[int, RemoteSequence] = {}
        """The sequences that have not been ended, by id."""
        self.record: StreamRecord | None = None
        """Of a resumable request, until its stream has ended."""

    def deliver(self, _: Progress, event: SequenceEvent | protocol.Started) -> None:
        """Records an event if it may be needed again, and sends it to the owner."""
        if self.record is not None:
            self.record.add(event)
        if self.owner is not None:
            self.owner.forward(event)

    def close(self, client: LocalEngineClient) -> None:
        """Ends its sequences and its reservation."""
        while self.open:
            client.end(self.open.popitem()[1], "cancelled")
        self.sequences = []  # Breaks reference cycles.
        self.reservation.close()
