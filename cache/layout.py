"""CacheLayout: which layers' keys and values share a page, and how many pages a sequence takes.
Pure arithmetic, no torch.

A page holds K and V of `page_size` tokens in `layers_per_page` layers. Layers that keep K and V of
the same token positions, because they have the same window or none, form a group; a model without
sliding windows is one group whose pages hold all layers. With windows, every group's layers are
stacked into pages of equal size (the greatest common divisor of the groups' sizes), so that one
free list serves all groups and no memory is reserved for either kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens need: the ceiling of tokens over page size."""
    return -(-num_tokens // page_size)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep keys and values of the same token positions."""

    layers: tuple[int, ...]
    window: int | None
    """Keys that a token attends to, its own included; None: no limit."""
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
    layers_per_page: int
    places: tuple[Place, ...]
    """The place of each layer."""

    @classmethod
    def of(cls, num_layers: int, windows: Sequence[int | None], page_size: int) -> "CacheLayout":
        """The layout of a model. `windows`: the window of each layer, or empty where no layer has
        one.
        """
        by_window: dict[int | None, list[int]] = {}
        for layer in range(num_layers):
            by_window.setdefault(windows[layer] if windows else None, []).append(layer)
        per_page = gcd(*(len(layers) for layers in by_window.values()))
        groups = tuple(
            LayerGroup(tuple(layers), window, len(layers) // per_page)
            for window, layers in by_window.items()
        )
        places = {
            layer: Place(number, index // per_page, index % per_page)
            for number, group in enumerate(groups)
            for index, layer in enumerate(group.layers)
        }
        return cls(page_size, groups, per_page, tuple(places[layer] for layer in range(num_layers)))

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
        low, high = 0, max_context
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high)
                if self.most_pages(middle, step_tokens) <= num_pages
                else (low, middle - 1)
            )
        return low
