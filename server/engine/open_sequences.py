"""OpenSequences: what is open in an engine, and what the results of steps make of it. Sans-I/O: no
clock, randomness, torch or pipe.

It owns every open sequence and every page of the KV cache: it takes requests, ends them, and
applies what a step has drawn. What a step computes is decided by its subclass, the scheduler.
Invariant: results are applied in the order in which steps were planned; a sequence that ends keeps
its pages until no step in flight has a row of it.
"""

from collections import deque

from cache.disk import DiskCache
from cache.ledger import PageLedger
from cache.pages import TAKEN, PageAllocator
from cache.table import PageTable
from model.step import Outcome, Row, SampledToken, SampleError, StepPlan, StepResult
from server.engine.decoding import Decoding
from server.engine.drafts import Drafts
from server.engine.fair_shares import FairShares
from server.engine.limits import Limits, NeverFits
from server.engine.prefix_reuse import PrefixReuse
from server.engine.sequence import Constraint, Sequence
from server.engine.waiting_queue import WaitingQueue
from server.protocol import Failed, PromptScore, PromptScores, Submit, Token

Event = Token | PromptScores | Failed
"""What a step makes of a sequence, as the API process is told it."""


class OpenSequences:
    """Call `commit` with the result of each step; `submit` and `cancel` in between. `drafts`:
    speculative decoding, if there is any.
    """

    def __init__(
        self,
        limits: Limits,
        drafts: Drafts | None = None,
        ledger: PageLedger | None = None,
        disk: DiskCache | None = None,
    ) -> None:
        if limits.step_tokens < limits.max_running:
            raise ValueError(
                f"step_tokens {limits.step_tokens} is below max_running {limits.max_running}: "
                "each running sequence needs a token"
            )
        self.limits = limits
        self._drafts = drafts
        self._capacity = limits.capacity
        self._page_size = limits.layout.page_size
        windows = [group.window for group in limits.layout.groups if group.window is not None]
        self._borders = {0, *((window - 1) % self._page_size for window in windows)}
        """Positions within a page where a sequence completes a block, or a page slides out of a
        window."""
        self._has_windows = bool(windows)
        self.allocator = PageAllocator(limits.num_pages)
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        self._decoding = Decoding(limits.layout, limits.max_running, self._capacity)
        self._shares = FairShares(limits.max_running, limits.num_pages, self.running, self.waiting)
        self.ended_in_flight: set[Sequence] = set()
        """Sequences that have ended and hold their pages until their last row in flight is
        committed."""
        self._in_flight: deque[list[Sequence]] = deque()
        """For each step in flight, the sequences of its rows; their ids may be used again before
        the step is committed."""
        self._prefix_reuse = PrefixReuse(
            self.allocator, limits.layout, ledger, disk, not limits.is_whole
        )
        self.prefixes = self._prefix_reuse.prefixes
        self._pages_to_clear = self.prefixes.unknown
        """Pages that hold no token yet and may hold NaN. The next step zeroes them: 0 * NaN
        would leak through masked slots."""
        self._started: list[Sequence] = []
        self.num_steps = 0
        """Steps that were committed."""
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

    def submit(self, submit: Submit, constraint: Constraint | None = None) -> None:
        """Adds a sequence to the queue. Raises NeverFits; ValueError for an empty prompt, an id in
        use, or an output that is complete.
        """
        id, prompt, num_output, share = submit.id, submit.prompt, len(submit.output), submit.share
        most = submit.max_new_tokens
        if not prompt or most <= num_output or id in self.running or id in self.waiting:
            raise ValueError(
                f"sequence {id}: {len(prompt)} prompt tokens, {num_output} of {most} generated, or "
                "the id is used"
            )
        sequence = Sequence(
            id,
            prompt,
            [*submit.output],
            most,
            submit.min_new_tokens,
            frozenset(submit.stop_token_ids),
            submit.sampling,
            PageTable(self.allocator, self.limits.layout),
            submit.priority,
            submit.num_top,
            submit.score_prompt,
            constraint,
            submit.salt,
            submit.request,
            share.rank,
            self._shares.account(share),
        )
        if sequence.most_tokens > self._capacity:
            raise NeverFits(
                f"this request may need {sequence.most_tokens} tokens; at most {self._capacity} fit"
            )
        if self._drafts is not None and constraint is None:
            sequence.drafter = self._drafts.begin(sequence)
        self.waiting.put(sequence)

    def cancel(self, id: int) -> None:
        """Ends a sequence and frees its pages. An unknown id, as of a sequence that has just
        finished, is ignored.
        """
        self.waiting.pop(id, None)
        sequence = self.running.pop(id, None)
        if sequence is None:
            return
        self._stop_running(sequence)
        if sequence.num_in_flight:
            self.ended_in_flight.add(sequence)
        else:
            self._release(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        """For a sequence that is no longer in `running`."""
        if sequence.line >= 0:
            self._decoding.leave(sequence)
        self._prefix_reuse.release_claims(sequence)
        self._end_drafts(sequence)
        sequence.end_constraint()

    def _end_drafts(self, sequence: Sequence) -> None:
        if self._drafts is not None:
            self._drafts.end(sequence)

    def _release(self, sequence: Sequence) -> None:
        freed = sequence.table.release()
        if sequence.corrupt:
            self._clear_later(freed)

    def _clear_later(self, pages: list[int]) -> None:
        """Has the next step zero these pages. No record holds for them any more."""
        for page in pages:
            self.allocator.marks[page] = TAKEN
        self._pages_to_clear.extend(pages)

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Applies the result of the oldest step in flight and returns its events. Sequences that
        finish are removed, and their pages freed unless another step in flight has a row of them.
        """
        events: list[Event] = []
        sequences, num_decoding = self._in_flight.popleft(), plan.num_decoding
        self.num_steps += 1
        assert len(result.drawn) == len(sequences), "one outcome for each row"
        if plan.decode is not None:
            self._commit_decode(plan, sequences[:num_decoding], result, events)
        for index, (sequence, row) in enumerate(
            zip(sequences[num_decoding:], plan.listed, strict=True), start=num_decoding
        ):
            self._commit_row(index, sequence, row, result, events)
        return events

    def _commit_decode(
        self,
        plan: StepPlan,
        sequences: list[Sequence],
        result: StepResult,
        events: list[Event],
    ) -> None:
        """`_commit_row` for the rows of `plan.decode`: what each of them takes is the largest part
        of a step's work on the host.
        """
        assert plan.decode is not None
        ends = (plan.decode.positions_R + 1).tolist()
        account, num_charged, num_computed = sequences[0].account, 0, 0
        for index, (sequence, end, drawn) in enumerate(
            zip(sequences, ends, result.drawn, strict=False)
        ):
            if type(drawn) is not SampledToken or self.running.get(sequence.id) is not sequence:
                self._commit_row(index, sequence, plan.rows[index], result, events)
                continue
            sequence.on_committed(draws=True)
            self._prefix_reuse.record(sequence, end)
            if end % self._page_size in self._borders:
                self._on_computed(sequence, end - 1, end)
            if sequence.account is not account:
                account.charge(0, num_charged)
                account, num_charged = sequence.account, 0
            num_charged += 1
            number, finish = len(sequence.output), sequence.append(drawn.token)
            events.append(_event(sequence.id, number, drawn, finish))
            num_computed += 1
            if finish is not None:
                self.cancel(sequence.id)
        account.charge(0, num_charged)
        self.num_computed_tokens += num_computed

    def _commit_row(
        self,
        index: int,
        sequence: Sequence,
        row: Row,
        result: StepResult,
        events: list[Event],
    ) -> None:
        """Applies the result of one row."""
        drawn = result.drawn[index]
        sequence.on_committed(row.sample is not None)
        if self.running.get(row.sequence) is not sequence:
            return self._discard(sequence, drawn)
        if row.drafts and _is_corrupt(drawn):
            return self._recompute_without_drafts(sequence)
        outcomes: list[Outcome] = []
        end = row.start + len(row.tokens)
        if row.drafts:
            outcomes += result.accepted.get(index, ())
            end = self._accept_drafts(sequence, row, outcomes)
        self.num_computed_tokens += end - row.start
        if index in result.scored:
            first = sequence.num_scored
            scored, forced = sequence.take_scored(list(result.scored[index]))
            prompt_scores = [PromptScore(s.token, s.logprob, s.rank, [*s.top]) for s in scored]
            if not isinstance(drawn, SampleError):
                if prompt_scores:
                    events.append(PromptScores(sequence.id, first, prompt_scores))
                outcomes += forced
        if not isinstance(drawn, SampleError):
            self._prefix_reuse.record(sequence, end)
            self._on_computed(sequence, row.start, end)
        if drawn is not None:
            outcomes.append(drawn)
        self._append_tokens(sequence, outcomes, events)

    def take_masks(self) -> list[Event]:
        """Gives sequences the masks that have arrived for them, and returns an event for each whose
        constraint has failed.
        """
        events: list[Event] = []
        for sequence in [
            s
            for s in self.running.values()
            if s.awaits_mask and s.constraint is not None and not s.constraint.is_pending
        ]:
            if (failure := sequence.take_mask()) is not None:
                events.append(_event(sequence.id, len(sequence.output), failure, None))
                self.cancel(sequence.id)
        return events

    def _on_computed(self, sequence: Sequence, start: int, end: int) -> None:
        """Publishes the blocks completed by tokens `start` .. `end` - 1, and drops pages that slid
        out of attention windows.
        """
        if start // self._page_size != end // self._page_size:
            self._prefix_reuse.publish(sequence, start, end)
        if self._has_windows:
            sequence.table.drop(end)

    def _discard(self, sequence: Sequence, drawn: Outcome | None) -> None:
        """Discards a row of a sequence that has ended since; its pages may still have become
        corrupt.
        """
        if _is_corrupt(drawn):
            self._mark_corrupt(sequence, found=True)
        if not sequence.num_in_flight:
            self.ended_in_flight.remove(sequence)
            self._release(sequence)

    def _mark_corrupt(self, sequence: Sequence, found: bool) -> None:
        """Marks the pages of a sequence as possibly non-finite; with `found`, the cached blocks
        that it reused too.
        """
        sequence.corrupt = True
        self._prefix_reuse.retract(sequence, found)

    def _accept_drafts(self, sequence: Sequence, row: Row, accepted: list[Outcome]) -> int:
        """Accounts for the accepted draft tokens of a row and returns the position after the last
        computed token.
        """
        end = row.start + len(row.tokens) - row.drafts + len(accepted)
        sequence.take_accepted(
            row, [draw.token for draw in accepted if isinstance(draw, SampledToken)]
        )
        self.num_drafted_tokens += row.drafts
        self.num_accepted_tokens += len(accepted)
        if row.drafts > len(accepted):
            sequence.table.trim(end)
        return end

    def _recompute_without_drafts(self, sequence: Sequence) -> None:
        """Non-finite logits may come from a rejected draft, through masked slots: recomputes the
        sequence without drafts on zeroed pages. It stays in the running set.
        """
        self._end_drafts(sequence)
        sequence.drafter, sequence.num_computed, sequence.num_recorded = None, 0, 0
        self._clear_later(sequence.table.release())

    def _append_tokens(
        self,
        sequence: Sequence,
        outcomes: list[Outcome],
        events: list[Event],
    ) -> None:
        """Appends tokens to a sequence until it ends, with an event for each."""
        for outcome in outcomes:
            index, finish = len(sequence.output), None
            if isinstance(outcome, SampledToken):
                finish = sequence.append(outcome.token)
                sequence.account.charge(0, 1)
            events.append(_event(sequence.id, index, outcome, finish))
            if isinstance(outcome, SampleError):
                self._mark_corrupt(sequence, found=_is_corrupt(outcome))
            elif finish is None:
                continue
            self.cancel(sequence.id)
            break


def _event(id: int, index: int, drawn: Outcome, finish: str | None) -> Event:
    """One more token of a sequence, with its index in the output and the finish reason if it is the
    last; or the error that ended it.
    """
    if isinstance(drawn, SampledToken):
        return Token(id, index, drawn.token, drawn.logprob, finish, drawn.top, drawn.vector)
    return Failed(id, drawn.reason, drawn.refused, drawn.code)


def _is_corrupt(drawn: Outcome | None) -> bool:
    """Whether the pages that a row wrote or read may hold non-finite values."""
    return isinstance(drawn, SampleError) and drawn.code == "numerical_error"
