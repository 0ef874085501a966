"""Scheduler: continuous batching. It decides what the next step computes. Sans-I/O: no clock,
randomness, torch or pipe.

A step plan gives each running sequence some of its uncomputed tokens. Chunked prefill, decode,
preemption by recompute and replay after a crash all follow from that rule. A step may be planned
while the previous one is in flight: nothing is preempted then, and a sequence that ends keeps its
pages until no step in flight has a row of it. Clients share the steps fairly (fair_shares).

Progress: pages that are missing are taken from the last running sequence by (rank, arrival), and
can be used in the same step; for another client's share a sequence is preempted only if it has
generated a token since it was last preempted. So such preemptions come to an end, as tokens are
never taken back; from then on the first running sequence is never preempted and finishes. A waiting
sequence is admitted, as its client's counter stays while those of others grow until it is the
smallest, nothing is admitted before it from then on, and it fits the pool alone. Those with a
better rank, or a better priority of the same client, go first for as long as any come.
"""

from operator import attrgetter

from cache.prefix import Block
from model.step import StepPlan
from server.engine.drafts import MAX_SPECULATIVE_STEP
from server.engine.fair_shares import step_counts
from server.engine.limits import Limits as Limits
from server.engine.limits import NeverFits as NeverFits
from server.engine.open_sequences import OpenSequences
from server.engine.sequence import Sequence

_key = attrgetter("key")


