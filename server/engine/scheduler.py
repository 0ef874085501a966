"""Scheduler: what the next step computes. Sans-I/O: no clock, no randomness, no torch, no pipe.

A step plan gives each running sequence some of its pending tokens. Chunked prompts, generation, preemption by recompute and replay
are that one rule. Progress: sequences are ordered by arrival, only the youngest is ever preempted, its pages are usable in the same
step, and the oldest fits the pool by admission; so the oldest always finishes, and by induction so does everyone.
"""

from collections import OrderedDict
from dataclasses import dataclass

from cache.pages import PageAllocator
from cache.table import PageTable, pages_for
from model.step import Drawn, NotDrawn, Sampling, StepPlan, StepResult
from server.engine.sequence import Sequence


class NeverFits(Exception):
    """A sequence that could not run even alone: more tokens than the context or the whole pool holds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler is given to share out. `step_tokens` is the token budget of a step and at least `max_running`."""

    num_pages: int
    page_size: int
    max_context: int
    max_running: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class Advance:
    """A sequence got one more token: which, its place in the output, and why it is the last, if it is. Or it failed, and is gone."""

    id: int
    index: int
    drawn: Drawn | NotDrawn
    finish: str | None


class Scheduler:
    """Owns every open sequence and every page. `plan`, run the plan, `commit`; `submit` and `cancel` in between."""

    def __init__(self, limits: Limits) -> None:
        if limits.step_tokens < limits.max_running:
            raise ValueError(f"step_tokens {limits.step_tokens} is below max_running {limits.max_running}: each running one needs a token")
        self.limits = limits
        self.allocator = PageAllocator(limits.num_pages)
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: dict[int, Sequence] = {}
        """Both are in order of arrival, and everyone running arrived before everyone waiting."""
        self._started: list[int] = []
        self.num_preemptions = 0
        self.num_computed_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is open."""
        return bool(self.running or self.waiting)

    def submit(
        self,
        id: int,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        output: list[int] | None = None,
        min_new_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Admits a sequence to the queue. Raises NeverFits, and ValueError for an empty prompt, a used id or nothing to generate."""
        output = list(output or ())
        if not prompt or max_new_tokens <= len(output) or id in self.running or id in self.waiting:
            raise ValueError(f"sequence {id}: {len(prompt)} prompt tokens, {len(output)} of {max_new_tokens} generated, or a used id")
        table = PageTable(self.allocator, self.limits.page_size)
        sequence = Sequence(id, prompt, output, max_new_tokens, min_new_tokens, stop_token_ids, sampling, table)
        capacity = min(self.limits.max_context, self.limits.num_pages * self.limits.page_size)
        if sequence.most_tokens > capacity:
            raise NeverFits(f"sequence {id} may grow to {sequence.most_tokens} tokens; at most {capacity} fit")
        self.waiting[id] = sequence

    def cancel(self, id: int) -> None:
        """Forgets a sequence and frees its pages; an unknown id, one that has just ended, is fine."""
        self.waiting.pop(id, None)
        sequence = self.running.pop(id, None)
        if sequence is not None:
            sequence.table.release()

    def plan(self) -> StepPlan:
        """The next step: everyone running gets a token of the budget, the oldest more if pending, then the queue is let in."""
        counts: dict[int, int] = {}
        budget = self.limits.step_tokens
        preemptions = self.num_preemptions
        for sequence in list(self.running.values()):
            if sequence.id not in self.running:
                break  # Preempted for an older one, and so is everyone after it.
            if not self._make_room(sequence):
                break
            younger = len(self.running) - len(counts) - 1
            counts[sequence.id] = min(sequence.num_pending, budget - younger)
            budget -= counts[sequence.id]
        # Pages that were short a moment ago are not for newcomers.
        while budget and self.num_preemptions == preemptions and (newcomer := self._admit()):
            counts[newcomer.id] = min(newcomer.num_pending, budget)
            budget -= counts[newcomer.id]
        return StepPlan(tuple(self.running[id].row(count) for id, count in counts.items()))

    def _make_room(self, sequence: Sequence) -> bool:
        """Gives `sequence` slots for all its tokens, preempting the youngest as needed; False where that was itself."""
        while sequence.table.missing(sequence.num_tokens) > self.allocator.num_free:
            youngest = next(reversed(self.running.values()))
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.table.grow(sequence.num_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue without pages: its tokens stay, and are computed again."""
        del self.running[sequence.id]
        sequence.table.release()
        sequence.num_computed = 0
        self.waiting[sequence.id] = sequence
        self.waiting.move_to_end(sequence.id, last=False)
        self.num_preemptions += 1

    def _admit(self) -> Sequence | None:
        """Moves the head of the queue into the running set, if there is a place, with slots for all its tokens."""
        if not self.waiting or len(self.running) >= self.limits.max_running:
            return None
        sequence = next(iter(self.waiting.values()))
        # A page to spare for each that runs already, or the newcomer would soon be preempted again.
        needed = pages_for(sequence.num_tokens, self.limits.page_size) + len(self.running)
        if needed > self.allocator.num_free:
            return None
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        sequence.table.grow(sequence.num_tokens)
        if not sequence.started:
            sequence.started = True
            self._started.append(sequence.id)
        return sequence

    def take_started(self) -> list[int]:
        """Sequences that left the queue for the first time since this was last asked."""
        started, self._started = self._started, []
        return started

    def commit(self, plan: StepPlan, result: StepResult) -> list[Advance]:
        """Takes in what a step brought. Finished sequences are gone, and their pages free, when this returns."""
        advances = []
        for row, drawn in zip(plan.rows, result.drawn, strict=True):
            sequence = self.running.get(row.sequence)
            if sequence is None:
                continue
            sequence.num_computed += len(row.tokens)
            self.num_computed_tokens += len(row.tokens)
            if drawn is None:
                continue
            index = len(sequence.output)
            finish = sequence.append(drawn.token) if isinstance(drawn, Drawn) else None
            advances.append(Advance(sequence.id, index, drawn, finish))
            if finish is not None or isinstance(drawn, NotDrawn):
                self.cancel(sequence.id)
        return advances

    def integrity(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well. For tests and for idle moments."""
        problems = self.allocator.integrity()
        listed = [page for sequence in self.running.values() for page in sequence.table.pages]
        if len(listed) != self.allocator.num_owned or len(set(listed)) != len(listed):
            problems.append(f"running sequences list {len(listed)} pages, {self.allocator.num_owned} are owned")
        if any(sequence.table.pages for sequence in self.waiting.values()):
            problems.append("a waiting sequence holds pages")
        return problems
