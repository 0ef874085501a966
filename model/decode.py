"""Decode rows: the rows of a step that compute one token of a sequence and draw the next one, in
arrays that stay from step to step.

Most rows of a server are such rows, and from one step to the next only their positions change: a
DecodeTable has a line for each, which is written when a sequence joins it or gets a page. A step's
lists for the kernels are copies of its columns. Plain numbers, no torch. Lines are without gaps:
where a sequence leaves, the last line takes its place. It knows nothing of prompts, limits and
requests.

Shape letters: R lines of the table, F fields of a line, N settings of a draw, W pages of a line.
"""

from array import array
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from cache.layout import CacheLayout, pages_for
from model.draw_words import NUM_SETTINGS, needs_more, settings_SN
from model.step import PENDING, Row, Sample, Sampling

Numbers = NDArray[np.int32]
Pages = Sequence["array[int]"]
"""The pages of a sequence for each group of layers, as in Row.pages."""
NUM_FIELDS = 3
NO_SAMPLE = Sample(Sampling(), (), ())
"""Of a row that draws nothing."""
NO_LINE = -1
"""In place of a position: the line is of no sequence."""


def table_widths(layout: CacheLayout, num_keys: int) -> list[int]:
    """For each group of layers the pages of a sequence of `num_keys` tokens."""
    return [pages_for(num_keys, layout.page_size) * group.num_stacks for group in layout.groups]


def lines_of(rows: Sequence[Row], num_decoding: int) -> list[int]:
    """For each token of these rows its line in a DecodeTable of them, which begins with so many
    lines of others.
    """
    draws = count(num_decoding)
    others = count(num_decoding + sum(row.sample is not None for row in rows))
    return [
        next(draws if place == len(row.tokens) - 1 and row.sample is not None else others)
        for row in rows
        for place in range(len(row.tokens))
    ]


class DecodeTable:
    """The lines of at most `most_rows` sequences of at most `most_tokens` tokens. Columns have
    values for the next step.
    """

    def __init__(self, layout: CacheLayout, most_rows: int, most_tokens: int) -> None:
        self.ids: list[int] = []
        self.pages: list[Pages] = []
        self.samples: list[Sample] = []
        self.fields_FR = np.zeros((NUM_FIELDS, most_rows), np.int32)
        self.positions_R, self.tokens_R, self.sources_R = self.fields_FR
        """Position of the token that the next step computes, NO_LINE from the last line on; that
        token, where it is known; where the previous step draws it: the index of the draw among all
        of that step, and PENDING where it is known.
        """
        self.positions_R[:], self.sources_R[:] = NO_LINE, PENDING
        self.settings_RN = np.zeros((most_rows, NUM_SETTINGS), np.int32)
        """Of the draw after that token (model.draw_words)."""
        self._num_needing = 0
        """Of lines whose draw needs more than these."""
        self.tables = [
            np.zeros((most_rows, width), np.int32) for width in table_widths(layout, most_tokens)
        ]
        """For each group of layers the pages of each line, as in Row.pages. What follows a line's
        last page is undefined, and so are pages that have slid out of a window.
        """
        self._counting_R = np.arange(most_rows, dtype=np.int32)

    @classmethod
    def of(
        cls,
        layout: CacheLayout,
        rows: Sequence[Row],
        sources: Sequence[int],
        decode: "DecodeStep | None" = None,
    ) -> "DecodeTable":
        """A table of the lines of `decode`, then of the last tokens of those of these rows of the
        same step that draw, then of all other tokens, whose draws mean nothing. So lines that draw
        are numbered as draws are. `sources` of the rows' last tokens: see `sources_R`.
        """
        num_decoding, longest = (0, 0) if decode is None else (len(decode), decode.num_keys)
        ends = [row.start + len(row.tokens) for row in rows]
        table = cls(
            layout, num_decoding + sum(len(row.tokens) for row in rows), max([longest, *ends])
        )
        if decode is not None:
            table.ids = decode.ids[:]
            table.pages = decode.pages[:]
            table.samples = decode.samples[:]
            table.fields_FR[:, :num_decoding] = decode.fields_FR
            table.settings_RN[:num_decoding] = decode.settings_RN
            table._num_needing = sum(map(needs_more, decode.samples)) if decode.needs_samples else 0
            for mine, theirs in zip(table.tables, decode.table.tables, strict=True):
                mine[:num_decoding] = theirs[:num_decoding, : mine.shape[1]]
        drawing = [
            (row.sequence, row.pages, row.sample, end - 1, row.tokens[-1], source)
            for row, end, source in zip(rows, ends, sources, strict=True)
            if row.sample is not None
        ]
        if drawing:
            table.append(*zip(*drawing, strict=True))
        for row in rows:
            if others := len(row.tokens) - (row.sample is not None):
                table._extend(row, others)
        return table

    def __len__(self) -> int:
        return len(self.ids)

    def append(
        self,
        ids: Sequence[int],
        pages: Sequence[Pages],
        samples: Sequence[Sample],
        positions: Sequence[int],
        tokens: Sequence[int],
        sources: Sequence[int],
    ) -> None:
        """Adds lines, one at least, by columns: an array's access takes as long for one number as
        for hundreds.
        """
        lines = slice(len(self.ids), len(self.ids) + len(ids))
        self.ids += ids
        self.pages += pages
        self.samples += samples
        self.positions_R[lines], self.tokens_R[lines] = positions, tokens
        self.sources_R[lines] = sources
        self.settings_RN[lines] = settings_SN(samples)
        self._num_needing += sum(map(needs_more, samples))
        for group, table in enumerate(self.tables):
            width = table.shape[1]
            known = [listed[group][:width] for listed in pages]
            counts_R1 = np.array([[len(each)] for each in known])
            table[lines][np.arange(width) < counts_R1] = np.frombuffer(b"".join(known), np.int64)

    def _extend(self, row: Row, count: int) -> None:
        """Adds lines of a row's first tokens, which are those of no sequence's draw."""
        lines = slice(len(self.ids), len(self.ids) + count)
        self.ids += [NO_LINE] * count
        self.pages += [row.pages] * count
        self.samples += [NO_SAMPLE] * count
        self.positions_R[lines] = range(row.start, row.start + count)
        self.tokens_R[lines] = row.tokens[:count]
        for table, listed in zip(self.tables, row.pages, strict=True):
            known = listed[: table.shape[1]]
            table[lines, : len(known)] = known

    def on_pages(self, line: int, num_known: Sequence[int]) -> None:
        """Takes over the pages that a line's sequence has got after the first `num_known` of each
        group.
        """
        for table, listed, known in zip(self.tables, self.pages[line], num_known, strict=True):
            table[line, known : len(listed)] = listed[known:]

    def remove(self, line: int) -> None:
        """Removes a line. The last one gets its number."""
        last = len(self.ids) - 1
        self._num_needing -= needs_more(self.samples[line])
        lists: list[list[Any]] = [self.ids, self.pages, self.samples]
        for listed in lists:
            listed[line] = listed[last]
            del listed[last]
        self.fields_FR[:, line] = self.fields_FR[:, last]
        for column_R in (self.settings_RN, *self.tables):
            column_R[line] = column_R[last]
        self.positions_R[last] = NO_LINE

    def know(self, tokens: Sequence[int]) -> None:
        """The tokens of all lines are these, as no step is in flight."""
        self.tokens_R[: len(tokens)] = tokens
        self.sources_R[: len(tokens)] = PENDING

    def advance(self) -> "DecodeStep":
        """The step that computes one token of each line. The table's columns are those for the step
        after it from now on, whose tokens it draws, as the first ones that it draws.
        """
        num_rows = len(self.ids)
        step = DecodeStep(self, self._num_needing > 0)
        self.positions_R[:num_rows] += 1
        self.settings_RN[:num_rows, -1] += 1
        self.sources_R[:num_rows] = self._counting_R[:num_rows]
        return step