class Scheduler(OpenSequences):
    """Call `plan`, run the plan, `commit`."""

    def plan(self) -> StepPlan:
        """Plans the next step: every running sequence gets one token of the budget, the first ones
        more if needed, then sequences are admitted from the queue. The plan is empty if nothing can
        be computed before the step in flight is committed.
        """
        if self.waiting and self._has_to_make_place():
            return StepPlan(())
        counts: dict[int, int] = {}
        preemptions = self.num_preemptions
        ready = self._ready()
        short = self._decoding.at_limit()
        num_decoding = len(self._decoding)
        if not num_decoding and len(ready) < len(self.running) and self._would_alternate(ready):
            # Two groups of sequences would alternate for ever, each in steps that cost as much as
            # one with all of them.
            return StepPlan(())
        # One token of the budget is left for a sequence that waits.
        kept = bool(self.waiting and len(self.running) < self.limits.max_running)
        spare = self.limits.step_tokens - len(ready) - num_decoding - kept
        wanted = step_counts(ready, spare)
        if num_decoding and not self._give_room(short, ready, wanted):
            # Pages are short, and go to the first sequences in order, whether they decode or not.
            ready = sorted([*ready, *self._decoding.clear()], key=_key)
            wanted = step_counts(ready, spare)
        budget = self.limits.step_tokens - len(self._decoding)
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
        if self.waiting and self.num_preemptions == preemptions:
            self._admit_waiting(counts, budget)
        if not counts and not self._decoding:
            return StepPlan(())
        return self._launch(counts, self._draft(counts))

    def _admit_waiting(self, counts: dict[int, int], budget: int) -> None:
        """Admits waiting sequences, for as many tokens of each as the budget allows."""
        while budget > 0 and (admitted := self._admit(budget)):
            if count := min(admitted.num_plannable, admitted.affordable(budget)):
                counts[admitted.id] = count
                budget -= count * admitted.token_cost

    def _ready(self) -> list[Sequence]:
        """The running sequences that can be planned, in order, but for those that decode; what can
        joins these.
        """
        if self._decoding and not self._in_flight:
            self._decoding.know_tokens()
        if len(self._decoding) == len(self.running):
            return []
        ready = []
        for sequence in self.running.values():
            if sequence.line >= 0:
                continue
            if sequence.can_decode:
                self._decoding.join(sequence, sequence.draw)
            elif not sequence.needs_pending_token:
                ready.append(sequence)
        ready.sort(key=_key)
        return ready

    def _give_room(
        self, short: list[Sequence], ready: list[Sequence], counts: dict[int, int]
    ) -> bool:
        """Gives slots to the sequences that decode and have none for their next token. False, and
        nothing is done, if the pool has not the pages for them and for so many tokens of the
        others.
        """
        if not short and not ready:
            return True
        missing = sum(sequence.table.missing(sequence.num_tokens) for sequence in short)
        missing += sum(
            sequence.table.missing(sequence.num_tokens, sequence.num_computed + counts[sequence.id])
            for sequence in ready
        )
        if missing > self.allocator.num_available:
            return False
        for sequence in short:
            self._decoding.grow(sequence)
        return True

    def _has_to_make_place(self) -> bool:
        """Preempts sequences of clients that were served more, if the first waiting sequence finds
        no place or pages. True if that has to be done but a step in flight forbids it.
        """
        waiter = self._shares.next()
        if (
            waiter is None
            or not self._shares.is_behind(waiter.account)
            or (blocks := self._prefix_reuse.find(waiter)) is None
        ):
            return False
        needed = waiter.table.missing(waiter.num_tokens)
        places = len(self.running) + 1 - self.limits.max_running
        pages = self._lacking(waiter, blocks, waiter.num_tokens)
        victims = self._shares.victims(waiter, places, pages, needed)
        if self._in_flight:
            return bool(victims)
        for sequence in victims:
            self._preempt(sequence, waiter)
        return False

    def _would_alternate(self, ready: list[Sequence]) -> bool:
        """Whether all these sequences, and some that wait for a token in flight, can be planned
        only every other step.
        """
        if not all(sequence.is_serial and sequence.num_uncomputed == 1 for sequence in ready):
            return False
        return any(sequence.is_serial and sequence.num_unseen for sequence in self.running.values())

    def _launch(self, counts: dict[int, int], drafts: dict[int, list[int]]) -> StepPlan:
        """The plan that computes `counts` tokens of each sequence, and one of each that decodes;
        from now on it counts as in flight.
        """
        decoding = self._decoding.sequences[:]
        decode = self._decoding.launch() if decoding else None
        sequences = [self.running[id] for id in counts]
        rows = [
            sequence.row(counts[sequence.id], drafts.get(sequence.id)) for sequence in sequences
        ]
        num_draws = len(decoding)
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.on_launched(len(row.tokens) - row.drafts, row.sample is not None)
            if row.sample is not None:
                num_draws += row.drafts
                sequence.draw = num_draws
                num_draws += 1
        self._in_flight.append(decoding + sequences)
        clear = tuple(self._pages_to_clear)
        self._pages_to_clear.clear()
        return StepPlan(tuple(rows), clear, decode)

    def _draft(self, counts: dict[int, int]) -> dict[int, list[int]]:
        """Draft tokens to verify in a step of these rows, with slots for them, if the step has rows
        and the pool has pages to spare. Rejected ones free their pages at commit, so drafts never
        displace other tokens.
        """
        if self._drafts is None:
            return {}
        budget = (
            min(MAX_SPECULATIVE_STEP, self.limits.step_tokens) - len(counts) - len(self._decoding)
        )
        if budget < 1 or any(number > 1 for number in counts.values()):
            return self._drafts.draft({}, 0)
        wanted = {
            sequence: min(budget, most)
            for id in counts
            if (most := (sequence := self.running[id]).most_drafts)
        }
        drafts = self._drafts.draft(wanted, budget)
        assert sum(map(len, drafts.values())) <= budget, "drafts are longer than the step"
        for id, drafted in drafts.items():
            sequence = self.running[id]
            while (
                drafted
                and sequence.table.missing(sequence.num_tokens + len(drafted))
                > self.allocator.num_available
            ):
                drafted.pop()
            sequence.table.grow(sequence.num_tokens + len(drafted))
        return drafts

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Gives `sequence` slots to compute `count` more tokens, preempting the last sequences in
        order as needed. False if it was itself preempted, or if a step in flight, which may free
        pages, forbids preemption.
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
        """Returns a sequence to the queue and frees its pages for another one. It keeps its tokens,
        which are recomputed later.
        """
        sequence.payer, sequence.preempted_at = cause.account, len(sequence.output)
        sequence.num_paid = max(sequence.num_paid, sequence.num_computed)
        del self.running[sequence.id]
        self._stop_running(sequence)
        sequence.table.release()
        sequence.num_computed = 0
        self.waiting.put(sequence)
        self.num_preemptions += 1
        sequence.num_preemptions += 1

    def _admit(self, budget: int) -> Sequence | None:
        """Admits the first waiting sequence, if max_running and the pool allow it, with slots for
        the tokens that `budget` affords.
        """
        if len(self.running) >= self.limits.max_running:
            return None
        sequence = self._shares.next()
        if sequence is None or (self.limits.is_whole and sequence.num_tokens > budget):
            return None
        blocks, most = self._prefix_reuse.find(sequence), sequence.affordable(budget)
        if blocks is None or self._lacking(sequence, blocks, most) > 0:
            return None
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        self._begin(sequence, blocks)
        sequence.table.grow(
            sequence.num_tokens, sequence.num_computed + min(sequence.num_uncomputed, most)
        )
        return sequence

    def _begin(self, sequence: Sequence, blocks: list[Block]) -> None:
        sequence.begin_constraint()
        self._prefix_reuse.begin(sequence, blocks)
        if sequence.payer is None:  # It waits for the first time.
            sequence.num_cached = min(sequence.num_computed, len(sequence.prompt))
            self._started.append(sequence)
            self.num_queried_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed
            sequence.account.charge(len(sequence.prompt) - sequence.num_cached)
        else:
            sequence.payer.charge(max(0, sequence.num_paid - sequence.num_computed))

    def _lacking(self, sequence: Sequence, blocks: list[Block], most: int) -> int:
        """Pages that the pool lacks for `most` tokens of a new sequence with these cached blocks,
        and a spare block of each running one.
        """
        needed = self._prefix_reuse.pages_needed(sequence, blocks, most)
        return (
            needed
            + len(self.running) * self.limits.layout.pages_per_block
            - self.allocator.num_available
        )

    def take_started(self) -> list[Sequence]:
        """Sequences admitted for the first time since the last call."""
        started, self._started = self._started, []
        return started
