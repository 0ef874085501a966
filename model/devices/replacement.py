"""Replacing modules of a decoder by modules with kernels of their own: what every device's replacements have in common.

Invariant: a replacement has the parameter names of the module it replaces, so that a checkpoint is read into it all the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from model.devices.quantization import quantize_weights
from model.layers import MLP, LayerNorm, RMSNorm


class RowMatrix(nn.Module):
    """A matrix in a kernel's own layout, filled from rows of the float matrix; quantized, with a scale for each row, and in int8 a sum.

    All are parameters, so that they are counted, moved and named like any other.
    """

    num_filling = 0
    """Elements of the weight that only round its size up."""

    def __init__(self, weight: Tensor, num_rows: int, quantized: bool) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.scale: Any = None
        self.row_sums: Any = None
        if quantized:
            self.scale = _parameter(torch.empty(num_rows, device="meta"))
        if weight.dtype is torch.int8:
            self.row_sums = _parameter(torch.empty(num_rows, dtype=torch.int32, device="meta"))

    def allocate(self, device: torch.device, stored: torch.dtype = torch.float32) -> None:
        """Allocates memory for the values that `set_rows` brings, which are `stored` in that dtype."""
        for name in ("weight", "scale", "row_sums"):
            if (parameter := getattr(self, name)) is not None:
                setattr(self, name, _parameter(self._memory(parameter, device)))

    def set_rows(self, first: int, rows: Tensor) -> None:
        """Takes rows of the float matrix from number `first` on."""
        rows, end = rows.to(self.weight.device), first + len(rows)
        if self.scale is not None:
            rows, self.scale[first:end] = quantize_weights(rows, self.weight.dtype)
        if self.row_sums is not None:
            self.row_sums[first:end] = rows.sum(dim=-1, dtype=torch.int32)
        self._store(first, rows)

    def _memory(self, parameter: Tensor, device: torch.device) -> Tensor:
        return torch.empty_like(parameter, device=device)

    def _store(self, first: int, rows: Tensor) -> None:
        self.weight[first : first + len(rows)] = rows


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


class NormReplacement(nn.Module):
    """Holds the parameters and constants of a norm."""

    def __init__(self, norm: LayerNorm | RMSNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.epsilon, self.offset, self.centred = norm.epsilon, norm.offset, norm.centred


class FusedLinear(nn.Module):
    """A linear layer that applies the activation after it and, where `gated`, multiplies: activation(first half) * second half."""

    activation, gated = "none", False


def replace_modules(root: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Puts `replacement(module)` in the place of each module for which there is one. FusedLinears take over an MLP's activation."""
    for name, module in list(root.named_modules()):
        if (found := replacement(module)) is not None:
            root.set_submodule(name, found)
    for module in root.modules():
        if isinstance(module, MLP):
            up: nn.Module = module.up
            if isinstance(up, FusedLinear):
                up.activation, up.gated, module.between = module.activation, module.gated, None
