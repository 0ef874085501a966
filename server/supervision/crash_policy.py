"""Deaths of engines: counts them, says of whom they died, and when there is no hope.

A sequence that engines die of while they run it becomes a suspect, and the supervisor runs it alone; where they die of that one alone, it
is given up. Engines that die before they run anything may die of taking a sequence in: then these are sent one at a time. A new token
shows that there is progress, and what was counted before it is forgotten. It knows no engine and no clock.
"""

from collections.abc import Iterable

from server.supervision.journal import OpenSequence

MAX_UNATTRIBUTED_CRASHES = 3
"""In a row, without a new token, of engines that had nothing to blame: no request can be at fault."""
ONE_AT_A_TIME_CRASHES = 2
"""Of these, after which sequences are sent one at a time."""
MAX_CRASHES = 12
"""In a row, without a new token: whoever is to blame is not found."""
MAX_QUARANTINES = 3
"""In a row, without a new token: then it is not the requests."""
SUSPECT_CRASHES = 2
"""Deaths in which a sequence ran, since its last token, that make it a suspect."""
CRASHES_ALONE = 2
"""Deaths in which an engine had only this sequence, since its last token, that end it."""
BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 8.0


class CrashPolicy:
    """All since the last new token, but for `num_quarantined`."""

    def __init__(self) -> None:
        self._unattributed = self._total = self._quarantines = 0
        self.num_quarantined = 0

    @property
    def one_at_a_time(self) -> bool:
        """Whether the next engine should be sent one sequence at a time."""
        return self._unattributed >= ONE_AT_A_TIME_CRASHES

    @property
    def backoff(self) -> float:
        """Seconds to wait before the next engine."""
        return min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (self._unattributed - 2)) if self._unattributed >= 2 else 0.0

    @property
    def give_up_reason(self) -> str:
        """Why no further engine is worth it; empty where one is."""
        if self._unattributed >= MAX_UNATTRIBUTED_CRASHES or self._total >= MAX_CRASHES:
            return f"the engine died {self._total} times in a row without a new token"
        if self._quarantines >= MAX_QUARANTINES:
            return f"the engine died of each of the last {self._quarantines} requests that it ran"
        return ""

    def record_crash(self, sequences: Iterable[OpenSequence], one_by_one: bool, any_sent: bool) -> OpenSequence | None:
        """Notes a death with everyone who was being run, or was sent by itself (`one_by_one`); the sequence to give up, if it is that.
        `any_sent`: the engine was sent something, which may have been called off since.
        """
        sent = [sequence for sequence in sequences if sequence.sent]
        blamed = [sequence for sequence in sent if sequence.started or one_by_one]
        self._total += 1
        self._unattributed += not blamed and not (one_by_one and any_sent)
        for sequence in blamed:
            sequence.crashes += 1
        if not blamed or len(sent) != 1:
            return None
        (lone,) = sent
        lone.crashes_alone += 1
        if lone.crashes_alone < CRASHES_ALONE:
            return None
        self._quarantines += 1
        self.num_quarantined += 1
        return lone

    def record_failed_start(self) -> None:
        """An engine could not even be spawned."""
        self._total += 1
        self._unattributed += 1

    def reset(self) -> None:
        """There is progress."""
        self._unattributed = self._total = self._quarantines = 0
