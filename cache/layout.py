"""CacheLayout: which layers' keys and values share a page, and how many pages a sequence takes.
Pure arithmetic, no torch.

A page holds K and V of `page_size` tokens in some layers. Layers that keep K and V of the same
token positions in the same number of columns form a group; a model whose layers are all alike is
one group whose pages hold all layers. Else every group's layers are stacked into pages of equal
size, so that one free list serves all groups and no memory is reserved for any of them. A layer
that reads the keys and values of another has that one's place and takes no memory.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens need: the ceiling of tokens over page size."""
    return -(-num_tokens // page_size)


class Columns(NamedTuple):
    """Columns of one token's key and value in one layer."""

    key: int
    value: int
    value_in_key: bool = False
    """The value is the first columns of the key, and takes no memory of its own."""

    @property
    def stored(self) -> int:
        """Numbers that a token takes."""
        return self.key + (0 if self.value_in_key else self.value)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep keys and values of the same token positions, in the same columns."""

    layers: tuple[int, ...]
    window: int | None
    """Keys that a token attends to, its own included; None: no limit."""
    columns: Columns
    layers_per_page: int
    num_stacks: int
    """Pages that `page_size` tokens of all these layers take."""

    def first_seen(self, position: int) -> int:
        """The first position that a token at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's keys and values are: group, stack of pages within it, layer within the
    page.
    """

    group: int
    stack: int
    layer: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model's layers for pages of `page_size` tokens."""

    page_size: int
    groups: tuple[LayerGroup, ...]
    token_numbers: int
    """Numbers of a page for each of its tokens: those of the layers that share it and, where the
    groups' sizes have no common divisor that fits, of layers that there are not."""
    places: tuple[Place, ...]
    """The place of each layer."""

    @classmethod
    def of(
        cls,
        num_layers: int,
        windows: Sequence[int | None],
        page_size: int,
        columns: Sequence[Columns] = (),
        sources: Sequence[int] = (),
    ) -> "CacheLayout":
        """The layout of a model. `windows`: the window of each layer, or empty where no layer has
        one. `columns`: of each layer, or empty where only counts of pages are of interest.
        `sources`: for each layer the one whose keys and values it reads, or empty where all have
        their own.
        """
        read = sources or range(num_layers)
        kinds: dict[tuple[int | None, Columns], list[int]] = {}
        for layer in range(num_layers):
            if read[layer] == layer:
                window = windows[layer] if windows else None
                kind = window, columns[layer] if columns else Columns(1, 1)
                kinds.setdefault(kind, []).append(layer)
        numbers = _numbers([(each.stored, len(layers)) for (_, each), layers in kinds.items()])
        groups = tuple(
            LayerGroup(
                tuple(layers),
                window,
                each,
                per_page := numbers // each.stored,
                pages_for(len(layers), per_page),
            )
            for (window, each), layers in kinds.items()
        )
        places = {
            layer: Place(number, *divmod(index, group.layers_per_page))
            for number, group in enumerate(groups)
            for index, layer in enumerate(group.layers)
        }
        return cls(page_size, groups, numbers, tuple(places[layer] for layer in read))

    @property
    def stacks(self) -> list[LayerGroup]:
        """For each page of a block, in order, the group whose layers it holds."""
        return [group for group in self.groups for _ in range(group.num_stacks)]

    @property
    def pages_per_block(self) -> int:
        """Pages that `page_size` consecutive tokens of a sequence take, in all groups together."""
        return len(self.stacks)

    def most_pages(self, num_tokens: int, step_tokens: int = 1) -> int:
        """The most pages that a sequence of `num_tokens` tokens ever holds, if a step computes up
        to `step_tokens` of them.
        """
        total = 0
        for group in self.groups:
            pages = pages_for(num_tokens, self.page_size)
            if group.window is not None:
                # The window before the step's first token and the step's own tokens, for any
                # alignment with page borders.
                pages = min(
                    pages,
                    pages_for(group.window - 1 + step_tokens + self.page_size - 1, self.page_size),
                )
            total += pages * group.num_stacks
        return total

    def sequences(self, num_pages: int, num_tokens: int, step_tokens: int) -> int:
        """How many sequences of `num_tokens` tokens fit together. All share one step, so its tokens
        are counted once.
        """
        one = self.most_pages(num_tokens, step_tokens)
        return 0 if one > num_pages else 1 + (num_pages - one) // self.most_pages(num_tokens)

    def most_tokens(self, num_pages: int, step_tokens: int, max_context: int) -> int:
        """The longest sequence, of at most `max_context` tokens, that `num_pages` pages can always
        hold; 0 if not even one token fits.
        """
        return bisect_right(
            range(1, max_context + 1),
            num_pages,
            key=lambda num_tokens: self.most_pages(num_tokens, step_tokens),
        )


def _numbers(groups: Sequence[tuple[int, int]]) -> int:
    """The numbers of a token in a page, so that groups of layers, (numbers of a token in one layer,
    layers) each, take the least memory and then the fewest pages.
    """
    widest = max(width for width, _ in groups)
    sizes = {width * count for width, most in groups for count in range(1, most + 1)}

    def memory(size: int) -> int:
        return size * sum(pages_for(count, size // width) for width, count in groups)

    return min((size for size in sizes if size >= widest), key=lambda size: (memory(size), -size))
