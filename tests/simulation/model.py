"""The simulation's model: what it computes can only be right if every page that it reads is.

A position's state is a hash of its token and of the state before it, as its page holds that one; the next token is a hash of the last
state. Every row's pages are compared with what the sequence's tokens say they must hold, and a page that may hold NaN must have been
cleared before anyone has it. hash_model.HashModel does the same more thoroughly and slower; the simulation uses it on some seeds.
It knows no engine, message or time.
"""

from collections.abc import Callable, Sequence
from typing import Any

from model.step import Row, SampledToken, StepPlan, StepResult
from tests.support.hash_model import result

MASK = 2**64 - 1
START = 0x243F6A8885A308D3
DRIFT = 7919
"""Added to a seed: a second answer, as right as the first, where sums are taken in another order."""


def mix(state: int, token: int) -> int:
    """The state of a position, from the one before it and its token."""
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
    """A token in 1 .. 63 behind this state, or the end token 0."""
    value = mix(state, seed)
    if may_end and value & 255 < 256 * end_rate:
        return 0
    return 1 + (value >> 20) % 63


def next_token(tokens: Sequence[int], seed: int, end_rate: float, may_end: bool) -> int:
    """As hash_model.next_token, by this model."""
    return draw(chain(tokens)[-1], seed, end_rate, may_end)


class PagedHash:
    """A Runner over plans of a layout without windows. `prompt_states` gives the states of a sequence's prompt, from its id: from outside,
    so that a prompt which changes on its way is noticed too.
    """

    def __init__(self, page_size: int, end_rate: float, prompt_states: Callable[[int], list[int]]) -> None:
        self.page_size = page_size
        self.end_rate = end_rate
        self.drift = 0
        self._prompt_states = prompt_states
        self._pages: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        rows = plan.rows
        for row in rows:
            self._write(row)
        scored = {i: score(row) for i, row in enumerate(rows) if row.scoring is not None}
        return result(plan, [self._draw(row) for row in rows], scored)

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
        """The draw at each of the row's places."""
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
            raise AssertionError(f"sequence {row.sequence} draws behind {first} of its {len(known)} tokens")
        if row.drafts and found[first:] != chain(row.tokens[len(row.tokens) - row.drafts :], found[first - 1]):
            raise AssertionError(f"a page of sequence {row.sequence} does not hold its drafts")
        seed = sample.sampling.seed + self.drift
        return [SampledToken(draw(state, seed, self.end_rate, not sample.forbidden), -1.0) for state in found[first - 1 :]]


def score(row: Row) -> list[SampledToken]:
    """Log-probability -(position of the token), as hash_model's."""
    assert row.scoring is not None
    first = row.start + row.scoring.first + 1
    return [SampledToken(target, -float(first + offset)) for offset, target in enumerate(row.scoring.targets)]


class Poisoned:
    """Pages in which a failed row may have left NaN: nobody may have one that was not cleared since, but who spoilt it."""

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        """Page -> the sequence whose row it was."""

    def check(self, plan: StepPlan) -> list[int]:
        """Which rows go on behind their own NaN, as one does that was in flight when the one before it failed."""
        for page in plan.clear:
            self.pages.pop(page, None)
        if not self.pages:
            return []
        spoilt = [{self.pages[page] for group in row.pages for page in group if page in self.pages} for row in plan.rows]
        for row, culprits in zip(plan.rows, spoilt, strict=True):
            if not culprits <= {row.sequence}:
                raise AssertionError(f"sequence {row.sequence} has a page that may hold NaN")
        return [index for index, culprits in enumerate(spoilt) if culprits]

    def spoil(self, row: Row, layout: Any) -> None:
        """What this row wrote is NaN."""
        for group, pages in zip(layout.groups, row.pages, strict=True):
            first = row.start // layout.page_size * group.num_stacks
            self.pages.update((page, row.sequence) for page in pages[first:] if page >= 0)
