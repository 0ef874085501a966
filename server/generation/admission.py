"""Admission: whether one more request is taken, now and how many tokens may wait; and whether the server is healthy enough to say ready.

Invariant: every request that is let in is counted exactly once at any time: by its Reservation until its sequences are submitted, by the
supervisor from then on. It knows nothing of HTTP, text or sampling.
"""

import random
import time
from collections import deque
from dataclasses import dataclass

from server.errors import Overloaded, RequestError, Unavailable
from server.generation.request import Choice
from server.metrics import Metrics
from server.supervision.supervisor import LIVE, State, Supervisor

RETRY_SECONDS = 5
"""After which a client may try again where the server is shutting down or its engine is being replaced."""
RATE_WINDOW = 64
"""Number of finished requests from whose running times the queue wait is estimated."""
NUMERICAL_ERRORS, SICK_SECONDS = 10, 60.0
"""This many requests with non-finite logits within this many seconds make the server not ready."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is taken at once, how long preparing a request may take, in seconds, and how schemas are read."""

    max_open: int
    max_running: int
    max_waiting_tokens: int = 1_000_000
    max_queue_wait: float = 600.0
    grammar_seconds: float = 2.0
    tokenize_seconds: float = 5.0
    open_objects: bool = False


class Reservation:
    """One request of one caller that has been let in. It counts as an open request until its sequences are submitted or it is released.

    `caller` decides which requests may share cached prefixes: the digest of an API key, or a constant where there are no keys.
    """

    def __init__(self, admission: "Admission", caller: str) -> None:
        self.caller = caller
        self.choices: list[Choice] = []
        """The sequences that were submitted for the request."""
        self._admission: Admission | None = admission
        admission.num_reserved += 1

    def release(self) -> None:
        """Stops counting; a second call does nothing."""
        if self._admission is not None:
            self._admission.num_reserved -= 1
            self._admission = None


class Admission:
    """Counts of what is open and waiting, and the bounds on them."""

    def __init__(self, supervisor: Supervisor, metrics: Metrics, bounds: Bounds) -> None:
        self.supervisor = supervisor
        self.metrics = metrics
        self.bounds = bounds
        self.draining = False
        self.num_reserved = 0
        """Requests that have been let in and have no sequences yet."""
        self.waiting: dict[int, Choice] = {}
        """Submitted sequences that no engine has started, by id."""
        self.waiting_tokens = 0
        """Prompt tokens of the waiting sequences."""
        self.run_seconds: deque[float] = deque(maxlen=RATE_WINDOW)
        """Running times of the requests that finished last."""
        self._numerical_errors: deque[float] = deque(maxlen=NUMERICAL_ERRORS)

    @property
    def accepting(self) -> bool:
        """Whether a request would be computed now."""
        errors = self._numerical_errors
        sick = len(errors) == NUMERICAL_ERRORS and time.monotonic() - errors[0] < SICK_SECONDS
        return self.supervisor.state is State.READY and not self.draining and not sick

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self.supervisor.open)

    def reserve(self, caller: str) -> Reservation:
        """A reservation for a request whose sequences are not known yet. Raises Unavailable or Overloaded."""
        self.check()
        return Reservation(self, caller)

    def check(self, num_sequences: int = 1, num_tokens: int = 1) -> None:
        """Raises Unavailable or Overloaded where this much more cannot be taken now."""
        try:
            self._check(num_sequences, num_tokens)
        except RequestError:
            self.metrics.requests.labels("refused").inc()
            raise

    def _check(self, num_sequences: int, num_tokens: int) -> None:
        if self.draining or self.supervisor.state not in LIVE:
            raise Unavailable("the server is shutting down", retry_after=RETRY_SECONDS, code="server_shutting_down")
        if self.supervisor.recovery_overdue:
            raise Unavailable("the engine is not back yet; try again later", retry_after=RETRY_SECONDS, code="engine_unavailable")
        most, most_tokens, num_open = self.bounds.max_open, self.bounds.max_waiting_tokens, self.num_open + self.num_reserved
        if num_open + num_sequences > most:
            raise Overloaded(
                f"{num_open} requests are open and {most} is the most; try again later", self._retry_after(), code="too_many_requests"
            )
        # A single request may be of any length: its tokens count only where others already wait.
        if self.waiting_tokens and self.waiting_tokens + num_tokens > most_tokens:
            text = f"{self.waiting_tokens} prompt tokens wait and {most_tokens} is the most; try again later"
            raise Overloaded(text, self._retry_after(), code="too_many_waiting_tokens")
        seconds = self._queue_seconds
        if seconds > self.bounds.max_queue_wait:
            text = f"a request would wait for about {seconds:.0f} s and {self.bounds.max_queue_wait:g} s is the most; try again later"
            raise Overloaded(text, self._retry_after(), code="queue_too_long")

    @property
    def _queue_seconds(self) -> float:
        """Estimated queue wait in seconds: the requests ahead, max_running at a time, each for the mean of the last running times."""
        if not self.run_seconds:
            return 0.0
        num_ahead = max(0, self.num_open - self.bounds.max_running)
        return sum(self.run_seconds) / len(self.run_seconds) / self.bounds.max_running * num_ahead

    def _retry_after(self) -> int:
        """The estimated queue wait and up to a quarter more, so that refused clients do not all come back at once."""
        return max(1, min(60, round(self._queue_seconds * random.uniform(1.0, 1.25))))

    def add_waiting(self, choice: Choice) -> None:
        """Counts a sequence that has been submitted."""
        self.waiting[choice.id] = choice
        self.waiting_tokens += len(choice.request.prompt)

    def remove_waiting(self, id: int) -> Choice | None:
        """Stops counting a sequence that was started or has ended; None where it was not waiting."""
        choice = self.waiting.pop(id, None)
        if choice is not None:
            self.waiting_tokens -= len(choice.request.prompt)
        return choice

    def record_numerical_error(self) -> None:
        """Counts a request that failed because of non-finite logits: after several in a short time the server is not ready."""
        self._numerical_errors.append(time.monotonic())
