"""Supervisor: keeps an engine process running and replays every open sequence on its replacement
after a crash.

It journals each token before delivering it. When an engine exits, makes no progress or violates the
protocol, it starts the next one and submits every open sequence again with the tokens generated so
far, so streams continue at the next token. A sequence suspected of crashing engines is run alone,
and quarantined after CRASHES_ALONE crashes while it ran alone. An engine that cannot be loaded is
tried again until the recovery timeout. Invariant: every submitted sequence that is not cancelled
gets exactly one final event, a Token with `finish` or a Failed. Sans-I/O: `spawn` makes engines,
`tick` passes time, and all methods are called from one thread.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from server import protocol
from server.supervision.crash_policy import MIN_LOADS, SUSPECT_CRASHES, CrashPolicy, Timeouts
from server.supervision.engine import LIVE as LIVE
from server.supervision.engine import Engine, EngineEvent, Spawn
from server.supervision.engine import State as State
from server.supervision.journal import OpenSequence, SequenceEvent

log = logging.getLogger("onehead.supervisor")

STABLE_SECONDS = 60.0
"""Time for which an engine must be ready, making progress, until earlier crashes are forgotten."""


class Supervisor:
    """At most one engine process at a time, and the journal of open sequences."""

    def __init__(
        self,
        spawn: Spawn,
        on_state: Callable[[State], None],
        on_event: Callable[[EngineEvent], None],
        timeouts: Timeouts,
    ) -> None:
        self._spawn = spawn
        self._on_state = on_state
        self._on_event = on_event
        self._timeouts = timeouts
        self._engine: Engine | None = None
        self._epoch = 0
        self._first_load = 0.0
        self._down_seconds = 0.0
        """Seconds since an engine was last ready."""
        self._backoff = 0.0
        """Seconds until the next engine is spawned, while there is none."""
        self.crash_policy = CrashPolicy()
        self._next_id = 0
        self._phase = self._crash_reason = ""
        """Loading phase of an engine that is not ready, and how the one before it ended."""
        self._isolated: OpenSequence | None = None
        """The suspect that is being run alone."""
        self.state = State.STARTING
        self.reason = ""
        self.ready: protocol.Ready | None = None
        self.lacks_resource = False
        self.open: dict[int, OpenSequence] = {}

    @property
    def recovery_overdue(self) -> bool:
        """Whether there has been no ready engine for longer than a request should wait for one."""
        return self.ready is not None and self._down_seconds >= self._timeouts.recovery_after(
            self._first_load
        )

    @property
    def absence(self) -> str:
        """Why requests are failed while `recovery_overdue`, for clients."""
        cause = f": it {self._crash_reason}" if self.crash_policy.failed_loads else ""
        return f"the engine is not back yet{cause}; try again later"

    @property
    def status(self) -> str:
        """The state of the engine in words, for logs and error messages."""
        if self.state is not State.STARTING:
            return str(self.state.value)
        phase = self._phase or "starting"
        return (
            f"restarting after the engine {self._crash_reason}: {phase}"
            if self._crash_reason
            else phase
        )

    def start(self) -> None:
        """Spawns an engine under a new epoch; messages of older epochs are ignored. Raises
        OSError.
        """
        self._epoch += 1
        epoch = self._epoch
        self._kill_reason = ""
        """Why the engine was killed, until it has exited; its messages are ignored meanwhile."""
        self._progress = -1
        self._any_sent = self._is_loaded = self._is_refused = False
        """Whether this engine was ever sent a sequence, is loaded, has refused to load."""
        self._silent_seconds = self._ready_seconds = self._loading_seconds = 0.0
        self._engine = self._spawn(
            lambda message: self._on_message(epoch, message),
            lambda status: self._on_exit(epoch, status),
        )

    def submit(
        self,
        submit: protocol.Submit,
        deliver: Callable[[SequenceEvent], None],
        known: Sequence[protocol.Token] = (),
    ) -> int:
        """Journals a sequence and sends it to the engine now or when one is ready. Returns its id,
        which replaces the one in `submit`. It goes on after the tokens that are `known` from a
        server before, if none of them is its last.
        """
        self._next_id += 1
        if self.state not in LIVE:
            deliver(protocol.Failed(self._next_id, self.reason, code="engine_unavailable"))
            return self._next_id
        if known and known[-1].finish is not None:
            return self._next_id
        output = [token.token for token in known]
        sequence = OpenSequence(msgspec.structs.replace(submit, id=self._next_id), deliver, output)
        self.open[self._next_id] = sequence
        if self.state is State.READY and self._isolated is None:
            self._send(sequence)
        return self._next_id

    def look(self, look: protocol.Look) -> None:
        """Asks a ready engine how its cache is used; the answer is an event."""
        if self.state is State.READY and self._engine is not None:
            self._engine.send(look)

    def cancel(self, id: int) -> None:
        """Cancels a sequence: nothing more is delivered for it. One that has ended is ignored."""
        sequence = self.open.pop(id, None)
        if sequence is not None:
            self._cancel_in_engine(sequence)
            self._end_isolation(sequence)

    def stop(self) -> None:
        """Shuts the engine down; open sequences fail."""
        if self.state in LIVE:
            self._end(State.STOPPED, "the server is shutting down", "server_shutting_down")
            if self._engine is not None:
                self._engine.send(protocol.Shutdown())

    def tick(self, elapsed: float) -> None:
        """Advances time by `elapsed` seconds, not counting time in which this process itself was
        suspended.
        """
        if self.state is State.READY:
            self._silent_seconds += elapsed
            self._ready_seconds += elapsed
            # A hang is detected only after `stall` seconds, so these do not count as stable.
            if self._ready_seconds >= STABLE_SECONDS + self._timeouts.stall:
                self.crash_policy.reset()
            if self._silent_seconds >= self._timeouts.stall:
                self._kill(f"showed no progress for {self._timeouts.stall:g} s")
        elif self.state is State.STARTING:
            self._tick_without_engine(elapsed)

    def _tick_without_engine(self, elapsed: float) -> None:
        was_overdue = self.recovery_overdue
        self._down_seconds += elapsed
        if self.recovery_overdue and not was_overdue:
            self._fail_all(self.absence, "engine_unavailable")
        if self._engine is None:
            self._backoff -= elapsed
            if self._backoff <= 0.0:
                self._respawn()
        elif not self._kill_reason:
            self._loading_seconds += elapsed
            if self._loading_seconds >= self._timeouts.start:
                self._kill(f"was not loaded after {self._timeouts.start:g} s")

    def _on_message(self, epoch: int, message: protocol.FromEngine) -> None:
        if epoch != self._epoch or self._kill_reason or self.state not in LIVE:
            return
        match message:
            case protocol.Tokens():
                self._on_tokens(message)
            case protocol.Heartbeat() | protocol.CacheView():
                self._on_report(message)
            case protocol.Started():
                self._on_started(message)
            case protocol.PromptScores():
                self._on_scores(message)
            case protocol.Failed():
                self._on_failed(message)
            case protocol.Loading():
                self._phase = message.phase
            case protocol.Ready():
                self._on_ready(message)
            case protocol.Refused():
                self._on_refused(message)

    def _on_refused(self, refused: protocol.Refused) -> None:
        self.lacks_resource = refused.resource
        if self.ready is None:
            self._end(State.REFUSED, refused.reason, "engine_unavailable")
        else:
            self._is_refused = True
            self._kill(f"could not be loaded: {refused.reason}")

    def _on_ready(self, ready: protocol.Ready) -> None:
        if self.ready is None:
            self._first_load = self._loading_seconds
        self.ready = ready
        self._is_loaded, self.crash_policy.failed_loads = True, 0
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

    def _on_started(self, message: protocol.Started) -> None:
        for id in message.ids:
            if id in self.open:
                self.open[id].started = True
                self.open[id].stale = False
        self._on_event(message)

    def _on_report(self, report: protocol.Heartbeat | protocol.CacheView) -> None:
        """Any heartbeat shows that an idle engine is alive; an engine with work must show
        progress.
        """
        if isinstance(report, protocol.Heartbeat):
            if report.progress != self._progress or not any(
                sequence.sent for sequence in self.open.values()
            ):
                self._silent_seconds = 0.0
            self._progress = report.progress
        self._on_event(report)

    def _on_token(self, token: protocol.Token) -> None:
        """Journals and delivers a token if it is the next one of an open sequence; kills an engine
        that skipped some.
        """
        sequence = self.open.get(token.id)
        if sequence is None or sequence.stale or token.index < len(sequence.output):
            return
        if sequence.submit.score_prompt and sequence.num_scored < len(sequence.submit.prompt):
            self._kill(f"sent a token of sequence {token.id} before its prompt scores")
            return
        if token.index > len(sequence.output):
            self._kill(
                f"skipped tokens of sequence {token.id}: expected token {len(sequence.output)}, "
                f"got token {token.index}"
            )
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
        """Delivers the scores that are new: a replacement engine sends them from the first
        again.
        """
        sequence = self.open.get(message.id)
        if sequence is None or sequence.stale:
            return
        if message.first > sequence.num_scored:
            self._kill(
                f"skipped prompt scores of sequence {message.id}: expected {sequence.num_scored}, "
                f"got {message.first}"
            )
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

    def _kill(self, reason: str) -> None:
        """Kills the engine and ignores its messages. The next one is spawned when this one has
        exited, so that two never run at once.
        """
        self._kill_reason = self._crash_reason = reason
        self._set_state(State.STARTING)
        assert self._engine is not None
        self._engine.kill()

    def _on_exit(self, epoch: int, status: int) -> None:
        if epoch != self._epoch or self.state not in LIVE:
            return
        self._crash_reason = (
            self._kill_reason
            or f"ended with status {status}{'' if self._is_loaded else ' while it was loaded'}"
        )
        log.error("the engine %s; %d sequences are open", self._crash_reason, len(self.open))
        self._engine, self._kill_reason, self._isolated, self._phase = None, "", None, ""
        self._epoch += 1
        if not self._is_loaded:
            self._on_failed_load()
            return
        culprit = self.crash_policy.record_crash(self.open.values(), self._any_sent)
        if culprit is not None:
            log.error(
                "sequence %d is quarantined: it crashed the engine %d times",
                culprit.submit.id,
                culprit.crashes,
            )
            reason = "this request crashed the engine more than once and will not be retried"
            self._on_failed(protocol.Failed(culprit.submit.id, reason, code="request_quarantined"))
        for sequence in self.open.values():
            sequence.sent = sequence.started = sequence.stale = False
        if self.crash_policy.give_up_reason:
            self._end(State.GAVE_UP, self.crash_policy.give_up_reason, "engine_unavailable")
        else:
            self._restart()

    def _on_failed_load(self) -> None:
        """Tries again after a pause that grows; gives up after the recovery timeout, or where no
        engine was ever ready.
        """
        self.crash_policy.failed_loads += 1
        if self.crash_policy.failed_loads >= MIN_LOADS and (
            self.ready is None or self.recovery_overdue
        ):
            reason = (
                f"{self.crash_policy.failed_loads} engines in a row did not get ready; the "
                f"last one {self._crash_reason}"
            )
            self._end(
                State.REFUSED if self._is_refused else State.GAVE_UP, reason, "engine_unavailable"
            )
        else:
            self._restart()

    def _restart(self) -> None:
        self._set_state(State.STARTING)
        self._backoff = self.crash_policy.backoff
        if self._backoff == 0.0:
            self._respawn()

    def _respawn(self) -> None:
        try:
            self.start()
        except OSError as error:
            self._crash_reason = f"could not be started: {error.strerror}"
            log.error("the engine %s", self._crash_reason)
            self._on_failed_load()

    def _dispatch(self) -> None:
        """Sends the first suspect alone if there is one, otherwise every open sequence."""
        suspects = [
            sequence for sequence in self.open.values() if sequence.crashes >= SUSPECT_CRASHES
        ]
        self._isolated = suspects[0] if suspects else None
        for sequence in suspects[:1] or list(self.open.values()):
            if not sequence.sent:
                self._send(sequence)

    def _end_isolation(self, sequence: OpenSequence) -> None:
        """If `sequence` is the suspect that runs alone: it made progress or ended, so the next
        suspect is sent, or every sequence.
        """
        if sequence is self._isolated and self.state is State.READY:
            self._cancel_in_engine(sequence)
            self._dispatch()

    def _send(self, sequence: OpenSequence) -> None:
        sequence.sent = self._any_sent = True
        assert self._engine is not None
        self._engine.send(sequence.resubmission())

    def _cancel_in_engine(self, sequence: OpenSequence) -> None:
        """Cancels a sequence in the engine, if it was sent."""
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
