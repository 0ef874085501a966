"""CrashPolicy: counts engine crashes, attributes them to requests, and decides when to stop
restarting the engine.

A sequence that was running in SUSPECT_CRASHES crashes becomes a suspect, and the supervisor runs it
alone; after CRASHES_ALONE crashes alone it is quarantined. A crash while nothing was running may
have been caused by accepting a submission, so all that were sent are blamed. An engine that ends
before it is ready is a failed load, which no request can have caused.
Invariant: a newly generated token resets the counts of crashes, a ready engine that of failed
loads. It does no I/O and reads no clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from server.supervision.journal import OpenSequence

MAX_UNATTRIBUTED_CRASHES = 3
"""Consecutive crashes of engines that were sent no request, after which the engine is not
restarted."""
MIN_LOADS = 3
"""Consecutive failed loads before which the engine is never given up."""
MAX_CRASHES = 12
"""Consecutive crashes of any kind, without a new token, after which the engine is not restarted."""
MAX_QUARANTINES = 3
"""Consecutive quarantines, without a new token, after which the requests cannot be the cause and
the engine is not restarted."""
SUSPECT_CRASHES = 2
"""Crashes while a sequence was running, since its last token, that make it a suspect."""
CRASHES_ALONE = 2
"""Crashes while a sequence was the only one in the engine, since its last token, after which it is
quarantined."""
BACKOFF_SECONDS = 0.5
"""Seconds to wait before the restart after the second engine in a row that was sent no request, and
after a failed load; doubled with each further failed load in a row. Other restarts are immediate.
"""
MAX_BACKOFF_SECONDS = 8.0
MIN_RECOVERY, LOADS = 60.0, 2.0
"""Seconds for which open sequences wait for an engine at least, and loads: a later one reads files
that are cached, but may fail once."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits on the engine, in seconds."""

    stall: float
    """An engine that makes no progress for this long is killed."""
    start: float
    """An engine that is not loaded after this long is killed."""
    recovery: float | None
    """Open sequences fail once no engine has been ready for this long; None for MIN_RECOVERY, or
    LOADS times the first load if that is longer.
    """

    def recovery_after(self, first_load: float) -> float:
        """The time that open sequences wait for an engine where the first one took `first_load`
        seconds to load.
        """
        return max(MIN_RECOVERY, LOADS * first_load) if self.recovery is None else self.recovery


class CrashPolicy:
    """Counts of crashes since the last new token; `num_quarantined` counts from the start of the
    server.
    """

    def __init__(self) -> None:
        self.reset()
        self.num_quarantined = 0
        self.failed_loads = 0
        """Engines in a row that ended before they were ready, or could not be spawned."""

    def reset(self) -> None:
        """Called when the engine makes progress."""
        self._unattributed = self._total = self._quarantines = 0

    @property
    def backoff(self) -> float:
        """Seconds to wait before the next restart."""
        if self.failed_loads:
            return min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** (self.failed_loads - 1))
        return BACKOFF_SECONDS if self._unattributed > 1 else 0.0

    @property
    def give_up_reason(self) -> str:
        """Why the engine is not to be restarted; empty if it is."""
        if self._unattributed >= MAX_UNATTRIBUTED_CRASHES or self._total >= MAX_CRASHES:
            return f"the engine crashed {self._total} times in a row without generating a token"
        if self._quarantines >= MAX_QUARANTINES:
            return f"each of the last {self._quarantines} requests that the engine ran crashed it"
        return ""

    def record_crash(
        self, sequences: Iterable[OpenSequence], any_sent: bool
    ) -> OpenSequence | None:
        """Counts a crash, blames the sequences that were running, or all that were sent if none
        was, and returns the sequence to quarantine, if any. `any_sent`: the engine was sent a
        submission, which may have been cancelled since.
        """
        sent = [sequence for sequence in sequences if sequence.sent]
        blamed = [sequence for sequence in sent if sequence.started] or sent
        self._total += 1
        self._unattributed += not any_sent
        for sequence in blamed:
            sequence.crashes += 1
        if not blamed or len(sent) != 1:
            return None
        (alone,) = sent
        alone.crashes_alone += 1
        if alone.crashes_alone < CRASHES_ALONE:
            return None
        self._quarantines += 1
        self.num_quarantined += 1
        return alone
