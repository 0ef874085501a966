"""Admission: accepts or refuses a request by the number of open requests, waiting tokens and the
estimated queue wait; decides readiness.

Invariant: no request is counted twice: its Reservation counts it until its sequences are submitted,
the supervisor from then on. While its body is still arriving it is not counted
(Reservation.release). It knows nothing of HTTP, text or sampling.
"""

import random
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

from server.config import ServerSection
from server.errors import Conflict, InvalidRequest, Overloaded, RequestError, Unavailable
from server.generation.clients import EVERYBODY, Terms, Usage
from server.generation.request import Choice
from server.metrics import Metrics
from server.supervision.journal import Restored
from server.supervision.supervisor import LIVE, State, Supervisor

RETRY_SECONDS = 5
"""Value of Retry-After while the server is shutting down or its engine is being replaced."""
MAX_WAITING_TOKENS = 1_000_000
"""Prompt tokens that may wait, of all requests."""
MAX_QUEUE_SECONDS = 600.0
"""The longest estimated queue wait of a request that is accepted."""
HELD_PER_FREE = 7
"""Places that one client may hold for each that is free: alone it may hold 7 of 8."""
MOST_NAMED = 1000
"""As many keys may have a name; counts of clients without one are dropped once there are more than
that."""
MAX_NUMERICAL_ERRORS, NUMERICAL_ERROR_SECONDS = 10, 60.0
"""The server is not ready once this many requests have failed by non-finite logits within this
time."""


