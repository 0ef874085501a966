"""Supervisor: holds the truth about every open sequence; keeps an engine running behind them.

It journals each token before anyone sees it. When an engine dies it spawns the next one and submits every open sequence again with
the tokens it has: streams go on at the next token. Synchronous, without I/O or clock: the engine is whatever `spawn` returns, and
all methods are called from one thread. Invariant: every submitted sequence that is not cancelled gets exactly one last delivery, a
Token with `finish` or a Failed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from server import protocol

log = logging.getLogger("onehead.supervisor")

MAX_DEATHS_WITHOUT_PROGRESS = 3

Delivery = protocol.Token | protocol.Scores | protocol.Failed


class Engine(Protocol):
    """A running engine, as transport.EngineProcess is one."""

    def send(self, message: protocol.ToEngine) -> None: ...


Spawn = Callable[[Callable[[protocol.FromEngine], None], Callable[[int], None]], Engine]
"""(on_message, on_exit) -> a new engine that has been sent its Start."""


class State(Enum):
    """STARTING until an engine is loaded and whenever it is being replaced; the last three are final."""

    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"
    REFUSED = "refused"
    GAVE_UP = "gave up"


@dataclass(slots=True)
class OpenSequence:
    """What is needed to finish a sequence on another engine: its submission and every token so far."""

    submit: protocol.Submit
    deliver: Callable[[Delivery], None]
    output: list[int] = field(default_factory=list)
    num_scored: int = 1
    """Prompt tokens whose scores have been delivered, and the first, which has none."""

    def resubmission(self) -> protocol.Submit:
        scored = self.num_scored >= len(self.submit.prompt)
        return msgspec.structs.replace(self.submit, output=self.output, score_prompt=self.submit.score_prompt and not scored)


class Supervisor:
    """One engine at a time, replaced when it dies, and the sequences it works on."""

    def __init__(self, spawn: Spawn, on_state: Callable[[State], None], on_step: Callable[[protocol.Tokens], None]) -> None:
        self._spawn = spawn
        self._on_state = on_state
        self._on_step = on_step
        self._engine: Engine | None = None
        self._epoch = 0
        self._deaths_without_progress = 0
        self._next_id = 0
        self.state = State.STARTING
        self.reason = ""
        self.ready: protocol.Ready | None = None
        self.lacks_resource = False
        self.open: dict[int, OpenSequence] = {}

    def start(self) -> None:
        """Spawns an engine under a new epoch: whatever an older one still says is ignored."""
        self._epoch += 1
        epoch = self._epoch
        self._engine = self._spawn(
            lambda message: self._hear(epoch, message),
            lambda status: self._bury(epoch, status),
        )

    def submit(self, submit: protocol.Submit, deliver: Callable[[Delivery], None], leader: int | None = None) -> int:
        """Journals a sequence and hands it to the engine, or to the next one; its id, which replaces the one in `submit`."""
        self._next_id += 1
        if self.state not in (State.STARTING, State.READY):
            deliver(protocol.Failed(self._next_id, self.reason))
            return self._next_id
        sequence = OpenSequence(msgspec.structs.replace(submit, id=self._next_id, leader=leader), deliver)
        self.open[self._next_id] = sequence
        self._send(sequence.submit)
        return self._next_id

    def cancel(self, id: int) -> None:
        """Forgets a sequence; nothing more is delivered for it. One that has ended is fine."""
        if self.open.pop(id, None) is not None:
            self._send(protocol.Cancel(id))

    def stop(self) -> None:
        """Ends the engine; sequences still open fail."""
        if self.state in (State.STARTING, State.READY):
            self._end(State.STOPPED, "the server is shutting down")
            if self._engine is not None:
                self._engine.send(protocol.Shutdown())

    def _hear(self, epoch: int, message: protocol.FromEngine) -> None:
        if epoch != self._epoch or self.state not in (State.STARTING, State.READY):
            return
        if isinstance(message, protocol.Tokens):
            for token in message.tokens:
                self._take(token)
            self._on_step(message)
        elif isinstance(message, protocol.Scores):
            self._take_scores(message)
        elif isinstance(message, protocol.Failed):
            sequence = self.open.pop(message.id, None)
            if sequence is not None:
                sequence.deliver(message)
        elif isinstance(message, protocol.Ready):
            self.ready = message
            self._enter(State.READY)
            for sequence in self.open.values():
                self._send(sequence.resubmission())
        elif self.ready is None:
            self.lacks_resource = message.resource
            self._end(State.REFUSED, message.reason)
        # An engine that could load once and now cannot is a death like any other; its exit is on the way.

    def _take(self, token: protocol.Token) -> None:
        """Journals and delivers a token, if it is the next one of an open sequence."""
        sequence = self.open.get(token.id)
        if sequence is None or token.index != len(sequence.output):
            return
        self._deaths_without_progress = 0
        sequence.output.append(token.token)
        if token.finish is not None:
            del self.open[token.id]
        sequence.deliver(token)

    def _take_scores(self, message: protocol.Scores) -> None:
        """Delivers those scores that are new: an engine that took over begins with the first again."""
        sequence = self.open.get(message.id)
        if sequence is None or message.first > sequence.num_scored:
            return
        new = message.scores[sequence.num_scored - message.first :]
        if new:
            first = sequence.num_scored
            sequence.num_scored += len(new)
            sequence.deliver(protocol.Scores(message.id, first, new))

    def _bury(self, epoch: int, status: int) -> None:
        if epoch != self._epoch or self.state not in (State.STARTING, State.READY):
            return
        self._deaths_without_progress += 1
        log.error("the engine ended with status %d; %d sequences are open", status, len(self.open))
        if self._deaths_without_progress >= MAX_DEATHS_WITHOUT_PROGRESS:
            self._end(State.GAVE_UP, f"the engine died {self._deaths_without_progress} times in a row without a new token")
            return
        self._enter(State.STARTING)
        try:
            self.start()
        except OSError as error:
            self._end(State.GAVE_UP, f"no further engine can be started: {error.strerror}")

    def _end(self, state: State, reason: str) -> None:
        self.reason = reason
        sequences, self.open = self.open, {}
        for id, sequence in sequences.items():
            sequence.deliver(protocol.Failed(id, reason))
        self._enter(state)

    def _enter(self, state: State) -> None:
        self.state = state
        self._on_state(state)

    def _send(self, message: protocol.ToEngine) -> None:
        """To the engine, once it is loaded: before that there is nothing it would know of, and Ready brings it everything."""
        if self.state is State.READY and self._engine is not None:
            self._engine.send(message)
