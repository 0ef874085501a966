"""PendingStep: a launched step, whose result can be read when the device has computed it.

Invariant: `result` reads only what was copied to the host for this step. It decides nothing, and
knows no device.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

from torch import Tensor

from model.decode import lines_of
from model.devices.device import Event
from model.sampling import NOT_FINITE_STATES, Draws, Scores
from model.step import Outcome, Row, SampledToken, StepResult


class PendingStep:
    """One step. The runner that launches it sets `draws`, `scores` and `finite_T`, and `event`
    where the device may still be computing.
    """

    def __init__(self, rows: Sequence[Row], firsts: Sequence[int], num_decoding: int) -> None:
        self.rows, self.firsts, self.num_decoding = rows, firsts, num_decoding
        """Rows with the index of the first token of each; before them so many rows of one token
        that draw once."""
        # Nearly all rows draw once; calling `samples` for each would take as long as launching them
        # all.
        self.samples = [
            row.samples if row.drafts or row.sample is None else [row.sample] for row in rows
        ]
        self.draws: Draws | None = None
        """A draw for each sample of each row, in their order."""
        self.scores: list[tuple[list[int], Scores]] = []
        """Scores, with the index of the row of each."""
        self.finite_T: Tensor | None = None
        """Whether the states of each token are finite; None where draws tell it."""
        self.states: tuple[Tensor, dict[int, Tensor]] | None = None
        """The states that tokens are drawn from, and where to keep that of each row's last
        draw."""
        self.event: Event | None = None
        self._lines: list[int] | None = None
        """For each token of the rows its line, where tokens are lines of a DecodeStep (see
        `lines_of`)."""
        self._result: StepResult | None = None

    @classmethod
    def of_lines(cls, rows: Sequence[Row], num_decoding: int) -> "PendingStep":
        """A step that has a line for each token of these rows, after those of the rows that
        decode.
        """
        counts = (len(row.tokens) for row in rows)
        pending = cls(rows, [*accumulate(counts, initial=num_decoding)][:-1], num_decoding)
        pending._lines = lines_of(rows, num_decoding)
        return pending

    @property
    def done(self) -> bool:
        """Whether the step was computed before `launch` returned, so that `result` does not
        wait.
        """
        return self.event is None

    def result(self) -> StepResult:
        """Waits for the step. Further calls return the same."""
        if self._result is None:
            if self.event is not None:
                self.event.synchronize()
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        outcomes = [] if self.draws is None else self.draws.read()
        drawn, accepted = self._drawn(iter(outcomes))
        scored: dict[int, list[SampledToken]] = {}
        for indices, scores in self.scores:
            for index, score in zip(indices, scores.read(), strict=True):
                scored.setdefault(index, []).append(score)
        finite_T = [] if self.finite_T is None else self.finite_T.tolist()
        if self._lines is not None:
            finite_S = finite_T or [outcome is not NOT_FINITE_STATES for outcome in outcomes]
            finite_T = [*finite_S[: self.num_decoding], *(finite_S[line] for line in self._lines)]
        if not all(finite_T):
            spans = [(i, 1) for i in range(self.num_decoding)]
            spans += [
                (first, len(row.tokens)) for row, first in zip(self.rows, self.firsts, strict=True)
            ]
            for i, (first, count) in enumerate(spans):
                if not all(finite_T[first : first + count]):
                    drawn[i] = NOT_FINITE_STATES
                    accepted.pop(i, None)
        return StepResult(tuple(drawn), scored, accepted)

    def _drawn(
        self, draws: Iterator[Outcome]
    ) -> tuple[list[Outcome | None], dict[int, list[SampledToken]]]:
        """What every row draws, and its accepted drafts."""
        drawn: list[Outcome | None] = [*islice(draws, self.num_decoding)]
        accepted: dict[int, list[SampledToken]] = {}
        place = self.num_decoding
        for row, places in zip(self.rows, self.samples, strict=True):
            if not places:
                drawn.append(None)
                continue
            come_true: list[SampledToken] = []
            if len(places) == 1:
                last = next(draws)
            else:
                come_true, last = row.settle([next(draws) for _ in places])
            if come_true:
                accepted[len(drawn)] = come_true
            drawn.append(last)
            if self.states is not None:
                states_SD, kept = self.states
                kept[row.sequence] = states_SD[place + len(come_true)].clone()
            place += len(places)
        return drawn, accepted
