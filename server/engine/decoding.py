"""Decoding: the running sequences that compute one token a step, which are planned and accounted
for together.

A sequence joins when its next row computes a single token and nothing but the model decides how the
next one is drawn (see Sequence.can_decode); it leaves when it ends, is preempted, its last token
has been planned, or pages are short. Invariant: line i of the table is that of `sequences[i]`, and
each of them has one uncomputed token, known or drawn by the step planned last. It decides nothing:
which sequences join, and what pages they get, is the scheduler's.

Shape letters: R lines of the table.
"""

from collections.abc import Iterator

import numpy as np

from cache.layout import CacheLayout
from model.decode import DecodeStep, DecodeTable
from model.step import PENDING, Sample
from server.engine.sequence import Sequence


class Decoding:
    """The sequences of a scheduler that decode, with a DecodeTable of them."""

    def __init__(self, layout: CacheLayout, most_rows: int, most_tokens: int) -> None:
        self.sequences: list[Sequence] = []
        self._table = DecodeTable(layout, most_rows, most_tokens)
        self._limits_R = np.zeros(most_rows, np.int32)
        """The first position for which its page table has no slot, or which is not computed because
        the token at it ends the sequence."""

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence, source: int) -> None:
        """Adds a sequence. `source`: index of the draw of its last token in the step planned last,
        if that is in flight.
        """
        sample = Sample(
            sequence.sampling,
            sequence.prompt,
            sequence.output,
            (),
            sequence.num_top,
            None,
            sequence.num_unseen,
        )
        self._table.append(
            [sequence.id],
            [sequence.table.pages],
            [sample],
            [sequence.num_tokens - 1],
            [sequence.last_token],
            [source if sequence.num_unseen else PENDING],
        )
        sequence.line = len(self.sequences)
        self._limits_R[sequence.line] = _limit(sequence)
        self.sequences.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence."""
        line, last = sequence.line, len(self.sequences) - 1
        self._table.remove(line)
        self._limits_R[line] = self._limits_R[last]
        self.sequences[line] = self.sequences[last]
        self.sequences[line].line = line
        del self.sequences[last]
        sequence.line = -1

    def know_tokens(self) -> None:
        """No step is in flight, so that the last token of each is known."""
        self._table.know([sequence.last_token for sequence in self.sequences])

    def at_limit(self) -> list[Sequence]:
        """Those whose next token has no slot yet. Those whose last token is in flight leave."""
        count = len(self.sequences)
        lines = (self._table.positions_R[:count] >= self._limits_R[:count]).nonzero()[0]
        if not len(lines):
            return []
        found = [self.sequences[line] for line in lines.tolist()]
        for sequence in found:
            if sequence.num_tokens == sequence.most_tokens:
                self.leave(sequence)
        return [sequence for sequence in found if sequence.line >= 0]

    def grow(self, sequence: Sequence) -> None:
        """Gives a sequence the pages for its next token, which the pool has."""
        known = [len(pages) for pages in sequence.table.pages]
        sequence.table.grow(sequence.num_tokens)
        self._table.on_pages(sequence.line, known)
        self._limits_R[sequence.line] = _limit(sequence)

    def launch(self) -> DecodeStep:
        """The step that computes a token of each, which counts as in flight. It reads the table's
        pages until the next one is planned.
        """
        for sequence in self.sequences:
            sequence.on_launched(1, draws=True)
        return self._table.advance()

    def clear(self) -> Iterator[Sequence]:
        """Removes all and yields them."""
        while self.sequences:
            sequence = self.sequences[-1]
            self.leave(sequence)
            yield sequence


def _limit(sequence: Sequence) -> int:
    return min(sequence.table.room, sequence.most_tokens - 1)
