"""Supervisor: holds the truth about every open sequence; keeps an engine running behind them.

It journals each token before anyone sees it. When an engine dies, falls silent or leaves the protocol, it spawns the next one and
submits every open sequence again with the tokens it has: streams go on at the next token. A sequence that engines keep dying of is run
alone to be sure, and given up for the sake of the others. Synchronous, without I/O or clock: the engine is whatever `spawn` returns,
time is what `tick` is told, and all methods are called from one thread. Invariant: every submitted sequence that is not cancelled gets
exactly one last delivery, a Token with `finish` or a Failed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from server import protocol
from server.supervision.crash_policy import MAX_BACKOFF_SECONDS, SUSPECT_DEATHS, Deaths
from server.supervision.journal import Delivery, OpenSequence

log = logging.getLogger("onehead.supervisor")

STABLE_SECONDS = 60.0
"""An engine that was ready for so long owes nothing to those before it."""

News = protocol.Tokens | protocol.Started


class Engine(Protocol):
    """A running engine, as transport.EngineProcess is one."""

    def send(self, message: protocol.ToEngine) -> None: ...

    def kill(self) -> None:
        """Ends it whatever it is doing; `on_exit` follows."""


Spawn = Callable[[Callable[[protocol.FromEngine], None], Callable[[int], None]], Engine]
"""(on_message, on_exit) -> a new engine that has been sent its Start. Raises OSError."""


class State(Enum):
    """STARTING until an engine is loaded and whenever it is being replaced; the last three are final."""

    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"
    REFUSED = "refused"
    GAVE_UP = "gave up"


LIVE = (State.STARTING, State.READY)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds: for a sign of life, for an engine to load, and for open sequences to have an engine again."""

    stall: float = 10.0
    start: float = 600.0
    recovery: float = 60.0


