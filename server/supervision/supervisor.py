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
from server.supervision.crash_policy import MAX_BACKOFF_SECONDS, SUSPECT_CRASHES, CrashPolicy
from server.supervision.journal import OpenSequence, SequenceEvent

log = logging.getLogger("onehead.supervisor")

STABLE_SECONDS = 60.0
"""An engine that was ready for so long owes nothing to those before it."""

EngineEvent = protocol.Tokens | protocol.Started


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
class Timeouts:
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
        on_event: Callable[[EngineEvent], None],
        timeouts: Timeouts | None = None,
    ) -> None:
        self._spawn = spawn
        self._on_state = on_state
        self._on_event = on_event
        self._timeouts = timeouts or Timeouts()
        self._engine: Engine | None = None
        self._epoch = 0
        self._kill_reason = ""
        """Why the engine has been killed, until its exit is known; what it still says counts for nothing."""
        self._progress = -1
        self._silent_seconds = 0.0
        self._ready_seconds = 0.0
        self._loading_seconds = 0.0
        self._down_seconds = 0.0
        """Seconds for which there has been no engine that works."""
        self._backoff = 0.0
        self.crash_policy = CrashPolicy()
        self._next_id = 0
        self._phase = self._crash_reason = ""
        """What an engine that is not ready is doing, and why it replaces another."""
        self._isolated: OpenSequence | None = None
        """The suspect that is run alone."""
        self._any_sent = False
        """Whether the engine of the moment was ever sent a sequence."""
        self._one_at_a_time = False
        """Whether a sequence is sent only when the engine runs the one before."""
        self._last_unproven_id = 0
        """The last of those that the engine may have died of taking in: care lasts until they run."""
        self.state = State.STARTING
        self.reason = ""
        self.ready: protocol.Ready | None = None
        self.lacks_resource = False
        self.open: dict[int, OpenSequence] = {}

    @property
    def recovery_overdue(self) -> bool:
        """Whether the engine has been away for longer than a request should wait for it."""
        return self.ready is not None and self._down_seconds >= self._timeouts.recovery

    @property
    def status(self) -> str:
        """What the engine is doing, in words."""
        if self.state is not State.STARTING:
            return str(self.state.value)
        phase = self._phase or "starting"
        return f"restarting after the engine {self._crash_reason}: {phase}" if self._crash_reason else phase

    def start(self) -> None:
        """Spawns an engine under a new epoch: whatever an older one still says is ignored. Raises OSError."""
        self._epoch += 1
        epoch = self._epoch
        self._kill_reason, self._progress, self._any_sent = "", -1, False
        self._silent_seconds = self._ready_seconds = self._loading_seconds = 0.0
        self._engine = self._spawn(
            lambda message: self._on_message(epoch, message),
            lambda status: self._on_exit(epoch, status),
        )

    def submit(self, submit: protocol.Submit, deliver: Callable[[SequenceEvent], None]) -> int:
        """Journals a sequence and hands it to the engine, or to the next one; its id, which replaces the one in `submit`."""
        self._next_id += 1
        if self.state not in LIVE:
            deliver(protocol.Failed(self._next_id, self.reason, code="engine_unavailable"))
            return self._next_id
        sequence = OpenSequence(msgspec.structs.replace(submit, id=self._next_id), deliver)
        self.open[self._next_id] = sequence
        if self.state is State.READY and self._isolated is None:
            self._send_next([sequence])
        return self._next_id

    def cancel(self, id: int) -> None:
        """Forgets a sequence; nothing more is delivered for it. One that has ended is fine."""
        sequence = self.open.pop(id, None)
        if sequence is not None:
            self._cancel_in_engine(sequence)
            self._end_isolation(sequence)
            self._continue_one_at_a_time()

    def stop(self) -> None:
        """Ends the engine; sequences still open fail."""
        if self.state in LIVE:
            self._end(State.STOPPED, "the server is shutting down", "server_shutting_down")
            if self._engine is not None:
                self._engine.send(protocol.Shutdown())

    def tick(self, elapsed: float) -> None:
        """`elapsed` seconds have passed for this process; what it slept through itself is nobody's silence."""
        if self.state is State.READY:
            self._silent_seconds += elapsed
            self._ready_seconds += elapsed
            # One that hangs is found out when it has lived for `stall`: that alone is no merit.
            if self._ready_seconds >= STABLE_SECONDS + self._timeouts.stall:
                self.crash_policy.reset()
            if self._silent_seconds >= self._timeouts.stall:
                self._kill(f"showed no progress for {self._timeouts.stall:g} s")
        elif self.state is State.STARTING:
            self._tick_without_engine(elapsed)

    def _tick_without_engine(self, elapsed: float) -> None:
        was_lost = self.recovery_overdue
        self._down_seconds += elapsed
        if self.recovery_overdue and not was_lost:
            self._fail_all("the engine is not back yet; try again later", "engine_unavailable")
        if self._engine is None:
            self._backoff -= elapsed
            if self._backoff <= 0.0:
                self._respawn()
        elif not self._kill_reason:
            self._loading_seconds += elapsed
            if self._loading_seconds >= self._timeouts.start:
                self._kill(f"was not loaded after {self._timeouts.start:g} s (server.start_timeout)")

    def _on_message(self, epoch: int, message: protocol.FromEngine) -> None:
        if epoch != self._epoch or self._kill_reason or self.state not in LIVE:
            return
        if isinstance(message, protocol.Tokens):
            self._on_tokens(message)
        elif isinstance(message, protocol.Heartbeat):
            self._on_heartbeat(message)
        elif isinstance(message, protocol.Started):
            self._on_started(message)
        elif isinstance(message, protocol.PromptScores):
            self._on_scores(message)
        elif isinstance(message, protocol.Failed):
            self._on_failed(message)
        elif isinstance(message, protocol.Loading):
            self._phase = message.phase
        elif isinstance(message, protocol.Ready):
            self._on_ready(message)
        elif self.ready is None:
            self.lacks_resource = message.resource
            self._end(State.REFUSED, message.reason, "engine_unavailable")
        # An engine that could load once and now cannot is a death like any other; its exit is on the way.

    def _on_ready(self, ready: protocol.Ready) -> None:
        self.ready = ready
        self._one_at_a_time, self._last_unproven_id = self.crash_policy.one_at_a_time, self._next_id
        self._down_seconds, self._crash_reason, self._phase = 0.0, "", ""
        self._set_state(State.READY)
        self._dispatch()

    def _on_tokens(self, message: protocol.Tokens) -> None:
        epoch = self._epoch
        for token in message.tokens:
            self._on_token(token)
            if self._kill_reason or epoch != self._epoch:
                return
        self._on_event(message)
        self._continue_one_at_a_time()

    def _on_started(self, message: protocol.Started) -> None:
        for id in message.ids:
            if id in self.open:
                self.open[id].started = True
                self.open[id].stale = False
        self._on_event(message)

    def _on_heartbeat(self, beat: protocol.Heartbeat) -> None:
        """A sign of life counts where there is nothing to do; where there is, only progress does."""
        if beat.progress != self._progress or not any(sequence.sent for sequence in self.open.values()):
            self._silent_seconds = 0.0
        self._progress = beat.progress

    def _on_token(self, token: protocol.Token) -> None:
        """Journals and delivers a token, if it is the next one of an open sequence."""
        sequence = self.open.get(token.id)
        if sequence is None or sequence.stale or token.index < len(sequence.output):
            return
        if sequence.submit.score_prompt and sequence.num_scored < len(sequence.submit.prompt):
            self._kill(f"left out scores of sequence {token.id}")
            return
        if token.index > len(sequence.output):
            self._kill(f"left out a token: sequence {token.id} has {len(sequence.output)}, and {token.index} came")
            return
        self.crash_policy.reset()
        sequence.crashes = sequence.crashes_alone = 0
        sequence.started = True
        sequence.output.append(token.token)
        if token.finish is not None:
            del self.open[token.id]
        sequence.deliver(token)
        self._end_isolation(sequence)

    def _on_scores(self, message: protocol.PromptScores) -> None:
        """Delivers those scores that are new: an engine that took over begins with the first again."""
        sequence = self.open.get(message.id)
        if sequence is None or sequence.stale:
            return
        if message.first > sequence.num_scored:
            self._kill(f"left out scores: sequence {message.id} has {sequence.num_scored}, and {message.first} came")
            return
        new = message.scores[sequence.num_scored - message.first :]
        if new:
            first = sequence.num_scored
            sequence.num_scored += len(new)
            sequence.deliver(protocol.PromptScores(message.id, first, new))

    def _on_failed(self, failed: protocol.Failed) -> None:
        sequence = self.open.pop(failed.id, None)
        if sequence is not None:
            sequence.deliver(failed)
            self._end_isolation(sequence)
            self._continue_one_at_a_time()

    def _kill(self, reason: str) -> None:
        """Kills the engine. It is dead to us from now on; the next one is spawned when its exit is known, so that never two live."""
        self._kill_reason = self._crash_reason = reason
        self._set_state(State.STARTING)
        assert self._engine is not None
        self._engine.kill()

    def _on_exit(self, epoch: int, status: int) -> None:
        if epoch != self._epoch or self.state not in LIVE:
            return
        self._crash_reason = self._kill_reason or f"ended with status {status}"
        log.error("the engine %s; %d sequences are open", self._crash_reason, len(self.open))
        lone = self.crash_policy.record_crash(self.open.values(), self._one_at_a_time or self._isolated is not None, self._any_sent)
        self._engine, self._kill_reason, self._isolated, self._phase = None, "", None, ""
        self._epoch += 1
        if lone is not None:
            self._give_up(lone)
        for sequence in self.open.values():
            sequence.sent = sequence.started = sequence.stale = False
        if self.crash_policy.give_up_reason:
            self._end(State.GAVE_UP, self.crash_policy.give_up_reason, "engine_unavailable")
            return
        self._set_state(State.STARTING)
        self._backoff = self.crash_policy.backoff
        if self._backoff == 0.0:
            self._respawn()

    def _give_up(self, lone: OpenSequence) -> None:
        log.error("request %d is given up: the engine died of it %d times", lone.submit.id, lone.crashes)
        reason = "the engine died of this request more than once; it will not be tried again"
        self._on_failed(protocol.Failed(lone.submit.id, reason, code="request_quarantined"))

    def _respawn(self) -> None:
        try:
            self.start()
        except OSError as error:
            log.error("no engine can be started: %s", error.strerror)
            self.crash_policy.record_failed_start()
            self._backoff = MAX_BACKOFF_SECONDS
            if self.crash_policy.give_up_reason:
                self._end(State.GAVE_UP, f"no further engine can be started: {error.strerror}", "engine_unavailable")

    def _dispatch(self) -> None:
        """Gives the engine what it should have: a suspect alone, or else everything."""
        suspects = [sequence for sequence in self.open.values() if sequence.crashes >= SUSPECT_CRASHES]
        self._isolated = suspects[0] if suspects else None
        self._send_next(suspects[:1] or list(self.open.values()))

    def _send_next(self, sequences: list[OpenSequence]) -> None:
        """Sends those that the engine does not have; with care, one, and that only when it runs all that it has."""
        unsent = [sequence for sequence in sequences if not sequence.sent]
        if self._one_at_a_time and unsent:
            under_way = any(other.sent and not other.started for other in self.open.values())
            unsent = [] if under_way else [min(unsent, key=lambda sequence: (sequence.submit.priority, sequence.submit.id))]
        for sequence in unsent:
            self._send(sequence)

    def _continue_one_at_a_time(self) -> None:
        """With care: the next one's turn, or the end of it."""
        if self._one_at_a_time and self._engine is not None and self.state is State.READY and self._isolated is None:
            unproven = (id <= self._last_unproven_id and not sequence.started for id, sequence in self.open.items())
            self._one_at_a_time = self.crash_policy.one_at_a_time or any(unproven)
            self._send_next(list(self.open.values()))

    def _end_isolation(self, sequence: OpenSequence) -> None:
        """Where this is the suspect that runs alone, it has shown itself innocent, or gone: the next one's turn, or everybody's."""
        if sequence is self._isolated and self.state is State.READY:
            self._cancel_in_engine(sequence)
            self._dispatch()

    def _send(self, sequence: OpenSequence) -> None:
        sequence.sent = self._any_sent = True
        assert self._engine is not None
        self._engine.send(sequence.resubmission())

    def _cancel_in_engine(self, sequence: OpenSequence) -> None:
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
        self._set_state(state)

    def _set_state(self, state: State) -> None:
        if state is not self.state or state is State.READY:
            self.state = state
            self._on_state(state)
