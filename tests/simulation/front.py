"""The simulated front end: requests of one or more choices, their streams of numbered events in the
real StreamStore, and clients that follow, leave, return and cancel.

Every delivery and every event is checked as it comes: tokens in order, nothing after the last, each
number once for each reader. It knows nothing of engines.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server import protocol
from server.errors import MalformedBody, NotFound, StreamExpired
from server.http.stream_buffer import EVENT_OVERHEAD, Reader, StreamBuffer
from server.supervision.journal import SequenceEvent
from tests.simulation.model import chain

if TYPE_CHECKING:
    from tests.simulation.world import World

DELETED = "the stream was cancelled"


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence: its request and what has been delivered."""

    prompt: list[int]
    max_new: int
    seed: int
    min_new: int = 0
    stops: frozenset[int] = frozenset()
    priority: int = 0
    grammar: str = ""
    scores: bool = False
    share: protocol.Share = protocol.Share()  # noqa: RUF009  (immutable)
    """Its client."""
    fault: str = ""
    """Its planted fault; `fails_at` is the index of the output at which it occurs."""
    fails_at: int = 0
    id: int = 0
    number: int = 0
    """Its index among the choices of its request."""
    request: "Request | None" = None
    tokens: list[int] = field(default_factory=list)
    scored: list[float] = field(default_factory=list)
    finish: str | None = None
    over: bool = False
    """Whether nothing may be delivered for it any more."""
    recalled: bool = False
    """Whether it was ever cancelled in an engine and sent to it again."""
    deaths: list[int] = field(default_factory=list)
    """For each engine that crashed while running it, since its last token: the number of sequences
    that engine had."""
    states: list[int] = field(init=False)
    """The states of its prompt."""

    def __post_init__(self) -> None:
        self.states = chain(self.prompt)

    def submission(self) -> protocol.Submit:
        return protocol.Submit(
            0,
            self.prompt,
            [],
            self.max_new,
            self.min_new,
            sorted(self.stops),
            protocol.Sampling(seed=self.seed),
            self.priority,
            score_prompt=self.scores,
            grammar=self.grammar,
            share=self.share,
        )

    def deliver(self, delivery: SequenceEvent) -> None:
        request = self.request
        assert request is not None
        world = request.world
        if self.over:
            raise Violation(f"sequence {self.id} is over and gets {delivery}")
        world.heard()
        if type(delivery) is protocol.Token:
            if delivery.index != len(self.tokens) or delivery.id != self.id:
                raise Violation(
                    f"sequence {self.id} has {len(self.tokens)} tokens and gets {delivery}"
                )
            world.deaths_in_row = 0
            self.deaths.clear()
            self.tokens.append(delivery.token)
            self.finish, self.over = delivery.finish, delivery.finish is not None
            if world.record:
                world.note(
                    f"sequence {self.id}: token {delivery.index} is {delivery.token}, "
                    f"{delivery.finish}"
                )
            request.emit(b"%d: %d" % (self.number, delivery.token))
            if self.over:
                request.choice_is_over()
        elif type(delivery) is protocol.PromptScores:
            if delivery.first != len(self.scored) + 1 or self.tokens:
                raise Violation(
                    f"sequence {self.id} has {len(self.scored)} scores, {len(self.tokens)} "
                    f"tokens, and gets {delivery}"
                )
            self.scored += [score.logprob for score in delivery.scores]
            world.seen["path: scores"] += 1
        else:
            self.over = True
            world.note(f"sequence {self.id}: failed, {delivery.code} {delivery.reason}")
            assert isinstance(delivery, protocol.Failed)
            request.fail(self, delivery)


