"""Scheduler: continuous batching. It decides what the next step computes. Sans-I/O: no clock, randomness, torch or pipe.

A step plan gives each running sequence some of its uncomputed tokens. Chunked prefill, decode, preemption by recompute and replay after
a crash all follow from that rule. A step may be planned while the previous one is in flight: nothing is preempted then, and a sequence
that ends keeps its pages until no step in flight has a row of it. Clients share the steps fairly (fair_shares).

Progress: pages that are missing are taken from the last running sequence by (rank, arrival), and can be used in the same step; for
another client's share a sequence is preempted only if it has generated a token since it was last preempted. So such preemptions come to
an end, as tokens are never taken back; from then on the first running sequence is never preempted and finishes. A waiting sequence is
admitted, as its client's counter stays while those of others grow until it is the smallest, nothing is admitted before it from then on,
and it fits the pool alone. Those with a better rank, or a better priority of the same client, go first for as long as any come.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from msgspec import Struct

from cache.pages import PageAllocator
from cache.prefix import Block
from cache.table import PageTable
from model.step import Row, SampledToken, SampleError, Sampling, StepPlan, StepResult
from server.engine.drafts import MAX_SPECULATIVE_STEP, Drafter, divide
from server.engine.fair_shares import FairShares, step_counts
from server.engine.limits import Limits as Limits
from server.engine.limits import NeverFits as NeverFits
from server.engine.prefix_reuse import PrefixReuse
from server.engine.sequence import Constraint, Sequence
from server.engine.waiting_queue import WaitingQueue
from server.protocol import Share

_key = attrgetter("key")
EVERYBODY = Share()


class TokenEvent(Struct, frozen=True, gc=False):
    """One more token of a sequence, with its index in the output and the finish reason if it is the last; or the error that ended it."""

    id: int
    index: int
    drawn: SampledToken | SampleError
    finish: str | None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt tokens `first`, first + 1, ... of a sequence."""

    id: int
    first: int
    scores: list[SampledToken]