class Supervisor:
    """One engine at a time, replaced when it dies, and the sequences it works on."""

    def __init__(
        self,
        spawn: Spawn,
        on_state: Callable[[State], None],
        on_news: Callable[[News], None],
        patience: Patience | None = None,
    ) -> None:
        self._spawn = spawn
        self._on_state = on_state
        self._on_news = on_news
        self._patience = patience or Patience()
        self._engine: Engine | None = None
        self._epoch = 0
        self._condemned = ""
        """Why the engine has been killed, until its exit is known; what it still says counts for nothing."""
        self._progress = -1
        self._silence = 0.0
        self._lived = 0.0
        self._loading = 0.0
        self._without = 0.0
        """Seconds for which there has been no engine that works."""
        self._backoff = 0.0
        self.deaths = Deaths()
        self._next_id = 0
        self._phase = self._crash = ""
        """What an engine that is not ready is doing, and why it replaces another."""
        self._trial: OpenSequence | None = None
        """The suspect that is run alone."""
        self._any_sent = False
        """Whether the engine of the moment was ever sent a sequence."""
        self._careful = False
        """Whether a sequence is sent only when the engine runs the one before."""
        self._suspicious = 0
        """The last of those that the engine may have died of taking in: care lasts until they run."""
        self.state = State.STARTING
        self.reason = ""
        self.ready: protocol.Ready | None = None
        self.lacks_resource = False
        self.open: dict[int, OpenSequence] = {}

    @property
    def lost(self) -> bool:
        """Whether the engine has been away for longer than a request should wait for it."""
        return self.ready is not None and self._without >= self._patience.recovery

    @property
    def status(self) -> str:
        """What the engine is doing, in words."""
        if self.state is not State.STARTING:
            return str(self.state.value)
        phase = self._phase or "starting"
        return f"restarting after the engine {self._crash}: {phase}" if self._crash else phase

    def start(self) -> None:
        """Spawns an engine under a new epoch: whatever an older one still says is ignored. Raises OSError."""
        self._epoch += 1
        epoch = self._epoch
        self._condemned, self._progress, self._any_sent = "", -1, False
        self._silence = self._lived = self._loading = 0.0
        self._engine = self._spawn(
            lambda message: self._hear(epoch, message),
            lambda status: self._bury(epoch, status),
        )

    def submit(self, submit: protocol.Submit, deliver: Callable[[Delivery], None]) -> int:
        """Journals a sequence and hands it to the engine, or to the next one; its id, which replaces the one in `submit`."""
        self._next_id += 1
        if self.state not in LIVE:
            deliver(protocol.Failed(self._next_id, self.reason, code="engine_unavailable"))
            return self._next_id
        sequence = OpenSequence(msgspec.structs.replace(submit, id=self._next_id), deliver)
        self.open[self._next_id] = sequence
        if self.state is State.READY and self._trial is None:
            self._send_next([sequence])
        return self._next_id

    def cancel(self, id: int) -> None:
        """Forgets a sequence; nothing more is delivered for it. One that has ended is fine."""
        sequence = self.open.pop(id, None)
        if sequence is not None:
            self._recall(sequence)
            self._end_trial(sequence)
            self._take_care()

    def stop(self) -> None:
        """Ends the engine; sequences still open fail."""
        if self.state in LIVE:
            self._end(State.STOPPED, "the server is shutting down", "server_shutting_down")
            if self._engine is not None:
                self._engine.send(protocol.Shutdown())

    def tick(self, elapsed: float) -> None:
        """`elapsed` seconds have passed for this process; what it slept through itself is nobody's silence."""
        if self.state is State.READY:
            self._silence += elapsed
            self._lived += elapsed
            # One that hangs is found out when it has lived for `stall`: that alone is no merit.
            if self._lived >= STABLE_SECONDS + self._patience.stall:
                self.deaths.forgive()
            if self._silence >= self._patience.stall:
                self._condemn(f"showed no progress for {self._patience.stall:g} s")
        elif self.state is State.STARTING:
            self._tick_without_engine(elapsed)

    def _tick_without_engine(self, elapsed: float) -> None:
        was_lost = self.lost
        self._without += elapsed
        if self.lost and not was_lost:
            self._fail_all("the engine is not back yet; try again later", "engine_unavailable")
        if self._engine is None:
            self._backoff -= elapsed
            if self._backoff <= 0.0:
                self._respawn()
        elif not self._condemned:
            self._loading += elapsed
            if self._loading >= self._patience.start:
                self._condemn(f"was not loaded after {self._patience.start:g} s (server.start_timeout)")

    def _hear(self, epoch: int, message: protocol.FromEngine) -> None:
        if epoch != self._epoch or self._condemned or self.state not in LIVE:
            return
        if isinstance(message, protocol.Tokens):
            self._take_tokens(message)
        elif isinstance(message, protocol.Beat):
            self._take_beat(message)
        elif isinstance(message, protocol.Started):
            self._take_started(message)
        elif isinstance(message, protocol.Scores):
            self._take_scores(message)
        elif isinstance(message, protocol.Failed):
            self._fail(message)
        elif isinstance(message, protocol.Loading):
            self._phase = message.phase
        elif isinstance(message, protocol.Ready):
            self._take_over(message)
        elif self.ready is None:
            self.lacks_resource = message.resource
            self._end(State.REFUSED, message.reason, "engine_unavailable")
        # An engine that could load once and now cannot is a death like any other; its exit is on the way.

    def _take_over(self, ready: protocol.Ready) -> None:
        self.ready = ready
        self._careful, self._suspicious = self.deaths.careful, self._next_id
        self._without, self._crash, self._phase = 0.0, "", ""
        self._enter(State.READY)
        self._dispatch()

    def _take_tokens(self, message: protocol.Tokens) -> None:
        epoch = self._epoch
        for token in message.tokens:
            self._take(token)
            if self._condemned or epoch != self._epoch:
                return
        self._on_news(message)
        self._take_care()

    def _take_started(self, message: protocol.Started) -> None:
        for id in message.ids:
            if id in self.open:
                self.open[id].started = True
                self.open[id].stale = False
        self._on_news(message)

    def _take_beat(self, beat: protocol.Beat) -> None:
        """A sign of life counts where there is nothing to do; where there is, only progress does."""
        if beat.progress != self._progress or not any(sequence.sent for sequence in self.open.values()):
            self._silence = 0.0
        self._progress = beat.progress

    def _take(self, token: protocol.Token) -> None:
        """Journals and delivers a token, if it is the next one of an open sequence."""
        sequence = self.open.get(token.id)
        if sequence is None or sequence.stale or token.index < len(sequence.output):
            return
        if sequence.submit.score_prompt and sequence.num_scored < len(sequence.submit.prompt):
            self._condemn(f"left out scores of sequence {token.id}")
            return
        if token.index > len(sequence.output):
            self._condemn(f"left out a token: sequence {token.id} has {len(sequence.output)}, and {token.index} came")
            return
        self.deaths.forgive()
        sequence.deaths = sequence.deaths_alone = 0
        sequence.started = True
        sequence.output.append(token.token)
        if token.finish is not None:
            del self.open[token.id]
        sequence.deliver(token)
        self._end_trial(sequence)

    def _take_scores(self, message: protocol.Scores) -> None:
        """Delivers those scores that are new: an engine that took over begins with the first again."""
        sequence = self.open.get(message.id)
        if sequence is None or sequence.stale:
            return
        if message.first > sequence.num_scored:
            self._condemn(f"left out scores: sequence {message.id} has {sequence.num_scored}, and {message.first} came")
            return
        new = message.scores[sequence.num_scored - message.first :]
        if new:
            first = sequence.num_scored
            sequence.num_scored += len(new)
            sequence.deliver(protocol.Scores(message.id, first, new))

    def _fail(self, failed: protocol.Failed) -> None:
        sequence = self.open.pop(failed.id, None)
        if sequence is not None:
            sequence.deliver(failed)
            self._end_trial(sequence)
            self._take_care()

    def _condemn(self, reason: str) -> None:
        """Kills the engine. It is dead to us from now on; the next one is spawned when its exit is known, so that never two live."""
        self._condemned = self._crash = reason
        self._enter(State.STARTING)
        assert self._engine is not None
        self._engine.kill()

    def _bury(self, epoch: int, status: int) -> None:
        if epoch != self._epoch or self.state not in LIVE:
            return
        self._crash = self._condemned or f"ended with status {status}"
        log.error("the engine %s; %d sequences are open", self._crash, len(self.open))
        lone = self.deaths.count(self.open.values(), self._careful or self._trial is not None, self._any_sent)
        self._engine, self._condemned, self._trial, self._phase = None, "", None, ""
        self._epoch += 1
        if lone is not None:
            self._give_up(lone)
        for sequence in self.open.values():
            sequence.sent = sequence.started = sequence.stale = False
        if self.deaths.verdict:
            self._end(State.GAVE_UP, self.deaths.verdict, "engine_unavailable")
            return
        self._enter(State.STARTING)
        self._backoff = self.deaths.backoff
        if self._backoff == 0.0:
            self._respawn()

    def _give_up(self, lone: OpenSequence) -> None:
        log.error("request %d is given up: the engine died of it %d times", lone.submit.id, lone.deaths)
        reason = "the engine died of this request more than once; it will not be tried again"
        self._fail(protocol.Failed(lone.submit.id, reason, code="request_quarantined"))

    def _respawn(self) -> None:
        try:
            self.start()
        except OSError as error:
            log.error("no engine can be started: %s", error.strerror)
            self.deaths.count_unborn()
            self._backoff = MAX_BACKOFF_SECONDS
            if self.deaths.verdict:
                self._end(State.GAVE_UP, f"no further engine can be started: {error.strerror}", "engine_unavailable")

    def _dispatch(self) -> None:
        """Gives the engine what it should have: a suspect alone, or else everything."""
        suspects = [sequence for sequence in self.open.values() if sequence.deaths >= SUSPECT_DEATHS]
        self._trial = suspects[0] if suspects else None
        self._send_next(suspects[:1] or list(self.open.values()))

    def _send_next(self, sequences: list[OpenSequence]) -> None:
        """Sends those that the engine does not have; with care, one, and that only when it runs all that it has."""
        unsent = [sequence for sequence in sequences if not sequence.sent]
        if self._careful and unsent:
            under_way = any(other.sent and not other.started for other in self.open.values())
            unsent = [] if under_way else [min(unsent, key=lambda sequence: (sequence.submit.priority, sequence.submit.id))]
        for sequence in unsent:
            self._send(sequence)

    def _take_care(self) -> None:
        """With care: the next one's turn, or the end of it."""
        if self._careful and self._engine is not None and self.state is State.READY and self._trial is None:
            unproven = (id <= self._suspicious and not sequence.started for id, sequence in self.open.items())
            self._careful = self.deaths.careful or any(unproven)
            self._send_next(list(self.open.values()))

    def _end_trial(self, sequence: OpenSequence) -> None:
        """Where this is the suspect that runs alone, it has shown itself innocent, or gone: the next one's turn, or everybody's."""
        if sequence is self._trial and self.state is State.READY:
            self._recall(sequence)
            self._dispatch()

    def _send(self, sequence: OpenSequence) -> None:
        sequence.sent = self._any_sent = True
        assert self._engine is not None
        self._engine.send(sequence.resubmission())

    def _recall(self, sequence: OpenSequence) -> None:
        """Takes a sequence from the engine, if it has it."""
        if sequence.sent and self.state is State.READY and self._engine is not None:
            self._engine.send(protocol.Cancel(sequence.submit.id))
            sequence.stale = True
        sequence.sent = sequence.started = False

    def _fail_all(self, reason: str, code: str) -> None:
        sequences, self.open = self.open, {}
        for id, sequence in sequences.items():
            sequence.deliver(protocol.Failed(id, reason, code=code))

    def _end(self, state: State, reason: str, code: str) -> None:
        self.reason = reason
        self._fail_all(reason, code)
        self._enter(state)

    def _enter(self, state: State) -> None:
        if state is not self.state or state is State.READY:
            self.state = state
            self._on_state(state)