class Request:
    """One request of a client, with its choices and its stream."""

    def __init__(self, world: "World", choices: list[Choice], resumable: bool) -> None:
        self.world = world
        self.choices = choices
        self.resumable = resumable
        self.log: list[bytes] = []
        """Every event, kept for good."""
        self.outcome = ""
        self.owner = ""
        self.num_bytes = 0
        self.blamed: Choice | None = None
        """The choice whose failure ended it."""
        self.ended_at = 0.0
        self.buffer: StreamBuffer | None = None
        self.follower: Follower | None = None
        self.followers: list[Follower] = []
        self._num_over = 0
        self.stopping = False
        for number, choice in enumerate(choices):
            choice.request, choice.number = self, number

    def submit(self) -> None:
        """Submits every choice to the supervisor."""
        world = self.world
        self.owner = f"key {len(world.requests)}"
        if self.resumable:
            self.buffer = world.store.open(self.owner, self._stop, world.now)
        world.requests.append(self)
        world.unsettled += 1
        for choice in self.choices:
            if self.outcome:
                break
            choice.id = world.supervisor.submit(choice.submission(), choice.deliver)
            world.choices[choice.id] = choice

    def emit(self, event: bytes) -> None:
        """Adds an event to the stream. Events of a request that has failed are dropped."""
        if self.outcome:
            return
        self.log.append(event)
        if self.buffer is not None:
            self.num_bytes += len(event) + EVENT_OVERHEAD
            self.world.num_event_bytes += len(event) + EVENT_OVERHEAD
            self.world.store.append(self.buffer, event)

    def choice_is_over(self) -> None:
        self._num_over += 1
        if self._num_over == len(self.choices) and not self.outcome:
            self._end("finished", b"end")

    def fail(self, choice: Choice, failed: protocol.Failed) -> None:
        """Ends the request after one choice failed; the others are cancelled at once or somewhat
        later.
        """
        if self.outcome:
            return
        self.blamed = choice
        self._end(
            failed.code or ("refused" if failed.refused else "failed"),
            b"error " + failed.code.encode(),
        )
        self.world.at(
            self.world.now + (0.0 if self.world.random() < 0.5 else 0.05), self._cancel_choices
        )

    def cancel(self, _: object = None) -> None:
        """The client cancels the request."""
        if not self.outcome:
            self._end("cancelled", b"cancelled")
            self._cancel_choices()

    def _stop(self, reason: str) -> None:
        """The store asks for the request to stop, which is done later, as by a task of an event
        loop.
        """
        if self.outcome or self.stopping:
            raise Violation("a stream is stopped twice, or after its end")
        self.stopping = True
        self.world.seen[
            "path: stopped by its client"
            if reason == DELETED
            else "path: stopped for want of a reader"
        ] += 1
        self.world.at(self.world.now + (0.01 if self.world.random() < 0.5 else 1.0), self.cancel)

    def _cancel_choices(self, _: object = None) -> None:
        for choice in self.choices:
            if choice.id and not choice.over:
                choice.over = True
                self.world.supervisor.cancel(choice.id)

    def _end(self, outcome: str, event: bytes) -> None:
        world = self.world
        if self.outcome:
            raise Violation(f"a request ends as {self.outcome} and again as {outcome}")
        self.emit(event)
        self.outcome, self.ended_at = outcome, world.now
        if self.buffer is not None:
            unread = world.now - self.buffer.idle_since if self.buffer.reader is None else 0.0
            if (
                not self.stopping
                and unread > world.store.retention.detach_seconds + 2 * world.scenario.tick_seconds
            ):
                raise Violation(f"a stream had no reader for {unread:.1f} s, and went on")
            world.store.end(self.buffer, world.now)
        world.unsettled -= 1
        world.seen[f"outcome: {outcome}"] += 1
        if world.record:
            world.note(f"request of sequences {[choice.id for choice in self.choices]}: {outcome}")

    # --- what its client may do

    def follow(self, seen: int | None = None) -> None:
        """A GET that resumes after event `seen`, or after the last event that its client has."""
        if self.buffer is None:
            return
        if seen is None:
            seen = self.follower.seen if self.follower is not None else 0
        if self.follower is not None and not self.follower.gone:
            self.world.seen["path: superseded"] += 1
        self.follower = Follower(self, seen)
        self.followers.append(self.follower)

    def detach(self, _: object = None) -> None:
        if self.follower is not None:
            self.follower.leave()

    def resume(self, from_start: bool) -> None:
        self.world.seen["path: resumed"] += 1
        self.follow(0 if from_start else None)

    def delete(self, _: object) -> None:
        buffer = self.find(self.owner)
        if buffer is not None:
            buffer.stop(DELETED)

    def find(self, owner: str) -> StreamBuffer | None:
        """The stream as the store knows it; None if the store has dropped it, for which there must
        be a cause.
        """
        assert self.buffer is not None
        world = self.world
        try:
            buffer = world.store.find(self.buffer.id, owner)
        except StreamExpired:
            old = world.now - self.ended_at >= world.store.retention.seconds
            if not self.outcome or owner != self.owner or not (old or world.short_of_memory):
                raise Violation("a stream has expired before its time") from None
            world.seen["path: expired"] += 1
            return None
        except NotFound:
            if owner == self.owner:
                raise Violation("a stream is unknown to its owner") from None
            return None
        if owner != self.owner or buffer is not self.buffer:
            raise Violation("a stream is given to somebody else")
        return buffer


