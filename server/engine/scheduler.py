"""Scheduler: what the next step computes. Sans-I/O: no clock, no randomness, no torch, no pipe.

A step plan gives each running sequence some of its pending tokens. Chunked prompts, generation, preemption by recompute and replay
are that one rule. A step may be planned while the one before it is in flight: nobody is preempted then, and who ends keeps its pages
until no step in flight has a row of it. Progress: sequences are ordered by priority, then arrival; only the last in that order is ever
preempted, its pages are usable in the same step, and the first fits the pool by admission; so the first always finishes, and by
induction so does everyone before whom no more arrive.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from msgspec import Struct

from cache.layout import CacheLayout
from cache.pages import PageAllocator
from cache.prefix import Block
from cache.table import DROPPED, PageTable
from model.step import Row, SampledToken, SampleError, Sampling, StepPlan, StepResult
from server.engine.drafts import MAX_SPECULATIVE_STEP, Drafter, divide
from server.engine.prefix_reuse import PrefixReuse
from server.engine.sequence import Constraint, ConstraintFailed, Sequence
from server.engine.waiting_queue import WaitingQueue

log = logging.getLogger("onehead.engine")

_key = attrgetter("key")


class NeverFits(Exception):
    """A sequence that could not run even alone: more tokens than the context or the whole pool holds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler is given to share out. `step_tokens` is the token budget of a step and at least `max_running`."""

    num_pages: int
    layout: CacheLayout
    max_context: int
    max_running: int
    step_tokens: int

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have at most."""
        return self.layout.most_tokens(self.num_pages, self.step_tokens, self.max_context)


