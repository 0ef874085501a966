"""A model without weights that checks its own pages: the next token is a hash of the sequence so
far.

Every slot remembers which position of which sequence was written to it. A row that attends to
positions that its pages do not hold, or that another sequence has overwritten, raises an error.
"""

import hashlib
from collections.abc import Callable, Sequence
from itertools import product

from cache.layout import CacheLayout
from model.step import Row, SampledToken, StepPlan, StepResult
from tests.support.immediate import Immediate


def next_token(tokens: list[int], seed: int, end_rate: float, may_end: bool) -> int:
    """A token in 1 .. 63, or the end token 0 at `end_rate`: a pure function of everything before
    it.
    """
    digest = hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=8).digest()
    if may_end and digest[0] < 256 * end_rate:
        return 0
    return 1 + digest[1] % 63


Next = Callable[[list[int], int, float, bool], int]
"""As next_token."""


def oracle(
    prompt: list[int],
    max_new: int,
    min_new: int,
    stops: frozenset[int],
    seed: int,
    end_rate: float,
    give: Next = next_token,
) -> list[int]:
    """The output of a request served alone, which every schedule must produce."""
    output: list[int] = []
    while len(output) < max_new:
        output.append(
            give(prompt + output, seed, end_rate, len(output) >= min_new or 0 not in stops)
        )
        if output[-1] in stops:
            break
    return output


def one_group(page_size: int) -> CacheLayout:
    """The layout of a model without windows."""
    return CacheLayout.of(1, (), page_size)


class HashModel(Immediate):
    """A Runner over plans. `end_rate` is the chance of the end token at each sampling; `give` is
    the model.
    """

    def __init__(self, layout: CacheLayout, end_rate: float = 0.0, give: Next = next_token) -> None:
        self.layout = layout
        self.end_rate = end_rate
        self.give = give
        self.last_rows: dict[int, Sequence[int]] = {}
        self.progress = 0
        self.slots: dict[tuple[int, int], tuple[int, int, tuple[int, int]]] = {}
        """(page, offset) -> position, hash of all tokens up to it, and the group and stack it was
        written for."""
        self.states: dict[int, list[int]] = {}
        """Sequence -> that hash at each of its positions; 0 for those that it has neither computed
        nor read."""

    def run(self, plan: StepPlan) -> StepResult:
        self.last_rows.update((row.sequence, row.tokens) for row in plan.rows)
        self.progress += 1
        self.clear(plan.clear)
        for row in plan.rows:
            states = self._states_before(row)
            for token in row.tokens:
                states.append(_after(states[-1] if states else 0, token))
            for position in range(row.start, row.start + len(row.tokens)):
                for kind in self._kinds():
                    self.slots[self._slot(row, position, kind)] = (position, states[position], kind)
        scored = {i: self._score(row) for i, row in enumerate(plan.rows) if row.scoring is not None}
        return result(plan, [self._draw(row) for row in plan.rows], scored)

    def clear(self, pages: Sequence[int]) -> None:
        """Forgets what these pages hold."""
        for page, offset in product(pages, range(self.layout.page_size)):
            self.slots.pop((page, offset), None)

    def _states_before(self, row: Row) -> list[int]:
        """The states before a row: computed for this sequence, or read from its pages."""
        states = self.states.setdefault(row.sequence, [])
        if len(states) > row.start and 0 in states:
            # A position outside the window of a row further on may be inside that of a sequence
            # computed again.
            states.clear()
        del states[row.start :]
        for position in range(len(states), row.start):
            seen = [
                kind
                for kind in self._kinds()
                if position >= self.layout.groups[kind[0]].first_seen(row.start)
            ]
            states.append(self.slots[self._slot(row, position, seen[0])][1] if seen else 0)
        return states

    def _score(self, row: Row) -> list[SampledToken]:
        """The log-probability -(position of the token), so that it shows which hidden state scored
        what.
        """
        assert row.scoring is not None
        first = row.start + row.scoring.first
        for offset, target in enumerate(row.scoring.targets):
            position = first + offset + 1
            assert row.start <= position - 1 < row.start + len(row.tokens), (
                "a state that this step does not compute"
            )
            if position < row.start + len(row.tokens):
                assert row.tokens[position - row.start] == target, "not the token that follows"
        return [
            SampledToken(target, -float(first + offset + 1))
            for offset, target in enumerate(row.scoring.targets)
        ]

    def _kinds(self) -> list[tuple[int, int]]:
        return [
            (number, stack)
            for number, group in enumerate(self.layout.groups)
            for stack in range(group.num_stacks)
        ]

    def _slot(self, row: Row, position: int, kind: tuple[int, int]) -> tuple[int, int]:
        number, stack = kind
        page_size, stacks = self.layout.page_size, self.layout.groups[number].num_stacks
        page = row.pages[number][position // page_size * stacks + stack]
        assert page >= 0, "a page that was given back is asked for"
        return page, position % page_size

    def _check(self, row: Row, known: list[int]) -> None:
        """Checks every slot that any token of the row attends to."""
        states, state, unseen = self.states[row.sequence], 0, False
        for position, token in enumerate(known):
            state = _after(state, token)
            # After a position whose pages had been dropped, states are hashes of an unknown
            # beginning and cannot be compared.
            unseen = unseen or not states[position]
            assert unseen or states[position] == state, "a page was shared that holds other tokens"
        for kind in self._kinds():
            first = self.layout.groups[kind[0]].first_seen(row.start)
            for position in range(first, row.start + len(row.tokens)):
                stored_position, stored, stored_kind = self.slots[self._slot(row, position, kind)]
                assert stored_position == position and stored_kind == kind, (
                    "a slot holds another position's token, or another layer's"
                )
                assert stored == states[position], "a slot holds another sequence's token"

    def _draw(self, row: Row) -> list[SampledToken]:
        """The token sampled at each position of the row."""
        draws = []
        for number, sample in enumerate(row.samples, start=1):
            tokens = [*sample.prompt, *sample.output]
            assert len(tokens) == row.start + len(row.tokens) - row.drafts + number - 1
            draws.append(
                SampledToken(
                    self.give(tokens, sample.sampling.seed, self.end_rate, not sample.forbidden),
                    -1.0,
                )
            )
        self._check(row, tokens if draws else [])
        return draws


def result(
    plan: StepPlan, draws: list[list[SampledToken]], scored: dict[int, list[SampledToken]]
) -> StepResult:
    """The result of a step whose rows sampled these tokens."""
    settled = [
        row.settle(places) if places else ([], None)
        for row, places in zip(plan.rows, draws, strict=True)
    ]
    accepted = {i: come_true for i, (come_true, _) in enumerate(settled) if come_true}
    return StepResult(tuple(drawn for _, drawn in settled), scored, accepted)


def _after(state: int, token: int) -> int:
    return hash((state, token)) or 1
