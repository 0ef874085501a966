"""EngineClient: the engine as requests and routes use it, over the supervisor.

Invariant: a sequence that was opened is counted in admission and metrics until `end` is called for
it, once. Tokens are timed as they arrive, not as clients read them. It knows nothing of HTTP and
text.
"""

import logging
import time
from collections.abc import Callable, Sequence

from server import protocol
from server.config import ServerSection
from server.errors import ConfigurationError, EngineGaveUp, ResourceError
from server.generation.admission import Admission, Reservation
from server.generation.arrivals import Arrivals
from server.generation.monitor import Monitor
from server.generation.request import Choice, prompt_tokens
from server.metrics import Metrics
from server.supervision.engine import EngineEvent
from server.supervision.journal import SequenceEvent
from server.supervision.supervisor import State, Supervisor

log = logging.getLogger("onehead.api")

MAX_IGNORED_NAMES = 64
"""Ignored fields that are counted and logged by name."""
FINISHED = frozenset({"length", "eos_token", "stop_sequence"})
"""Outcomes of sequences that were generated to their end."""


class EngineClient:
    """Admits requests, submits their sequences, and counts and times what comes of them."""

    def __init__(
        self, supervisor: Supervisor, metrics: Metrics, section: ServerSection, max_running: int
    ) -> None:
        self.supervisor = supervisor
        self.metrics = metrics
        self.admission = Admission(supervisor, metrics, section, max_running)
        self.reserve = self.admission.reserve
        self.arrivals = Arrivals()
        self.monitor = Monitor(supervisor, metrics, self.arrivals, lambda: self.status)
        self._ignored: set[str] = set()
        """Names of ignored fields that have been logged."""

    @property
    def ready(self) -> protocol.Ready | None:
        """Facts that the engine reported when it had loaded; None before that."""
        return self.supervisor.ready

    @property
    def status(self) -> str:
        """The state of the server in words."""
        if self.admission.draining:
            return "draining"
        # Too many requests have failed by non-finite logits if it does not accept requests.
        if self.supervisor.state is State.READY:
            return "ready" if self.admission.accepting else "numerical errors"
        return self.supervisor.status

    @property
    def healthy(self) -> bool:
        """Whether the server is ready, or a new engine replaces another and requests wait for
        it.
        """
        supervisor = self.supervisor
        is_replacing = (
            supervisor.state is State.STARTING
            and supervisor.ready is not None
            and not supervisor.recovery_overdue
        )
        return self.admission.accepting or (is_replacing and not self.admission.draining)

    def submit(
        self,
        reservation: Reservation,
        choices: Sequence[Choice],
        submits: Sequence[protocol.Submit],
        deliver: Callable[[Choice, SequenceEvent], None],
    ) -> None:
        """Submits the sequences of a request, all or none, and sets their ids. `deliver` gets each
        event, those of an earlier server first. Raises InvalidRequest, Overloaded or Unavailable.
        """
        reservation.release()  # From here on the supervisor counts the submitted sequences.
        if reservation.is_admitted:
            self.admission.check_engine()
        else:
            self.admission.check(
                reservation.usage, len(submits), sum(choice.num_prompt for choice in choices)
            )
            reservation.is_admitted = True
        self.metrics.prompt_tokens.inc(prompt_tokens(choices))
        known: list[list[protocol.Token]] = [[] for _ in choices]
        for index, token in reservation.restored.tokens:
            known[index].append(token)
            choices[index].first = choices[index].last = time.monotonic()
            choices[index].num_tokens += 1
            deliver(choices[index], token)
        for choice, submit, tokens in zip(choices, submits, known, strict=True):
            choice.id = self.supervisor.submit(submit, self._receiver(choice, deliver), tokens)
            self.admission.add(choice, reservation.usage)
        reservation.choices += choices

    def _receiver(
        self, choice: Choice, deliver: Callable[[Choice, SequenceEvent], None]
    ) -> Callable[[SequenceEvent], None]:
        first_token = self.metrics.time_to_first_token.observe
        inter_token = self.metrics.inter_token_latency.observe

        def receive(event: SequenceEvent) -> None:
            now = time.monotonic()
            if isinstance(event, protocol.Token):
                if choice.num_tokens == 0:
                    choice.first = now
                    first_token(now - choice.arrival)
                else:
                    inter_token(now - choice.last)
                choice.last = now
                choice.num_tokens += 1
            elif isinstance(event, protocol.Failed) and event.code == "numerical_error":
                self.admission.record_numerical_error()
            deliver(choice, event)

        return receive

    def end(self, choice: Choice, outcome: str) -> None:
        """Ends a sequence: cancels it if it is still generated, and counts its outcome. Called once
        for each.
        """
        self.supervisor.cancel(choice.id)
        usage = self.admission.remove(choice)
        if outcome in FINISHED:
            self.metrics.e2e_latency.observe(choice.last - choice.arrival)
            usage.run_seconds.append(choice.last - (choice.started or choice.arrival))
        self.metrics.requests.labels(outcome).inc()

    def count_ignored(self, names: Sequence[str]) -> None:
        """Counts unknown fields of a request that were ignored, and logs each name once."""
        for name in names:
            if name not in self._ignored and len(self._ignored) < MAX_IGNORED_NAMES:
                self._ignored.add(name)
                log.info("the field %s is unknown and ignored, in this request and others", name)
            self.metrics.ignored_fields.labels(name if name in self._ignored else "other").inc()

    def on_engine_event(self, event: EngineEvent) -> None:
        """Updates metrics and queue times by an event of the engine."""
        if isinstance(event, protocol.Heartbeat):
            self.metrics.device_memory_used.set(event.memory_used)
            return
        if isinstance(event, protocol.Tokens):
            self.metrics.step(event.gauges, len(event.tokens))
            return
        if isinstance(event, protocol.CacheView):
            self.monitor.on_view(event)
            return
        now = time.monotonic()
        for id, num_cached in zip(event.ids, event.cached, strict=True):
            choice = self.admission.remove_waiting(id)
            if choice is not None:
                choice.started, choice.num_cached = now, num_cached
                self.metrics.queue_time.observe(now - choice.arrival)

    def raise_if_over(self) -> None:
        """Raises the error for which the engine will not be restarted, if there is one."""
        if self.supervisor.state is State.REFUSED:
            raise (ResourceError if self.supervisor.lacks_resource else ConfigurationError)(
                self.supervisor.reason
            )
        if self.supervisor.state is State.GAVE_UP:
            raise EngineGaveUp(self.supervisor.reason)