class Follower:
    """A reader of a stream, which must see each number once."""

    def __init__(self, request: Request, seen: int) -> None:
        self.request = request
        self.seen = seen
        self.gone = True
        self._waiting = False
        self._reader: Reader | None = None
        world = request.world
        buffer = request.find(request.owner)
        if buffer is None:
            return
        try:
            self._reader = world.store.attach(buffer, seen, self._wake)
        except MalformedBody:
            if seen <= len(request.log):
                raise Violation(
                    f"event {seen} of {len(request.log)} is called one of the future"
                ) from None
            world.seen["path: an event from the future"] += 1
            return
        if seen > len(request.log):
            raise Violation(f"a reader may wait after event {seen} of {len(request.log)}")
        self.gone = False
        self._wake()

    @property
    def superseded(self) -> bool:
        """Whether another reader has taken its place, and it was told."""
        return self._reader is not None and self._reader.superseded and not self._waiting

    def _wake(self) -> None:
        if not self._waiting:
            self._waiting = True
            world = self.request.world
            world.at(world.now + world.scenario.reading_seconds, self.take)

    def take(self, _: object = None) -> None:
        """Reads new events, and compares them with all events of the stream."""
        self._waiting = False
        if self.gone or self._reader is None:
            return
        gap, events = self._reader.take(10**6)
        self._check(gap, events)
        if self._reader.superseded:
            self.gone = True
        elif self._reader.finished:
            if not self.request.outcome or self.seen != len(self.request.log):
                raise Violation("a reader is told of an end that is none")
            self.leave()

    def _check(self, gap: bool, events: list[tuple[int, bytes]]) -> None:
        request, log = self.request, self.request.log
        if gap != bool(events and events[0][0] > self.seen + 1):
            raise Violation(f"behind event {self.seen} there is a gap, or none: {gap}, {events}")
        if gap:
            if (
                request.num_bytes <= request.world.store.retention.stream_bytes
                and not request.world.short_of_memory
            ):
                raise Violation(f"behind event {self.seen} there is a gap without need")
            request.world.seen["path: a gap"] += 1
            self.seen = events[0][0] - 1
        for number, event in events:
            if number != self.seen + 1 or number > len(log) or event != log[number - 1]:
                raise Violation(f"behind event {self.seen} of {len(log)} comes {number}: {event!r}")
            self.seen = number
        if not events and self.seen != len(log):
            raise Violation(f"a reader has seen event {self.seen} of {len(log)} and gets nothing")

    def leave(self) -> None:
        if self.gone or self._reader is None:
            return
        self.gone = True
        world = self.request.world
        world.store.detach(self._reader, world.now)
        if world.store.num_detached > world.store.retention.max_detached + sum(
            request.stopping for request in world.requests
        ):
            raise Violation(f"{world.store.num_detached} streams without a reader go on")