class Scheduler:
    """Owns every open sequence and every page of the KV cache. Call `plan`, run the plan, `commit`; `submit` and `cancel` in between.
    `drafter_for` returns a sequence's n-gram drafter; None disables speculative decoding.
    """

    def __init__(self, limits: Limits, drafter_for: Callable[[Sequence], Drafter] | None = None) -> None:
        if limits.step_tokens < limits.max_running:
            raise ValueError(
                f"step_tokens {limits.step_tokens} is below max_running {limits.max_running}: each running sequence needs a token"
            )
        self.limits = limits
        self._drafter_for = drafter_for
        self._capacity = limits.capacity
        self._page_size, self._has_windows = limits.layout.page_size, any(group.window is not None for group in limits.layout.groups)
        self.allocator = PageAllocator(limits.num_pages)
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        self._shares = FairShares(limits.max_running, limits.num_pages, self.running, self.waiting)
        self._ended_in_flight: set[Sequence] = set()
        """Sequences that have ended and hold their pages until their last row in flight is committed."""
        self._in_flight: deque[list[Sequence]] = deque()
        """For each step in flight, the sequences of its rows; their ids may be used again before the step is committed."""
        self._prefix_reuse = PrefixReuse(self.allocator, limits.layout)
        self._pages_to_clear: list[int] = []
        """Free pages that may hold NaN. The next step zeroes them, as 0 * NaN would leak through masked slots."""
        self._started: list[Sequence] = []
        self.num_preemptions = 0
        self.num_computed_tokens = 0
        self.num_queried_tokens = 0
        """Tokens looked up in the prefix cache, when sequences are first admitted."""
        self.num_hit_tokens = 0
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is open or any step in flight."""
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
        share: Share = EVERYBODY,
        priority: int = 0,
        num_top: int = 0,
        score_prompt: bool = False,
        constraint: Constraint | None = None,
        salt: str = "",
    ) -> None:
        """Adds a sequence to the queue. Raises NeverFits; ValueError for an empty prompt, an id in use, or an output that is complete."""
        output = list(output or ())
        if not prompt or max_new_tokens <= len(output) or id in self.running or id in self.waiting:
            raise ValueError(f"sequence {id}: {len(prompt)} prompt tokens, {len(output)} of {max_new_tokens} generated, or the id is used")
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
            share.rank,
            self._shares.account(share.client, share.weight, share.max_running, share.rank),
        )
        if sequence.most_tokens > self._capacity:
            raise NeverFits(f"this request may need {sequence.most_tokens} tokens; at most {self._capacity} fit")
        if self._drafter_for is not None and constraint is None:
            sequence.drafter = self._drafter_for(sequence)
        self.waiting.put(sequence)

    def cancel(self, id: int) -> None:
        """Ends a sequence and frees its pages. An unknown id, as of a sequence that has just finished, is ignored."""
        self.waiting.pop(id, None)
        sequence = self.running.pop(id, None)
        if sequence is None:
            return
        self._prefix_reuse.release_claims(sequence)
        sequence.end_constraint()
        if sequence.num_in_flight:
            self._ended_in_flight.add(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        freed = sequence.table.release()
        if sequence.corrupt:
            self._pages_to_clear.extend(freed)

    def plan(self) -> StepPlan:
        """Plans the next step: every running sequence gets one token of the budget, the first ones more if needed, then sequences are
        admitted from the queue. The plan is empty if nothing can be computed before the step in flight is committed.
        """
        if self._has_to_make_place():
            return StepPlan(())
        counts: dict[int, int] = {}
        preemptions, budget = self.num_preemptions, self.limits.step_tokens
        ready = sorted([sequence for sequence in self.running.values() if not sequence.needs_pending_token], key=_key)
        if len(ready) < len(self.running) and self._would_alternate(ready):
            # Two groups of sequences would alternate for ever, each in steps that cost as much as one with all of them.
            return StepPlan(())
        # One token of the budget is left for a sequence that waits.
        kept = bool(self.waiting and len(self.running) < self.limits.max_running)
        wanted = step_counts(ready, self.limits.step_tokens - len(ready) - kept)
        for sequence in ready:
            if sequence.id not in self.running:
                break  # Preempted for an earlier one, as are all after it.
            count = wanted[sequence.id]
            if sequence.num_tokens > sequence.table.room and not self._make_room(sequence, count):
                if self._in_flight:
                    return StepPlan(())
                break
            counts[sequence.id] = count
            budget -= count * sequence.token_cost
        # If pages were just too few, no sequence is admitted.
        while budget > 0 and self.num_preemptions == preemptions and (admitted := self._admit(budget)):
            if count := min(admitted.num_plannable, admitted.affordable(budget)):
                counts[admitted.id] = count
                budget -= count * admitted.token_cost
        return self._launch(counts, self._draft(counts) if self._drafter_for is not None else {}) if counts else StepPlan(())

    def _has_to_make_place(self) -> bool:
        """Preempts sequences of clients that were served more, if the first waiting sequence finds no place or pages. True if that has
        to be done but a step in flight forbids it.
        """
        waiter = self._shares.next()
        if waiter is None or not self._shares.is_behind(waiter.account) or (blocks := self._prefix_reuse.find(waiter)) is None:
            return False
        needed = waiter.table.missing(waiter.num_tokens, waiter.num_tokens)
        places, pages = len(self.running) + 1 - self.limits.max_running, self._lacking(waiter, blocks, waiter.num_tokens)
        victims = self._shares.victims(waiter, places, pages, needed)
        if self._in_flight:
            return bool(victims)
        for sequence in victims:
            self._preempt(sequence, waiter)
        return False

    def _would_alternate(self, ready: list[Sequence]) -> bool:
        """Whether all these sequences, and some that wait for a token in flight, can be planned only every other step."""
        if not all(sequence.is_serial and sequence.num_uncomputed == 1 for sequence in ready):
            return False
        return any(sequence.is_serial and sequence.num_unseen for sequence in self.running.values())

    def _launch(self, counts: dict[int, int], drafts: dict[int, list[int]]) -> StepPlan:
        """The plan that computes `counts` tokens of each sequence; from now on it counts as in flight."""
        sequences = [self.running[id] for id in counts]
        rows = [sequence.row(counts[sequence.id], drafts.get(sequence.id)) for sequence in sequences]
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.on_launched(row)
        self._in_flight.append(sequences)
        clear, self._pages_to_clear = tuple(self._pages_to_clear), []
        return StepPlan(tuple(rows), clear)

    def _draft(self, counts: dict[int, int]) -> dict[int, list[int]]:
        """Draft tokens to verify in a step of these rows, with slots for them, if the step has rows and the pool has pages to spare.
        Rejected ones free their pages at commit, so drafts never displace other tokens.
        """
        budget = min(MAX_SPECULATIVE_STEP, self.limits.step_tokens) - len(counts)
        if budget < 1 or any(number > 1 for number in counts.values()):
            return {}
        wishes = {id: drafted for id in counts if (drafted := self.running[id].draft(budget))}
        drafts = {}
        for id, number in divide(budget, {id: len(drafted) for id, drafted in wishes.items()}).items():
            sequence, drafted = self.running[id], wishes[id][:number]
            while drafted and sequence.table.missing(*[sequence.num_tokens + len(drafted)] * 2) > self.allocator.num_available:
                drafted.pop()
            sequence.table.grow(*[sequence.num_tokens + len(drafted)] * 2)
            drafts[id] = drafted
        return drafts

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Gives `sequence` slots to compute `count` more tokens, preempting the last sequences in order as needed. False if it was
        itself preempted, or if a step in flight, which may free pages, forbids preemption.
        """
        end = sequence.num_computed + count
        while sequence.table.missing(sequence.num_tokens, end) > self.allocator.num_available:
            if self._in_flight:
                return False
            last = max(self.running.values(), key=_key)
            self._preempt(last, sequence)
            if last is sequence:
                return False
        sequence.table.grow(sequence.num_tokens, end)
        return True

    def _preempt(self, sequence: Sequence, cause: Sequence) -> None:
        """Returns a sequence to the queue and frees its pages for another one. It keeps its tokens, which are recomputed later."""
        sequence.payer, sequence.preempted_at = cause.account, len(sequence.output)
        sequence.num_paid = max(sequence.num_paid, sequence.num_computed)
        del self.running[sequence.id]
        self._prefix_reuse.release_claims(sequence)
        sequence.end_constraint()
        sequence.table.release()
        sequence.num_computed = 0
        self.waiting.put(sequence)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> Sequence | None:
        """Admits the first waiting sequence, if max_running and the pool allow it, with slots for the tokens that `budget` affords."""
        sequence = self._shares.next()
        if sequence is None or len(self.running) >= self.limits.max_running:
            return None
        blocks, most = self._prefix_reuse.find(sequence), sequence.affordable(budget)
        if blocks is None or self._lacking(sequence, blocks, most) > 0:
            return None
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        self._begin(sequence, blocks)
        sequence.table.grow(sequence.num_tokens, sequence.num_computed + min(sequence.num_uncomputed, most))
        return sequence

    def _begin(self, sequence: Sequence, blocks: list[Block]) -> None:
        sequence.begin_constraint()
        self._prefix_reuse.begin(sequence, blocks)
        if not sequence.started:
            sequence.started = True
            sequence.num_cached = min(sequence.num_computed, len(sequence.prompt))
            self._started.append(sequence)
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed
            sequence.account.charge(len(sequence.prompt) - sequence.num_cached)
        elif sequence.payer is not None:
            sequence.payer.charge(max(0, sequence.num_paid - sequence.num_computed))

    def _lacking(self, sequence: Sequence, blocks: list[Block], most: int) -> int:
        """Pages that the pool lacks for `most` tokens of a new sequence with these cached blocks, and a spare block of each running one."""
        needed = self._prefix_reuse.pages_needed(sequence, blocks, most)
        return needed + len(self.running) * self.limits.layout.pages_per_block - self.allocator.num_available

    def take_started(self) -> list[Sequence]:
        """Sequences admitted for the first time since the last call."""
        started, self._started = self._started, []
        return started

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent | PromptScored]:
        """Applies the result of the oldest step in flight and returns its events. Sequences that finish are removed, and their pages
        freed unless another step in flight has a row of them.
        """
        events: list[TokenEvent | PromptScored] = []
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
                    events.extend([PromptScored(sequence.id, first, prompt_scores)] if prompt_scores else [])
                    outcomes += forced
            if not isinstance(drawn, SampleError):
                self._on_computed(sequence, row.start, end)
            if drawn is not None:
                outcomes.append(drawn)
            self._append_tokens(sequence, outcomes, events)
        return events

    def take_masks(self) -> list[TokenEvent]:
        """Gives sequences the masks that have arrived for them, and returns an event for each whose constraint has failed."""
        events = []
        for sequence in [s for s in self.running.values() if s.awaits_mask and s.constraint is not None and not s.constraint.is_pending]:
            if (failure := sequence.take_mask()) is not None:
                events.append(TokenEvent(sequence.id, len(sequence.output), failure, None))
                self.cancel(sequence.id)
        return events

    def _on_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Publishes the blocks completed by tokens `start` .. `end` - 1, and drops pages that slid out of attention windows."""
        if start // self._page_size != end // self._page_size:
            self._prefix_reuse.publish(sequence, start, end)
        if self._has_windows:
            sequence.table.drop(end)

    def _discard(self, sequence: Sequence, drawn: SampledToken | SampleError | None) -> None:
        """Discards a row of a sequence that has ended since; its pages may still have become corrupt."""
        if _is_corrupt(drawn):
            self._mark_corrupt(sequence, found=True)
        if not sequence.num_in_flight:
            self._ended_in_flight.remove(sequence)
            self._release(sequence)

    def _mark_corrupt(self, sequence: Sequence, found: bool) -> None:
        """Marks the pages of a sequence as possibly non-finite; with `found`, the cached blocks that it reused too."""
        sequence.corrupt = True
        self._prefix_reuse.retract(sequence, found)

    def _accept_drafts(self, sequence: Sequence, row: Row, accepted: list[SampledToken | SampleError]) -> int:
        """Accounts for the accepted draft tokens of a row and returns the position after the last computed token."""
        end = row.start + len(row.tokens) - row.drafts + len(accepted)
        sequence.take_accepted(row, [draw.token for draw in accepted if isinstance(draw, SampledToken)])
        self.num_drafted_tokens += row.drafts
        self.num_accepted_tokens += len(accepted)
        if row.drafts > len(accepted):
            sequence.table.trim(end)
        return end

    def _recompute_without_drafts(self, sequence: Sequence) -> None:
        """Non-finite logits may come from a rejected draft, through masked slots: recomputes the sequence without drafts on zeroed
        pages. It stays in the running set.
        """
        sequence.drafter, sequence.num_computed = None, 0
        self._pages_to_clear.extend(sequence.table.release())

    def _append_tokens(
        self, sequence: Sequence, outcomes: list[SampledToken | SampleError], events: list[TokenEvent | PromptScored]
    ) -> None:
        """Appends tokens to a sequence until it ends, with an event for each."""
        for outcome in outcomes:
            index, finish = len(sequence.output), None
            if isinstance(outcome, SampledToken):
                finish = sequence.append(outcome.token)
                sequence.account.charge(0, 1)
            events.append(TokenEvent(sequence.id, index, outcome, finish))
            if isinstance(outcome, SampleError):
                self._mark_corrupt(sequence, found=_is_corrupt(outcome))
            elif finish is None:
                continue
            self.cancel(sequence.id)
            break


def _is_corrupt(drawn: SampledToken | SampleError | None) -> bool:
    """Whether the pages that a row wrote or read may hold non-finite values."""
    return isinstance(drawn, SampleError) and drawn.code == "numerical_error"