class DecodeStep:
    """One step's decode rows. Its numbers are copies; `table` has the pages as they are until the
    next step is planned.
    """

    __slots__ = (
        "fields_FR",
        "ids",
        "needs_samples",
        "pages",
        "positions_R",
        "samples",
        "settings_RN",
        "sources_R",
        "table",
        "tokens_R",
    )

    def __init__(self, table: DecodeTable, needs_samples: bool) -> None:
        num_rows = len(table)
        self.table = table
        self.needs_samples = needs_samples
        """Whether some draw needs more than `settings_RN`."""
        self.ids, self.pages, self.samples = table.ids[:], table.pages[:], table.samples[:]
        self.fields_FR, self.settings_RN = (
            table.fields_FR[:, :num_rows].copy(),
            table.settings_RN[:num_rows].copy(),
        )
        self.positions_R, self.tokens_R, self.sources_R = self.fields_FR

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_keys(self) -> int:
        """The longest context."""
        return int(self.positions_R.max()) + 1

    def list_pages(self, widths: Sequence[int], offsets_GR: Numbers, pages_P: Numbers) -> None:
        """Writes the page tables of all groups one after the other, lines of these widths, and
        where each row's line begins.
        """
        begin, num_rows = 0, len(self)
        for width, offsets_R, table in zip(widths, offsets_GR, self.table.tables, strict=True):
            end = begin + num_rows * width
            pages_P[begin:end].reshape(num_rows, width)[:] = table[:num_rows, :width]
            offsets_R[:num_rows] = np.arange(begin, end, width)
            begin = end

    def rows(self) -> list[Row]:
        """The same as Rows, for what computes one row like the other."""
        columns = (
            self.ids,
            self.token_ids_R.tolist(),
            self.positions_R.tolist(),
            self.pages,
            self.current_samples(),
        )
        return [
            Row(id, [token], position, pages, sample)
            for id, token, position, pages, sample in zip(*columns, strict=True)
        ]

    @property
    def token_ids_R(self) -> Numbers:
        """The tokens to compute; PENDING where the previous step draws one."""
        return np.where(self.sources_R >= 0, PENDING, self.tokens_R)

    def current_samples(self) -> list[Sample]:
        """The samples, which know whether the last token of each sequence is not in its output
        yet.
        """
        unseen = (self.sources_R >= 0).tolist()
        return [
            sample if sample.num_unseen == is_unseen else replace(sample, num_unseen=int(is_unseen))
            for sample, is_unseen in zip(self.samples, unseen, strict=True)
        ]
