"""Single tokens of a step as kernels read them: positions and page tables, in one array of numbers.
No Triton.

A page table is that of the whole sequence, of which kernels read what a layer's window touches:
page i of stack j at i * num_stacks + j. So a table changes only where its sequence gets a page, and
everything else follows from the positions.

Shape letters: B rows of one token, W pages of a table, N numbers of a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from torch import Tensor

from cache.layout import CacheLayout, pages_for
from model.decode import NO_LINE, DecodeStep, Numbers, aligned, table_widths

MOST_PAGES = 2**18
"""Limit of all rows' tables together, 1 MiB, up to which steps are captured."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the lists of a step of single tokens: the same for all steps of `num_rows` rows with
    contexts of one class.
    """

    num_rows: int
    num_keys: int
    """The longest context of the class."""
    several: bool = False
    """Whether sequences may have several rows, where the kernels of a step with one for each are
    others."""


@dataclass(frozen=True, slots=True)
class Singles:
    """Single tokens of a step, on the device."""

    positions_B: Tensor
    """A row at NO_LINE is padding."""
    tables_BW: tuple[Tensor, ...]
    """For each group of layers a line of pages for each row."""
    num_keys: int
    """The longest context that launches are made for."""
    tokens_B: Tensor | None = None
    """Index of each row's token among the step's; None: the row's own."""
    several: bool = False
    """Whether a row may read the keys of another: then all are stored before any is read."""


def class_of(num_keys: int, page_size: int) -> int:
    """The longest context of the class of contexts of `num_keys`: a page, or twice as much as the
    class before.
    """
    return page_size << (pages_for(num_keys, page_size) - 1).bit_length()


def classes(page_size: int, longest: int) -> Iterator[int]:
    """The longest contexts of the classes, up to the class of `longest`."""
    num_keys = 0
    while num_keys < longest:
        num_keys = class_of(num_keys + 1, page_size)
        yield num_keys


def shape_of(num_keys: int, num_rows: int, page_size: int) -> Shape | None:
    """The shape of so many rows with contexts of up to `num_keys`; None if the tables would be too
    long.
    """
    longest = class_of(num_keys, page_size)
    return Shape(num_rows, longest) if num_rows * longest // page_size <= MOST_PAGES else None


def _sizes(shape: Shape, layout: CacheLayout, indexed: bool) -> list[tuple[int, ...]]:
    """Sizes of the lists in the order in which they are concatenated: positions, indices of tokens,
    and the groups' tables.
    """
    tables = ((shape.num_rows, width) for width in table_widths(layout, shape.num_keys))
    return [*((aligned(shape.num_rows),) for _ in range(1 + indexed)), *tables]


def packed(
    step: DecodeStep, shape: Shape, layout: CacheLayout, tokens: Sequence[int] | None = None
) -> Numbers:
    """The lists of a step, padded to `shape`. `tokens`: the indices of its tokens among those of a
    larger step, if not their own.
    """
    sizes = _sizes(shape, layout, tokens is not None)
    numbers_N, num_rows = np.zeros(sum(map(prod, sizes)), np.int32), len(step)
    lists = (
        part.reshape(size)
        for part, size in zip(
            np.split(numbers_N, np.cumsum([prod(size) for size in sizes])[:-1]), sizes, strict=True
        )
    )
    for values in (step.positions_R, tokens):
        if values is not None:
            column = next(lists)
            column[:num_rows], column[num_rows:] = values, NO_LINE
    step.copy_tables(list(lists))
    return numbers_N


def unpacked(words_N: Tensor, shape: Shape, layout: CacheLayout, indexed: bool = False) -> Singles:
    """The lists that `packed` has concatenated, on the device."""
    sizes = _sizes(shape, layout, indexed)
    positions_B, *others = (
        x.view(size) for x, size in zip(words_N.split(list(map(prod, sizes))), sizes, strict=True)
    )
    return Singles(
        positions_B[: shape.num_rows],
        tuple(others[indexed:]),
        shape.num_keys,
        others[0] if indexed else None,
    )
