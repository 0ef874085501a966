"""Replacing modules of a decoder by modules with kernels of their own: what every device's
replacements have in common.

Invariant: a replacement has the parameter names of the module it replaces, so that a checkpoint is
read into it all the same.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from model.devices.blocks import BlockFormat
from model.layers import LayerNorm, RMSNorm

Held = torch.dtype | BlockFormat


class RowMatrix(nn.Module):
    """A matrix in a kernel's own layout, filled from rows of the float matrix."""

    num_filling = 0
    """Elements of the weight that only round its size up."""
    form: BlockFormat | None = None
    """The format of a matrix that is quantized in blocks; `set_blocks` takes rows in it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = parameter(weight)

    def divided(self, stored: Sequence[tuple[int, Held]]) -> "Sequence[RowMatrix]":
        """The matrices that take the parts that a checkpoint has of this one, so many rows each,
        stored like this (of an only part 0 rows): this one takes all, or each part has one.
        """
        return [self]

    def allocate(self, device: torch.device, stored: Held = torch.float32) -> None:
        """Allocates memory for the values, which the checkpoint stores like this."""
        self.weight = parameter(self._memory(self.weight, device))

    def set_rows(self, first: int, rows: Tensor) -> None:
        """Takes rows of the float matrix from number `first` on."""
        raise NotImplementedError

    def set_blocks(self, first: int, rows: Tensor) -> None:
        """Takes rows in `form` from number `first` on: uint8, form.row_bytes of each."""
        raise NotImplementedError

    def _memory(self, like: Tensor, device: torch.device) -> Tensor:
        return torch.zeros_like(like, device=device)


def parameter(value: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(value, requires_grad=False)


class StoredTable(nn.Module):
    """Replaces an embedding table of which a step reads few rows: they stay in the checkpoint's
    file. The loader sets `rows`.
    """

    rows: Callable[[Tensor], Tensor]
    """Ids -> rows_TD, as float32."""

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.rows(ids_T)


class NormReplacement(nn.Module):
    """Holds the parameters and constants of a norm."""

    def __init__(self, norm: LayerNorm | RMSNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.epsilon, self.offset, self.centred = norm.epsilon, norm.offset, norm.centred


def replace_modules(root: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Puts `replacement(module)` in the place of each module for which there is one."""
    for name, module in list(root.named_modules()):
        if (found := replacement(module)) is not None:
            root.set_submodule(name, found)