class TokenEvent(Struct, frozen=True, gc=False):
    """A sequence got one more token: which, its place in the output, and why it is the last, if it is. Or it failed, and is gone."""

    id: int
    index: int
    drawn: SampledToken | SampleError
    finish: str | None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of prompt tokens `first`, first + 1, ... of a sequence."""

    id: int
    first: int
    scores: list[SampledToken]


class Scheduler:
    """Owns every open sequence and every page. `plan`, run the plan, `commit`; `submit` and `cancel` in between. `drafter_for` gives each
    sequence somebody who guesses its next tokens; None speculates on nothing.
    """

    def __init__(self, limits: Limits, drafter_for: Callable[[Sequence], Drafter] | None = None) -> None:
        if limits.step_tokens < limits.max_running:
            raise ValueError(f"step_tokens {limits.step_tokens} is below max_running {limits.max_running}: each running one needs a token")
        self.limits = limits
        self._drafter_for = drafter_for
        self._capacity = limits.capacity
        self._page_size, self._has_windows = limits.layout.page_size, any(group.window is not None for group in limits.layout.groups)
        self.allocator = PageAllocator(limits.num_pages)
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        self._ended_in_flight: set[Sequence] = set()
        """Who has ended with a row in flight, and holds its pages."""
        self._in_flight: deque[list[Sequence]] = deque()
        """Of each step that was planned and not committed, whose rows it has: an id may come again before its row is back."""
        self._prefix_reuse = PrefixReuse(self.allocator, limits.layout)
        self._pages_to_clear: list[int] = []
        """Free pages that may hold NaN: a masked slot still counts 0 * NaN, so they are cleared before anyone has them."""
        self._started: list[Sequence] = []
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.num_queried_tokens = 0
        """Of all sequences, when they were let in first."""
        self.num_hit_tokens = 0
        """Those among them whose pages were there."""
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        """Those among them that came true."""

    @property
    def has_work(self) -> bool:
        """Whether any sequence is open, or any step in flight."""
        return bool(self.running or self.waiting or self._in_flight)

    def submit(
        self,
        id: int,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        output: list[int] | None = None,
        min_new_tokens: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        *,
        priority: int = 0,
        num_top: int = 0,
        score_prompt: bool = False,
        constraint: Constraint | None = None,
        salt: str = "",
    ) -> None:
        """Admits a sequence to the queue. Raises NeverFits, and ValueError for an empty prompt, a used id or nothing to generate."""
        output = list(output or ())
        if not prompt or max_new_tokens <= len(output) or id in self.running or id in self.waiting:
            raise ValueError(f"sequence {id}: {len(prompt)} prompt tokens, {len(output)} of {max_new_tokens} generated, or a used id")
        sequence = Sequence(
            id,
            prompt,
            output,
            max_new_tokens,
            min_new_tokens,
            stop_token_ids,
            sampling,
            PageTable(self.allocator, self.limits.layout),
            priority,
            num_top,
            score_prompt,
            constraint,
            salt,
        )
        if sequence.most_tokens > self._capacity:
            raise NeverFits(f"sequence {id} may grow to {sequence.most_tokens} tokens; at most {self._capacity} fit")
        if self._drafter_for is not None and constraint is None:
            sequence.drafter = self._drafter_for(sequence)
        self.waiting.put(sequence)

    def cancel(self, id: int) -> None:
        """Forgets a sequence and frees its pages; an unknown id, one that has just ended, is fine."""
        self.waiting.pop(id, None)
        sequence = self.running.pop(id, None)
        if sequence is None:
            return
        self._prefix_reuse.release_claims(sequence)
        if sequence.num_in_flight:
            self._ended_in_flight.add(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        freed = sequence.table.release()
        if sequence.corrupt:
            self._pages_to_clear.extend(freed)

    def plan(self) -> StepPlan:
        """The next step: everyone running gets a token of the budget, the first more if pending, then the queue is let in. It has no rows
        where there is nothing to compute before a step in flight has been committed.
        """
        counts: dict[int, int] = {}
        budget = self.limits.step_tokens
        preemptions = self.num_preemptions
        ready = sorted([sequence for sequence in self.running.values() if not sequence.needs_pending_token], key=_key)
        num_others = len(self.running) - len(ready)
        if num_others and self._would_alternate(ready):
            # Computed without the others they would take turns for ever, in steps that cost as much as one of all.
            return StepPlan(())
        for sequence in ready:
            if sequence.id not in self.running:
                break  # Preempted for one before it, and so is everyone after it.
            count = sequence.num_pending
            if count > 1:
                count = min(count, budget - (len(self.running) - num_others - len(counts) - 1))
            if sequence.num_tokens > sequence.table.room and not self._make_room(sequence, count):
                if self._in_flight:
                    return StepPlan(())
                break
            counts[sequence.id] = count
            budget -= count
        # Pages that were short a moment ago are not for newcomers.
        while budget and self.num_preemptions == preemptions and (newcomer := self._admit(budget)):
            counts[newcomer.id] = min(newcomer.num_pending, budget)
            budget -= counts[newcomer.id]
        return self._launch(counts, self._draft(counts) if self._drafter_for is not None else {}) if counts else StepPlan(())

    def _would_alternate(self, ready: list[Sequence]) -> bool:
        """Whether others wait for what they draw, and so does each of these at every other step."""
        if not all(sequence.is_serial and sequence.num_pending == 1 for sequence in ready):
            return False
        return any(sequence.is_serial and sequence.needs_pending_token for sequence in self.running.values())

    def _launch(self, counts: dict[int, int], drafts: dict[int, list[int]]) -> StepPlan:
        """The plan that computes so many tokens of each, taken for one in flight from here on."""
        sequences = [self.running[id] for id in counts]
        rows = [sequence.row(counts[sequence.id], drafts.get(sequence.id)) for sequence in sequences]
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.on_launched(row)
        self._in_flight.append(sequences)
        clear, self._pages_to_clear = tuple(self._pages_to_clear), []
        return StepPlan(tuple(rows), clear)

    def _draft(self, counts: dict[int, int]) -> dict[int, list[int]]:
        """Guesses to be checked in a step of these rows, with slots for them: only where rows and pages are to spare. What is wrong gives
        its pages back at once, so that a guess never takes the place of a token.
        """
        room = min(MAX_SPECULATIVE_STEP, self.limits.step_tokens) - len(counts)
        if room < 1 or any(number > 1 for number in counts.values()):
            return {}
        wishes = {id: guesses for id in counts if (guesses := self.running[id].draft(room))}
        drafts = {}
        for id, number in divide(room, {id: len(guesses) for id, guesses in wishes.items()}).items():
            sequence, guesses = self.running[id], wishes[id][:number]
            while guesses and sequence.table.missing(*[sequence.num_tokens + len(guesses)] * 2) > self.allocator.num_available:
                guesses.pop()
            sequence.table.grow(*[sequence.num_tokens + len(guesses)] * 2)
            drafts[id] = guesses
        return drafts

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Gives `sequence` slots to compute `count` more tokens, preempting the last in order as needed; False where that was itself, or
        would be while a step is in flight, which may give back what is missing.
        """
        end = sequence.num_computed + count
        while sequence.table.missing(sequence.num_tokens, end) > self.allocator.num_available:
            if self._in_flight:
                return False
            last = max(self.running.values(), key=_key)
            self._preempt(last)
            if last is sequence:
                return False
        sequence.table.grow(sequence.num_tokens, end)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue without pages: its tokens stay, and are computed again."""
        del self.running[sequence.id]
        self._prefix_reuse.release_claims(sequence)
        sequence.table.release()
        sequence.num_computed = 0
        self.waiting.put(sequence)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> Sequence | None:
        """Moves the head of the queue into the running set, if there is a place, with slots to compute `budget` of its tokens."""
        sequence = self.waiting.first()
        if sequence is None or len(self.running) >= self.limits.max_running:
            return None
        blocks = self._prefix_reuse.find(sequence)
        if blocks is None or not self._fits(sequence, blocks, budget):
            return None
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        self._begin(sequence, blocks)
        sequence.table.grow(sequence.num_tokens, sequence.num_computed + min(sequence.num_pending, budget))
        return sequence

    def _begin(self, sequence: Sequence, blocks: list[Block]) -> None:
        self._prefix_reuse.begin(sequence, blocks)
        if not sequence.started:
            sequence.started = True
            sequence.num_cached = min(sequence.num_computed, len(sequence.prompt))
            self._started.append(sequence)
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed

    def _fits(self, sequence: Sequence, blocks: list[Block], budget: int) -> bool:
        """Whether pages can be had for a newcomer that begins with these, and to spare for all who run: else it would soon be preempted."""
        shared = [page for pages in self._prefix_reuse.prefixes.prefix(blocks) for page in pages]
        end = min(sequence.num_tokens, len(blocks) * self.limits.layout.page_size + budget)
        needed = sequence.table.missing(sequence.num_tokens, end) - len(shared)
        # Those that nobody owns yet can be had by nobody else then.
        needed += sum(page != DROPPED and not self.allocator.owners(page) for page in shared)
        return needed + len(self.running) * self.limits.layout.pages_per_step <= self.allocator.num_available

    def take_started(self) -> list[Sequence]:
        """Sequences that left the queue for the first time since this was last asked."""
        started, self._started = self._started, []
        return started

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent | PromptScored]:
        """Takes in what the first step in flight brought. Sequences that finish are gone when this returns, and their pages free unless
        another step in flight has a row of them.
        """
        news: list[TokenEvent | PromptScored] = []
        for index, (sequence, row, drawn) in enumerate(zip(self._in_flight.popleft(), plan.rows, result.drawn, strict=True)):
            sequence.on_committed(row)
            if self.running.get(row.sequence) is not sequence:
                self._discard(sequence, drawn)
                continue
            if row.drafts and _is_corrupt(drawn):
                self._recompute_without_drafts(sequence)
                continue
            outcomes: list[SampledToken | SampleError] = []
            end = row.start + len(row.tokens)
            if row.drafts:
                outcomes += result.accepted.get(index, ())
                end = self._accept_drafts(sequence, row, outcomes)
            self.num_computed_tokens += end - row.start
            if index in result.scored:
                first = sequence.num_scored
                prompt_scores, forced = sequence.take_scored(list(result.scored[index]))
                if not isinstance(drawn, SampleError):
                    news.extend([PromptScored(sequence.id, first, prompt_scores)] if prompt_scores else [])
                    outcomes += forced
            if not isinstance(drawn, SampleError):
                self._on_computed(sequence, row.start, end)
            if drawn is not None:
                outcomes.append(drawn)
            self._append_tokens(sequence, outcomes, news)
        return news

    def _on_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Tokens `start` .. `end` - 1 are computed: others may have their pages, and it may need some others no more."""
        if start // self._page_size != end // self._page_size:
            self._prefix_reuse.publish(sequence, start, end)
        if self._has_windows:
            sequence.table.drop(end)

    def _discard(self, sequence: Sequence, drawn: SampledToken | SampleError | None) -> None:
        """Takes in what a sequence brought that has ended meanwhile: of no use, but for what it may have done to its pages."""
        if _is_corrupt(drawn):
            self._mark_corrupt(sequence, found=True)
        if not sequence.num_in_flight:
            self._ended_in_flight.remove(sequence)
            self._release(sequence)

    def _mark_corrupt(self, sequence: Sequence, found: bool) -> None:
        """Its pages may hold numbers that are not finite, and so perhaps may those that it found."""
        sequence.corrupt = True
        self._prefix_reuse.retract(sequence, found)

    def _accept_drafts(self, sequence: Sequence, row: Row, accepted: list[SampledToken | SampleError]) -> int:
        """Takes a row's tokens for computed, but for guesses that were wrong; the position behind them."""
        end = row.start + len(row.tokens) - row.drafts + len(accepted)
        sequence.take_accepted(row, [draw.token for draw in accepted if isinstance(draw, SampledToken)])
        self.num_drafted_tokens += row.drafts
        self.num_accepted_tokens += len(accepted)
        if row.drafts > len(accepted):
            sequence.table.trim(end)
        return end

    def _recompute_without_drafts(self, sequence: Sequence) -> None:
        """Numbers that are not finite may be a wrong guess's alone, and reach the tokens before it through masked slots: what is to come
        of this sequence is seen when it is computed again without guesses, over clean pages. It keeps its place meanwhile.
        """
        sequence.drafter, sequence.num_computed = None, 0
        self._pages_to_clear.extend(sequence.table.release())

    def _append_tokens(self, sequence: Sequence, outcomes: list[SampledToken | SampleError], news: list[TokenEvent | PromptScored]) -> None:
        """Appends tokens up to the one that ends the sequence, if one does, and tells of each."""
        for outcome in outcomes:
            index, finish = len(sequence.output), None
            if isinstance(outcome, SampledToken):
                try:
                    finish = sequence.append(outcome.token)
                except ConstraintFailed as error:
                    outcome = SampleError(str(error), refused=True)
                except (KeyboardInterrupt, SystemExit, MemoryError):
                    raise
                except BaseException:  # A panic of a library's is no Exception.
                    log.exception("sequence %d cannot go on", sequence.id)
                    outcome = SampleError("an internal error in following its grammar", code="grammar_error")
            news.append(TokenEvent(sequence.id, index, outcome, finish))
            if isinstance(outcome, SampleError):
                self._mark_corrupt(sequence, found=_is_corrupt(outcome))
            elif finish is None:
                continue
            self.cancel(sequence.id)
            break

    def integrity(self) -> list[str]:
        """What is inconsistent, in words; empty when all is well. For tests and for idle moments."""
        problems = self.allocator.integrity() + self._prefix_reuse.integrity(list(self.running.values()))
        holders = [*self.running.values(), *self._ended_in_flight]
        owners = Counter(page for sequence in holders for page in sequence.table.owned)
        if len(owners) != self.allocator.num_owned or any(self.allocator.owners(page) != number for page, number in owners.items()):
            problems.append(f"tables list {len(owners)} pages, {self.allocator.num_owned} are owned, or not as often")
        if any(sequence.num_tokens != sequence.count_tokens() for sequence in (*holders, *self.waiting.values())):
            problems.append("a sequence has lost count of its tokens")
        if any(sequence.table.owned or sequence.num_in_flight for sequence in self.waiting.values()):
            problems.append("a waiting sequence holds pages or has a row in flight")
        if not all(sequence.num_in_flight for sequence in self._ended_in_flight):
            problems.append("a sequence that has ended holds pages for no step in flight")
        return problems


def _is_corrupt(drawn: SampledToken | SampleError | None) -> bool:
    """Whether numbers that are not finite may be in what the row wrote, and in what it read."""
    return isinstance(drawn, SampleError) and drawn.code == "numerical_error"
