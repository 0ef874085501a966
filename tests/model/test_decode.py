"""DecodeTable against a plain list of rows: what joins, leaves, gets pages and advances is what the
columns and the Rows say.
"""

import random
from array import array
from dataclasses import dataclass

import pytest

from cache.layout import CacheLayout
from model.decode import NO_LINE, DecodeTable, lines_of
from model.step import PENDING, Row, Sample, Sampling

LAYOUT = CacheLayout.of(3, [None, 4, 4], 2)
MOST_ROWS, MOST_TOKENS = 5, 20


@dataclass
class Plain:
    """What a line stands for."""

    id: int
    pages: "list[array[int]]"
    sample: Sample
    position: int
    token: int
    source: int
    index: int = 0
    """Of its next draw."""


def told(table: DecodeTable) -> list[tuple[object, ...]]:
    return [
        (row.sequence, list(row.tokens), row.start, row.pages, row.sample and row.sample.num_unseen)
        for row in table.advance().rows()
    ]


class Both:
    """A table, the lines that it should have, and what happens to both."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.table, self.lines, self.number = (
            rng,
            DecodeTable(LAYOUT, MOST_ROWS, MOST_TOKENS),
            list[Plain](),
            0,
        )

    def join(self) -> None:
        if len(self.lines) == MOST_ROWS:
            return
        self.number += 1
        position = self.rng.randrange(5)
        pages = [
            array("q", self.rng.sample(range(90), (position // 2 + 1) * group.num_stacks))
            for group in LAYOUT.groups
        ]
        source = self.rng.choice((PENDING, self.rng.randrange(9)))
        line = Plain(
            self.number,
            pages,
            Sample(Sampling(seed=self.number), [1], []),
            position,
            self.rng.randrange(50),
            source,
        )
        self.table.append([line.id], [pages], [line.sample], [position], [line.token], [source])
        self.lines.append(line)
        assert len(self.table) == len(self.lines)

    def leave(self) -> None:
        place = self.rng.randrange(len(self.lines))
        self.table.remove(place)
        self.lines[place] = self.lines[-1]
        del self.lines[-1]

    def pages(self) -> None:
        place = self.rng.randrange(len(self.lines))
        known = [len(pages) for pages in self.lines[place].pages]
        if max(known) < MOST_TOKENS // 2:
            for group, pages in zip(LAYOUT.groups, self.lines[place].pages, strict=True):
                pages.extend(self.rng.sample(range(90), group.num_stacks))
            self.table.on_pages(place, known)

    def know(self) -> None:
        for line in self.lines:
            line.token, line.source = self.rng.randrange(50), PENDING
        self.table.know([line.token for line in self.lines])

    def step(self) -> None:
        expected = [
            (
                line.id,
                [line.token if line.source < 0 else PENDING],
                line.position,
                line.pages,
                int(line.source >= 0),
            )
            for line in self.lines
        ]
        indices = [line.index for line in self.lines]
        assert self.table.settings_RN[: len(indices), -1].tolist() == indices
        assert told(self.table) == expected
        for place, line in enumerate(self.lines):
            line.position, line.source, line.index = line.position + 1, place, line.index + 1


@pytest.mark.parametrize("seed", range(200))
def test_it_is_a_list_of_rows(seed: int) -> None:
    rng = random.Random(seed)
    both = Both(rng)
    for _ in range(60):
        what = (
            rng.choice((both.leave, both.pages, both.know, both.step, both.step))
            if both.lines and rng.random() < 0.7
            else both.join
        )
        what()
        table, lines = both.table, both.lines
        assert table.ids == [line.id for line in lines]
        assert table.positions_R.tolist() == [line.position for line in lines] + [NO_LINE] * (
            MOST_ROWS - len(lines)
        )
        for group, listed in enumerate(table.tables):
            for place, line in enumerate(lines):
                assert listed[place, : len(line.pages[group])].tolist() == list(line.pages[group])


def test_of_rows_is_those_rows() -> None:
    table = DecodeTable(LAYOUT, MOST_ROWS, MOST_TOKENS)
    for id, position in enumerate((0, 7, 19)):
        pages = [
            array("q", range(position // 2 * group.num_stacks + group.num_stacks))
            for group in LAYOUT.groups
        ]
        table.append(
            [id],
            [pages],
            [Sample(Sampling(), [1], [], num_unseen=id % 2)],
            [position],
            [5 + id],
            [PENDING if id % 2 == 0 else id],
        )
    step = table.advance()
    again = DecodeTable.of(LAYOUT, step.rows(), step.sources_R.tolist()).advance()
    assert again.rows() == step.rows() and again.positions_R.tolist() == [0, 7, 19]
    for whole, part in zip(table.tables, again.table.tables, strict=True):
        assert (whole[:1, : part.shape[1] // 10] == part[:1, : part.shape[1] // 10]).all() and part[
            2
        ].any()


def test_rows_follow_the_lines_of_a_step() -> None:
    table, rows = DecodeTable(LAYOUT, MOST_ROWS, MOST_TOKENS), []
    for id, position in enumerate((3, 9, 5, 18)):
        pages = [
            array("q", range(id, id + (position // 2 + 1) * group.num_stacks))
            for group in LAYOUT.groups
        ]
        sample = Sample(
            Sampling(seed=id, top_p=0.5 if id == 1 else 1.0), [1], [], num_unseen=id % 2
        )
        source = PENDING if id % 2 == 0 else id
        table.append([id], [pages], [sample], [position], [5 + id], [source])
        rows.append(table.advance().rows()[-1] if id > 1 else None)
        if id == 1:
            step = table.advance()
    listed = [row for row in rows if row is not None]
    both = DecodeTable.of(LAYOUT, listed, [PENDING, 7], step).advance()
    assert [row.sequence for row in both.rows()] == [0, 1, 2, 3] and both.sources_R.tolist() == [
        *step.sources_R.tolist(),
        PENDING,
        7,
    ]
    assert (
        both.rows()[:2] == step.rows()
        and both.settings_RN[:2].tolist() == step.settings_RN.tolist()
        and both.needs_samples
    )
    for line, row in enumerate(both.rows()):
        for group, listed_RW in enumerate(both.table.tables):
            end = (row.start // 2 + 1) * LAYOUT.groups[group].num_stacks
            assert listed_RW[line, :end].tolist() == list(row.pages[group][:end])


def test_each_token_of_a_row_is_a_line_and_those_that_draw_come_first() -> None:
    def pages(id: int, count: int) -> "list[array[int]]":
        return [
            array("q", range(id * 100, id * 100 + -(-count // 2) * group.num_stacks))
            for group in LAYOUT.groups
        ]

    table = DecodeTable(LAYOUT, MOST_ROWS, MOST_TOKENS)
    table.append([9], [pages(9, 8)], [Sample(Sampling(seed=4), [1], [])], [7], [3], [PENDING])
    draws = Sample(Sampling(top_p=0.5), [1], [2])
    rows = [
        Row(0, [5, 6, 7], 4, pages(0, 7), None),
        Row(1, [8, 9, 10], 0, pages(1, 3), draws),
        Row(2, [PENDING], 6, pages(2, 7), draws),
    ]
    step = DecodeTable.of(LAYOUT, rows, [PENDING, PENDING, 11], table.advance()).advance()
    assert (
        step.ids == [9, 1, 2, NO_LINE, NO_LINE, NO_LINE, NO_LINE, NO_LINE]
        and step.needs_samples
        and step.num_keys == 8
    )
    assert step.positions_R.tolist() == [7, 2, 6, 4, 5, 6, 0, 1] and step.fields_FR[1].tolist() == [
        3,
        10,
        PENDING,
        5,
        6,
        7,
        8,
        9,
    ]
    assert step.sources_R.tolist() == [PENDING, PENDING, 11, *[PENDING] * 5]
    assert lines_of(rows, 1) == [3, 4, 5, 6, 7, 1, 2]
    for line, row in enumerate([rows[1], rows[2], *[rows[0]] * 3, *[rows[1]] * 2], start=1):
        for group, listed in enumerate(step.table.tables):
            assert listed[line, : len(row.pages[group])].tolist() == list(row.pages[group])
    # The draws of the step after it are those of the lines that draw.
    assert step.table.sources_R[:3].tolist() == [0, 1, 2]
