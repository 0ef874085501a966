"""Messages between the front process, which has the supervisor and admission, and the API processes, which serve HTTP.

Invariant: everything on a link is the msgpack encoding of one of these structs, or of those of server.protocol that tell of sequences. A
request has one number in its API process, which its messages bear. This module knows nothing of sockets and HTTP.
"""

import msgspec

from server import errors, protocol
from server.protocol import Message, Part, Ready, Sampling, Submit

Terms = list[str | float | int | bool | None]
"""The values of generation.clients.Terms, in the order of its fields."""


class Problem(Part, frozen=True):
    """A RequestError. `kind`: the name of its class."""

    kind: str
    message: str
    retry_after: int | None
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: errors.RequestError) -> "Problem":
        return cls(type(error).__name__, error.message, error.retry_after, error.param, error.code)

    @property
    def error(self) -> errors.RequestError:
        """The error, to be raised."""
        made = getattr(errors, self.kind)(self.message, self.retry_after, self.param, self.code)
        assert isinstance(made, errors.RequestError)
        return made


class EngineStatus(Message, frozen=True):
    """The state of the server, sent when it changes."""

    ready: Ready | None
    status: str
    accepting: bool
    healthy: bool
    draining: bool
    cheap_template: bool
    """Whether short conversations may be rendered in the API process."""


class Begin(Message, frozen=True):
    """First message to an API process: what to serve, and how."""

    section: str
    """The options of the server, as JSON."""
    model: str
    keys: dict[str, Terms] | None
    """The valid API keys; None if none is needed."""
    model_names: list[str]
    other_names: list[str]
    max_open: int
    places: tuple[int, int]
    """Jobs that may run at once in each lane of its queue for worker processes."""
    status: EngineStatus


class Reload(Message, frozen=True):
    """The API keys that are valid from now on. The certificate is to be read again."""

    keys: dict[str, Terms] | None


class Finish(Message, frozen=True):
    """Stop listening, abort connections that are still open after `timeout` seconds, say Finished, and exit."""

    timeout: float


class Origin(Part, frozen=True):
    """A resumable request as it was received: enough to make its events again in another API process."""

    stream: str
    """Id of its stream."""
    path: str
    body: bytes
    headers: list[tuple[bytes, bytes]]
    request_id: str
    address: str
    reply_id: str
    created: int


class Reserve(Message, frozen=True):
    """Admits a request, whose body has not been read. Answered by Admitted or Declined."""

    request: int
    caller: str
    client: str
    terms: Terms
    key: bytes | None
    """Its Idempotency-Key."""


class Admitted(Message, frozen=True):
    """Answers Reserve."""

    request: int


class Declined(Message, frozen=True):
    """Answers any message that has an answer."""

    request: int
    problem: Problem


class Release(Message, frozen=True):
    """The request does not count as open until its sequences are opened."""

    request: int


class Open(Message, frozen=True):
    """Submits the sequences of an admitted request, all or none. Answered by Opened or Declined."""

    request: int
    prompts: list[list[int]]
    """The different prompts: sequences with the same one share its list."""
    sequences: list[tuple[int, Submit]]
    """For each sequence the index of its prompt, and its submission without the prompt."""
    prompt_tokens: int
    arrival: float
    """Monotonic time."""
    origin: Origin | None
    """Of a resumable request."""


class Opened(Message, frozen=True):
    """Answers Open and Attach. Events of the sequences follow."""

    request: int
    ids: list[int]


class End(Message, frozen=True):
    """Ends a sequence."""

    id: int
    outcome: str


class Close(Message, frozen=True):
    """The request is over: its sequences that have not ended are cancelled, and its Idempotency-Key is released."""

    request: int


class EndedStream(Part, frozen=True):
    """The last `events` of a resumable stream that had `num_events`. `gap`: the event for a reader that needs others."""

    events: list[bytes]
    num_events: int
    gap: bytes


class StreamEnded(Message, frozen=True):
    """Hands over the events of a resumable request's stream, which has ended."""

    request: int
    stream: str
    events: EndedStream


class LiveStream(Part, frozen=True):
    """What makes the events of a resumable stream again, besides its tokens. `samplings`: of its sequences, with the drawn seeds."""

    origin: Origin
    client: str
    terms: Terms
    samplings: list[Sampling]
    arrival: float


class FindStream(Message, frozen=True):
    """Asks for a resumable stream of a caller. Answered by StreamFound or Declined."""

    request: int
    stream: str
    caller: str


class StreamFound(Message, frozen=True):
    """Answers FindStream: the events if it has ended, else what makes them again."""

    request: int
    ended: EndedStream | None
    live: LiveStream | None = None


class Attach(Message, frozen=True):
    """Takes over a live stream: the API process that had it drops it. Answered by Opened, every event so far and Repeated, or by
    Declined.
    """

    request: int
    stream: str


class Repeated(Message, frozen=True):
    """The events that follow for the sequences of this request are new ones."""

    request: int


class DropStream(Message, frozen=True):
    """Another API process has taken over this stream."""

    stream: str


class Scrape(Message, frozen=True):
    """Asks for the metrics of the server, or for a dump of the KV cache. Answered by Exposition."""

    request: int
    cache: bool = False


class Exposition(Message, frozen=True):
    """Answers Scrape, in the Prometheus text format or as JSON."""

    request: int
    text: bytes


class Watch(Message, frozen=True):
    """Whether the API process has viewers. If it has, it needs the whole state of the cache; it is sent Shown from now on."""

    is_watching: bool


class Shown(Message, frozen=True):
    """Server-sent events for viewers, empty where there is none: `whole`, the state of the cache, for those that wait for one, and `cache`,
    what has changed, for the others.
    """

    whole: bytes = b""
    cache: bytes = b""
    stats: bytes = b""


class Listening(Message, frozen=True):
    """The API process serves."""


class CannotServe(Message, frozen=True):
    """The API process cannot serve, for a reason that the operator is told; `exit_code`: of the error's class."""

    reason: str
    exit_code: int


class Finished(Message, frozen=True):
    """Every connection has ended. `cut`: one of them was aborted with unsent bytes."""

    cut: bool


class ApiStats(Message, frozen=True):
    """What API processes alone know, for metrics. Each sends its own once a second."""

    event_loop_lag: float = 0.0
    streams_detached: int = 0
    resume_bytes: int = 0
    log_lines_dropped: int = 0
    refused: int = 0


SequenceMessage = protocol.Tokens | protocol.Started | protocol.PromptScores | protocol.Failed
Answer = Admitted | Declined | Opened | StreamFound | Exposition
ToApi = Begin | EngineStatus | Reload | Finish | Answer | Repeated | DropStream | Shown | SequenceMessage
Question = Reserve | Open | FindStream | Attach | Scrape
FromApi = Question | Watch | Release | End | Close | StreamEnded | Listening | CannotServe | Finished | ApiStats

decode_to_api = msgspec.msgpack.Decoder(ToApi).decode
decode_from_api = msgspec.msgpack.Decoder(FromApi).decode
