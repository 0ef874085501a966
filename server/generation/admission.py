"""Admission: accepts or refuses a request by the number of open requests, waiting tokens and the estimated queue wait; decides readiness.

Invariant: no request is counted twice: its Reservation counts it until its sequences are submitted, the supervisor from then on. While
its body is still arriving it is not counted (Reservation.release). It knows nothing of HTTP, text or sampling.
"""

import random
import time
from collections import deque

from server.config import ServerSection
from server.errors import Overloaded, RequestError, Unavailable
from server.generation.request import Choice
from server.metrics import Metrics
from server.supervision.supervisor import LIVE, State, Supervisor

RETRY_SECONDS = 5
"""Value of Retry-After while the server is shutting down or its engine is being replaced."""
RATE_WINDOW = 64
"""Number of finished requests whose running times give the estimate of the queue wait."""
MAX_NUMERICAL_ERRORS, NUMERICAL_ERROR_SECONDS = 10, 60.0
"""The server is not ready once this many requests have failed by non-finite logits within this time."""


class Reservation:
    """An admitted request of one caller. It counts as an open request until its sequences are submitted or it is released.

    `caller` decides which requests may share cached prefixes: the digest of an API key, or a constant where there are no keys. `client`
    is who shares the server with others: a key, or an address where there are no keys.
    """

    def __init__(self, admission: "Admission", caller: str, client: str) -> None:
        self.caller = caller
        self.client = client
        self.choices: list[Choice] = []
        """Sequences submitted for the request."""
        self._admission: Admission | None = admission
        admission.num_reserved += 1

    def release(self) -> None:
        """Stops counting the request as open. Idempotent."""
        if self._admission is not None:
            self._admission.num_reserved -= 1
            self._admission = None


class Admission:
    """Counts open and waiting requests and applies the bounds on them."""

    def __init__(self, supervisor: Supervisor, metrics: Metrics, section: ServerSection, max_running: int) -> None:
        self.supervisor = supervisor
        self.metrics = metrics
        self.section = section
        self.max_running = max_running
        self.max_open = max_running + section.max_waiting
        self.draining = False
        self.num_reserved = 0
        """Admitted requests without submitted sequences."""
        self.waiting: dict[int, Choice] = {}
        """Submitted sequences that the engine has not started, by id."""
        self.waiting_tokens = 0
        """Prompt tokens of the waiting sequences."""
        self.run_seconds: deque[float] = deque(maxlen=RATE_WINDOW)
        """Running times, in seconds, of the most recently finished requests."""
        self._numerical_errors: deque[float] = deque(maxlen=MAX_NUMERICAL_ERRORS)

    @property
    def accepting(self) -> bool:
        """Whether the server is ready: the engine runs, there is no drain, and logits have been finite."""
        errors = self._numerical_errors
        failing = len(errors) == MAX_NUMERICAL_ERRORS and time.monotonic() - errors[0] < NUMERICAL_ERROR_SECONDS
        return self.supervisor.state is State.READY and not self.draining and not failing

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self.supervisor.open)

    def reserve(self, caller: str, client: str = "") -> Reservation:
        """Admits a request before its body is read. Raises Unavailable or Overloaded."""
        self.check()
        return Reservation(self, caller, client)

    def check(self, num_sequences: int = 1, num_tokens: int = 1) -> None:
        """Raises Unavailable or Overloaded if so many more sequences and prompt tokens are over a bound now."""
        try:
            self._check(num_sequences, num_tokens)
        except RequestError:
            self.metrics.requests.labels("refused").inc()
            raise

    def _check(self, num_sequences: int, num_tokens: int) -> None:
        if self.draining or self.supervisor.state not in LIVE:
            raise Unavailable("the server is shutting down", retry_after=RETRY_SECONDS, code="server_shutting_down")
        if self.supervisor.recovery_overdue:
            raise Unavailable(self.supervisor.absence, retry_after=RETRY_SECONDS, code="engine_unavailable")
        most_tokens, num_open = self.section.max_waiting_tokens, self.num_open + self.num_reserved
        if num_open + num_sequences > self.max_open:
            raise Overloaded(
                f"{num_open} sequences (choices of requests) are open, and at most {self.max_open} are allowed; try again later",
                self._retry_after(),
                code="too_many_requests",
            )
        # The bound on waiting tokens applies only while other requests wait: a single request may be of any length.
        if self.waiting_tokens and self.waiting_tokens + num_tokens > most_tokens:
            text = f"{self.waiting_tokens} prompt tokens are waiting, and at most {most_tokens} are allowed; try again later"
            raise Overloaded(text, self._retry_after(), code="too_many_waiting_tokens")
        seconds = self._queue_seconds
        if seconds > self.section.max_queue_wait:
            text = (
                f"the estimated queue wait is {seconds:.0f} s, and at most {self.section.max_queue_wait:g} s are allowed; try again later"
            )
            raise Overloaded(text, self._retry_after(), code="queue_too_long")

    @property
    def _queue_seconds(self) -> float:
        """Estimated queue wait in seconds: requests ahead / max_running * mean of the last running times."""
        if not self.run_seconds:
            return 0.0
        num_ahead = max(0, self.num_open - self.max_running)
        return sum(self.run_seconds) / len(self.run_seconds) / self.max_running * num_ahead

    def _retry_after(self) -> int:
        """Retry-After: the estimated queue wait plus a random part of up to 25 %, so that refused clients do not retry together."""
        return max(1, min(60, round(self._queue_seconds * random.uniform(1.0, 1.25))))

    def add_waiting(self, choice: Choice) -> None:
        """Adds a submitted sequence to the waiting ones."""
        self.waiting[choice.id] = choice
        self.waiting_tokens += len(choice.request.prompt)

    def remove_waiting(self, id: int) -> Choice | None:
        """Removes a sequence that was started or has ended from the waiting ones. Returns None if it was not waiting."""
        choice = self.waiting.pop(id, None)
        if choice is not None:
            self.waiting_tokens -= len(choice.request.prompt)
        return choice

    def record_numerical_error(self) -> None:
        """Records a request that failed by non-finite logits, which `accepting` counts."""
        self._numerical_errors.append(time.monotonic())