class Reservation:
    """An admitted request of one caller, from before its body is read until its answer has ended.
    It counts as an open request until its sequences are submitted or it is released.

    `caller` decides which requests may share cached prefixes: the digest of an API key, or a
    constant where there are no keys. `client` is who shares the server with others: a key, or an
    address where there are no keys.
    """

    def __init__(
        self, admission: "Admission", caller: str, client: str, usage: Usage, key: bytes | None
    ) -> None:
        self.caller = caller
        self.client = client
        self.terms = usage.terms
        self.usage = usage
        self.choices: list[Choice] = []
        """Sequences submitted for the request."""
        self.reply_id, self.created = uuid.uuid4().hex, int(time.time())
        """The id and the time of a reply in OpenAI's dialect."""
        self.restored = Restored()
        """Where an earlier server had the request: what it generated."""
        self.is_admitted = False
        """Whether sequences of it were submitted: those that follow need only an engine."""
        self._admission = admission
        self._is_counted = True
        self.key = key
        admission.num_reserved += 1
        usage.num_reserved += 1
        if key is not None:
            admission.keys_in_use.add((caller, key))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it the request counts as one open sequence, besides those it has."""
        self._admission.num_held += 1
        self.usage.num_reserved += 1
        try:
            yield
        finally:
            self._admission.num_held -= 1
            self.usage.num_reserved -= 1

    def release(self) -> None:
        """Stops counting the request as open until its sequences are submitted. Idempotent."""
        if self._is_counted:
            self._admission.num_reserved -= 1
            self.usage.num_reserved -= 1
            self._is_counted = False

    def close(self) -> None:
        """Ends the request: releases it, and its Idempotency-Key. Idempotent."""
        self.release()
        if self.key is not None:
            self._admission.keys_in_use.discard((self.caller, self.key))
            self.key = None


class Admission:
    """Counts open and waiting requests and applies the bounds on them."""

    def __init__(
        self, supervisor: Supervisor, metrics: Metrics, section: ServerSection, max_running: int
    ) -> None:
        self.supervisor = supervisor
        self.metrics = metrics
        self.max_waiting_tokens = MAX_WAITING_TOKENS
        self.max_queue_seconds = MAX_QUEUE_SECONDS
        self.max_running = max_running
        self.max_open = max_running + section.max_waiting
        self.draining = False
        self.num_reserved = 0
        """Admitted requests without submitted sequences."""
        self.num_held = 0
        """Requests whose sequences are submitted one after another."""
        self.keys_in_use: set[tuple[str, bytes]] = set()
        """(caller, Idempotency-Key) of the requests in progress."""
        self.waiting: dict[int, Choice] = {}
        """Submitted sequences that the engine has not started, by id."""
        self._usages: dict[int, Usage] = {}
        """The clients of all submitted sequences, by id."""
        self.clients: dict[str, Usage] = {}
        metrics.by_client.clients = self.clients
        self._numerical_errors: deque[float] = deque(maxlen=MAX_NUMERICAL_ERRORS)

    @property
    def accepting(self) -> bool:
        """Whether the server is ready: the engine runs, there is no drain, and logits have been
        finite.
        """
        errors = self._numerical_errors
        failing = (
            len(errors) == MAX_NUMERICAL_ERRORS
            and time.monotonic() - errors[0] < NUMERICAL_ERROR_SECONDS
        )
        return self.supervisor.state is State.READY and not self.draining and not failing

    @property
    def num_open(self) -> int:
        """Sequences that have not ended, and requests that are held."""
        return len(self.supervisor.open) + self.num_held

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the waiting sequences."""
        return sum(usage.waiting_tokens for usage in self.clients.values())

    def reserve(
        self,
        caller: str,
        client: str = "",
        terms: Terms = EVERYBODY,
        key: bytes | None = None,
        is_new: bool = True,
    ) -> Reservation:
        """Admits a request before its body is read. Raises Unavailable or Overloaded; Conflict
        while another request in progress has its Idempotency-Key. One that is not new was counted
        against the client's rates before.
        """
        if key is not None and (caller, key) in self.keys_in_use:
            raise Conflict(
                "a request with this Idempotency-Key is being answered already",
                code="idempotency_conflict",
            )
        usage = self._usage(client, terms)
        with self.counting_refusals():
            self._check(usage, 1, 1)
            self._check_rates(usage, is_new)
        return Reservation(self, caller, client, usage, key)

    def charge(self, client: str, terms: Terms, num_tokens: int) -> None:
        """Counts a request that starts no sequence, and so many tokens, against a client's rates.
        Raises Overloaded.
        """
        usage = self._usage(client, terms)
        with self.counting_refusals():
            self._check_rates(usage, is_new=True)
        usage.tokens.level -= num_tokens

    def _usage(self, client: str, terms: Terms) -> Usage:
        usage = self.clients.get(client)
        if usage is None:
            if len(self.clients) > 2 * (self.num_open + self.num_reserved) + MOST_NAMED:
                # Those that have anything open, or counts that outlast their requests.
                self.clients = {
                    name: other
                    for name, other in self.clients.items()
                    if other.num_open or other.terms.name
                }
                self.metrics.by_client.clients = self.clients
            usage = self.clients[client] = Usage(terms)
        usage.terms = terms
        return usage

    def check(self, usage: Usage, num_sequences: int, num_tokens: int) -> None:
        """Raises Unavailable or Overloaded if so many more sequences and prompt tokens of a client
        are over a bound now; InvalidRequest if they always are.
        """
        most = self._most_open(usage, self.max_open // (HELD_PER_FREE + 1))
        with self.counting_refusals():
            if num_sequences > most:
                raise InvalidRequest(
                    f"{num_sequences} sequences are requested at once; at most {most} are allowed",
                    param="n",
                )
            self._check(usage, num_sequences, num_tokens)
            # Others may have been submitted since it was reserved.
            self._check_rates(usage, is_new=False)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a RequestError that is raised within it as a refused request."""
        try:
            yield
        except RequestError:
            self.metrics.requests.labels("refused").inc()
            raise

    def _most_open(self, usage: Usage, num_free: int) -> int:
        """The most sequences that a client may have open where so many places are left free for
        others: one client cannot hold them all, and those of many leave some for the next.
        """
        most = min(self.max_open, max(self.max_running + 1, HELD_PER_FREE * num_free))
        if usage.terms.max_waiting is None:
            return most
        return min(most, usage.terms.max_waiting + (usage.terms.max_running or self.max_running))

    def _check(self, usage: Usage, num_sequences: int, num_tokens: int) -> None:
        self.check_engine(self.draining)
        num_open = self.num_open + self.num_reserved
        if num_open + num_sequences > self.max_open:
            raise self._overloaded(
                usage,
                f"{num_open} sequences (choices of requests) are open, and at most "
                f"{self.max_open} are allowed",
                code="too_many_requests",
            )
        most = self._most_open(usage, self.max_open - num_open - num_sequences)
        if usage.num_open + num_sequences > most:
            raise self._overloaded(
                usage,
                f"{usage.num_open} sequences of this client are open, and at most {most} are "
                "allowed now",
                code="too_many_requests",
            )
        # The bounds on waiting tokens apply only while other requests wait: a single request may be
        # of any length.
        waiting, own = self.waiting_tokens, usage.waiting_tokens
        left = self.max_waiting_tokens - waiting - num_tokens
        if (waiting and left < 0) or (own and own + num_tokens > HELD_PER_FREE * left):
            raise self._overloaded(
                usage,
                f"{waiting} prompt tokens are waiting, {own} of this client; "
                f"at most {self.max_waiting_tokens} are allowed, fewer of one client",
                code="too_many_waiting_tokens",
            )
        if (seconds := self._queue_seconds(usage)) > self.max_queue_seconds:
            raise self._overloaded(
                usage,
                f"the estimated queue wait is {seconds:.0f} s, and at most "
                f"{self.max_queue_seconds:g} s are allowed",
                code="queue_too_long",
            )

    def check_engine(self, draining: bool = False) -> None:
        """Raises Unavailable where no engine will compute what is submitted now."""
        if draining or self.supervisor.state not in LIVE:
            raise Unavailable(
                "the server is shutting down",
                retry_after=RETRY_SECONDS,
                code="server_shutting_down",
            )
        if self.supervisor.recovery_overdue:
            raise Unavailable(
                self.supervisor.absence, retry_after=RETRY_SECONDS, code="engine_unavailable"
            )

    def _check_rates(self, usage: Usage, is_new: bool) -> None:
        """Raises Overloaded where a rate is used up; counts a request that is new."""
        terms, now = usage.terms, time.monotonic()
        of_requests = usage.requests.seconds(terms.requests_per_minute if is_new else None, now)
        of_tokens = usage.tokens.seconds(terms.tokens_per_minute, now)
        if (seconds := ceil(max(of_requests, of_tokens))) > 0:
            what = (
                f"{terms.requests_per_minute} requests"
                if of_requests > of_tokens
                else f"{terms.tokens_per_minute} tokens"
            )
            text = f"this key may use {what} a minute; try again in {seconds} s"
            raise Overloaded(text, seconds, code="rate_limit_exceeded")
        usage.requests.level -= is_new

    def _overloaded(self, usage: Usage, text: str, code: str) -> Overloaded:
        """Its Retry-After is the client's estimated queue wait and a random part of up to 25 %, so
        that clients do not retry together.
        """
        seconds = self._queue_seconds(usage) * random.uniform(1.0, 1.25)
        return Overloaded(f"{text}; try again later", max(1, min(60, round(seconds))), code=code)

    def _queue_seconds(self, usage: Usage) -> float:
        """Estimated queue wait in seconds of a client: its requests ahead / its share of
        max_running * mean of its last running times.
        """
        if not usage.run_seconds:
            return 0.0
        weights = sum(
            other.terms.weight
            for other in self.clients.values()
            if other.num_open or other is usage
        )
        share = min(
            self.max_running * usage.terms.weight / weights,
            usage.terms.max_running or self.max_running,
        )
        return (
            sum(usage.run_seconds) / len(usage.run_seconds) / share * max(0, usage.num_open - share)
        )

    def add(self, sequence: Choice, usage: Usage) -> None:
        """Adds a submitted sequence of a client to the open and the waiting ones."""
        self.waiting[sequence.id], self._usages[sequence.id] = sequence, usage
        num_prompt = sequence.num_prompt
        usage.num_submitted += 1
        usage.num_waiting += 1
        usage.waiting_tokens += num_prompt
        usage.num_tokens += num_prompt
        usage.tokens.level -= num_prompt + sequence.max_new_tokens

    def remove_waiting(self, id: int) -> Choice | None:
        """Removes a sequence that was started or has ended from the waiting ones. Returns None if
        it was not waiting.
        """
        sequence = self.waiting.pop(id, None)
        if sequence is not None:
            usage = self._usages[id]
            usage.num_waiting -= 1
            usage.waiting_tokens -= sequence.num_prompt
        return sequence

    def remove(self, sequence: Choice) -> Usage:
        """Removes a sequence that has ended, and returns its client; tokens that it did not
        generate do not count against its rate.
        """
        self.remove_waiting(sequence.id)
        usage = self._usages.pop(sequence.id)
        usage.num_submitted -= 1
        usage.num_tokens += sequence.num_tokens
        usage.tokens.level += sequence.max_new_tokens - sequence.num_tokens
        return usage

    def record_numerical_error(self) -> None:
        """Records a request that failed by non-finite logits, which `accepting` counts."""
        self._numerical_errors.append(time.monotonic())
