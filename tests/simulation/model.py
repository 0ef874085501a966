"""The model of the simulation: its results are right only if every page that it reads is.

The state at a position is a hash of its token and of the previous state as stored in its page; the
next token is a hash of the last state. The pages of every row are compared with the states that the
sequence's tokens require, and a page that may hold NaN must have been cleared before another
sequence gets it. hash_model.HashModel checks more and is slower; some seeds use it. This module
knows nothing of engines, messages or time.
"""

from collections.abc import Callable, Sequence
from typing import Any

from model.step import Row, SampledToken, StepPlan, StepResult
from tests.support.hash_model import result

MASK = 2**64 - 1
START = 0x243F6A8885A308D3
DRIFT = 7919
"""Added to a seed for a second answer, as valid as the first: rounding may differ where sums are
taken in another order."""


def mix(state: int, token: int) -> int:
    """The state of a position, from the previous state and its token."""
    state = (state + token + 1) * 0x9E3779B97F4A7C15 & MASK
    return state ^ state >> 31


def chain(tokens: Sequence[int], state: int = START) -> list[int]:
    """The state of each position."""
    states = []
    for token in tokens:
        state = (state + token + 1) * 0x9E3779B97F4A7C15 & MASK
        state ^= state >> 31
        states.append(state)
    return states


def draw(state: int, seed: int, end_rate: float, may_end: bool) -> int:
    """The token that follows this state: 1 .. 63, or the end token 0."""
    value = mix(state, seed)
    if may_end and value & 255 < 256 * end_rate:
        return 0
    return 1 + (value >> 20) % 63


def next_token(tokens: Sequence[int], seed: int, end_rate: float, may_end: bool) -> int:
    """hash_model.next_token for this model."""
    return draw(chain(tokens)[-1], seed, end_rate, may_end)


class PagedHash:
    """A Runner over plans of a layout without windows. `prompt_states` gives the states of a
    sequence's prompt by its id, from outside the engine, so that a prompt that changes on its way
    is noticed.
    """

    def __init__(
        self,
        page_size: int,
        end_rate: float,
        prompt_states: Callable[[int], list[int]],
        pages: dict[int, list[int]],
    ) -> None:
        self.page_size = page_size
        self.end_rate = end_rate
        self.drift = 0
        self._prompt_states = prompt_states
        self._pages = pages

    def run(self, plan: StepPlan) -> StepResult:
        rows = plan.rows
        for row in rows:
            self._write(row)
        scored = {i: score(row) for i, row in enumerate(rows) if row.scoring is not None}
        return result(plan, [self._draw(row) for row in rows], scored)

    def clear(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._pages.pop(page, None)

    def _write(self, row: Row) -> None:
        size, pages, numbers = self.page_size, self._pages, row.pages[0]
        position = row.start
        state = pages[numbers[(position - 1) // size]][(position - 1) % size] if position else START
        for token in row.tokens:
            page = numbers[position // size]
            if page not in pages:
                pages[page] = [0] * size
            state = (state + token + 1) * 0x9E3779B97F4A7C15 & MASK
            state ^= state >> 31
            pages[page][position % size] = state
            position += 1

    def _draw(self, row: Row) -> list[SampledToken]:
        """The token sampled at each position of the row."""
        pages, end, sample = self._pages, row.start + len(row.tokens), row.sample
        found: list[int] = []
        for page in row.pages[0][: -(-end // self.page_size)]:
            found += pages[page]
        del found[end:]
        known = self._prompt_states(row.sequence)
        if sample is not None and sample.output:
            known = known + chain(sample.output, known[-1])
        if found[: len(known)] != known[:end]:
            raise AssertionError(f"a page of sequence {row.sequence} does not hold what it should")
        if sample is None:
            return []
        first = end - row.drafts
        if len(known) != first:
            raise AssertionError(
                f"sequence {row.sequence} draws after {first} of its {len(known)} tokens"
            )
        if row.drafts and found[first:] != chain(
            row.tokens[len(row.tokens) - row.drafts :], found[first - 1]
        ):
            raise AssertionError(f"a page of sequence {row.sequence} does not hold its drafts")
        seed = sample.sampling.seed + self.drift
        return [
            SampledToken(draw(state, seed, self.end_rate, not sample.forbidden), -1.0)
            for state in found[first - 1 :]
        ]


def score(row: Row) -> list[SampledToken]:
    """The log-probability -(position of the token), as in hash_model."""
    assert row.scoring is not None
    first = row.start + row.scoring.first + 1
    return [
        SampledToken(target, -float(first + offset))
        for offset, target in enumerate(row.scoring.targets)
    ]


class Poisoned:
    """Pages in which a failed row may have left NaN; only the sequence of that row may use one
    before it is cleared.
    """

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        """Page -> the sequence of its row."""

    def check(self, plan: StepPlan) -> list[int]:
        """The rows that continue after their own NaN, as one that was in flight when the previous
        one failed.
        """
        for page in plan.clear:
            self.pages.pop(page, None)
        if not self.pages:
            return []
        spoilt = [
            {self.pages[page] for group in row.pages for page in group if page in self.pages}
            for row in plan.rows
        ]
        for row, culprits in zip(plan.rows, spoilt, strict=True):
            if not culprits <= {row.sequence}:
                raise AssertionError(f"sequence {row.sequence} has a page that may hold NaN")
        return [index for index, culprits in enumerate(spoilt) if culprits]

    def spoil(self, row: Row, layout: Any) -> None:
        """Marks what this row wrote as NaN."""
        for group, pages in zip(layout.groups, row.pages, strict=True):
            first = row.start // layout.page_size * group.num_stacks
            self.pages.update((page, row.sequence) for page in pages[first:] if page >= 0)
