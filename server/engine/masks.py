"""Masks: the engine's side of the processes that follow constraints and compute masks
(server.text.mask_process).

Each constrained sequence that runs has a process of its own, so that the operating system shares
the processors between them, and a limit of time or memory ends one sequence alone. They are forked
by server.text.worker_process. Invariant: an answer depends on the constraint and the output alone;
a constraint whose process is lost is built again from the output in a new one. This module knows
nothing of steps.
"""

import contextlib
import logging
import selectors
import socket
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from server.errors import TOO_COMPLEX, ConstraintFailed
from server.protocol import (
    FOLLOW,
    SLOW_MASK_SECONDS,
    Advance,
    Answer,
    Begin,
    Guidance,
    Submit,
    decode_mask_answer,
    encode,
)

log = logging.getLogger("onehead.engine")

ANSWER_SECONDS = 60.0
"""Time without an answer after which a process counts as lost. Its own limit, of processor time, is
far lower."""
MAX_ATTEMPTS = 3
"""Processes that may be lost over one mask. The limits of a process end it, so the last attempt
decides that the grammar is too complex."""
MAX_SPARES = 8
"""Idle processes that are kept for further sequences."""


class ProcessConstraint:
    """A constraint that a process follows while its sequence runs. Implements
    server.engine.sequence.Constraint.
    """

    def __init__(self, processes: "MaskProcesses", submit: Submit) -> None:
        self.is_pending = False
        self.is_slow = False
        self._processes = processes
        self._submit = submit
        self._is_open = submit.opening is None
        """Whether the grammar's opening has been generated. No process follows it before a token
        that may complete that."""
        self._output: list[int] = []
        self._pipe: Connection | None = None
        """None while no process follows it."""
        self._answer = Answer(None)
        self._num_lost = 0

    def begin(self, output: list[int]) -> bool:
        """Starts to follow; `output` is the sequence's own list, which grows."""
        self._output, self._num_lost, self.is_slow = output, 0, False
        opening = self._submit.opening
        if opening is not None and frozenset(opening.tokens).isdisjoint(output):
            self._is_open = False
            return False
        self._build()
        return True

    def advance(self, token: int) -> bool:
        opening = self._submit.opening
        if not self._is_open and opening is not None and token not in opening.tokens:
            return False
        if self._pipe is None:
            self._build()  # It begins, or its process was lost between two tokens.
        else:
            self._ask(self._pipe, Advance(token))
        return True

    def take(self) -> Guidance:
        if self._answer.guidance is not None:
            return self._answer.guidance
        if self._answer.refused:
            raise ConstraintFailed(self._answer.failure)
        raise ConstraintFailed("an internal error in applying the grammar", refused=False)

    def end(self) -> None:
        if self._pipe is not None:
            self._processes.release(
                self, self._pipe, reusable=not self.is_pending and not self.is_slow
            )
        self._pipe, self.is_pending = None, False

    def receive(self) -> None:
        """Reads what has arrived: an answer, or the end of the process."""
        assert self._pipe is not None, "it is registered, so it has a process"
        try:
            answer = decode_mask_answer(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self.on_lost()
            return
        self.is_slow, self._num_lost = answer.seconds > SLOW_MASK_SECONDS, 0
        self._settle(answer)

    def on_lost(self) -> None:
        """Its process has ended or does not answer. What was asked is asked again, of a new one."""
        was_pending = self.is_pending
        self.is_slow = True  # Whatever process there is is not used again.
        self.end()
        if not was_pending:
            return
        self._num_lost += 1
        log.warning(
            "a process that follows a grammar was lost over a mask (%d of %d attempts)",
            self._num_lost,
            MAX_ATTEMPTS,
        )
        if self._num_lost < MAX_ATTEMPTS:
            self._build()
        else:
            self._settle(Answer(None, failure=TOO_COMPLEX, refused=True))

    def _build(self) -> None:
        self._pipe = self._processes.acquire(self, fresh=self._num_lost > 0)
        submit = self._submit
        self._ask(self._pipe, Begin(submit.grammar, submit.healed, self._output, submit.opening))

    def _ask(self, pipe: Connection, request: Begin | Advance) -> None:
        self.is_pending = True
        self._processes.expect(self, soon=isinstance(request, Advance) and not self.is_slow)
        with contextlib.suppress(OSError):  # The process has ended, which `receive` reads.
            pipe.send_bytes(encode(request))

    def _settle(self, answer: Answer) -> None:
        self._answer, self.is_pending = answer, False
        self._is_open = answer.guidance is None or answer.guidance.is_open
        self._processes.settled(self)
        if answer.failure and not answer.refused:
            log.error("a constraint failed: %s", answer.failure)


class MaskProcesses:
    """The processes that follow constraints. `channel`: where processes are asked for; the API
    process holds both of its ends, so that what was asked waits there while the process that forks
    is replaced.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._spares: list[Connection] = []
        self._pending: dict[ProcessConstraint, float] = {}
        """Constraints that wait for an answer -> when that is overdue; the earliest first."""
        self._soon: set[ProcessConstraint] = set()
        """Those whose answer is worth waiting for."""

    def constraint(self, submit: Submit) -> ProcessConstraint | None:
        """The constraint of a submission; None if it has none."""
        if not submit.grammar and not submit.healed:
            return None
        return ProcessConstraint(self, submit)

    def collect(self, patience: float) -> None:
        """Receives the answers that are there, and those expected soon for at most `patience`
        seconds.
        """
        if not self._pending and not self._selector.get_map():
            return
        end = time.monotonic() + patience
        while self._soon and (left := end - time.monotonic()) > 0:
            self._receive(left)
        self._receive(0.0)

    def wait(self, pipe: Connection) -> None:
        """Waits until this pipe can be read or an answer arrives."""
        self._selector.register(pipe, selectors.EVENT_READ)
        try:
            overdue = next(iter(self._pending.values()), None)
            self._receive(None if overdue is None else max(0.0, overdue - time.monotonic()))
        finally:
            self._selector.unregister(pipe)

    def _receive(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is not None:
                key.data.receive()
        while self._pending and next(iter(self._pending.values())) <= time.monotonic():
            next(iter(self._pending)).on_lost()

    def acquire(self, constraint: ProcessConstraint, fresh: bool) -> Connection:
        """A process for a constraint: a spare one, or one that has followed no other. Raises
        OSError.
        """
        pipe = self._spares.pop() if self._spares and not fresh else self._fork()
        self._selector.register(pipe, selectors.EVENT_READ, constraint)
        return pipe

    def _fork(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            socket.send_fds(self._channel, [FOLLOW], [theirs.fileno()])
        return ours

    def release(self, constraint: ProcessConstraint, pipe: Connection, reusable: bool) -> None:
        """Takes back the process of a constraint. One that is computing ends when its pipe is
        closed.
        """
        self._selector.unregister(pipe)
        self.settled(constraint)
        if reusable and len(self._spares) < MAX_SPARES:
            self._spares.append(pipe)
        else:
            pipe.close()

    def expect(self, constraint: ProcessConstraint, soon: bool) -> None:
        """Notes that a constraint waits for an answer."""
        self._pending[constraint] = time.monotonic() + ANSWER_SECONDS
        if soon:
            self._soon.add(constraint)

    def settled(self, constraint: ProcessConstraint) -> None:
        """Notes that a constraint no longer waits."""
        self._pending.pop(constraint, None)
        self._soon.discard(constraint)
