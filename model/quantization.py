"""Int8 weights: one scale for each output channel, activations quantized token by token as they come, exact integer accumulation.

y = (x_q W_q^T) * scale_x * scale_w + b, with x_q, W_q in -127 .. 127. The sums are integers, so a token's result does not depend on which
others are computed with it. Invariant: a quantized matrix keeps no float copy of itself.

Shape letters: T tokens, I input and O output columns, V rows of a table, D its columns.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.layers import TokenEmbedding

LARGEST = 127
# What the GPU's integer product asks for: more rows than this, and sizes that are multiples of 8.
GPU_MIN_ROWS, GPU_MULTIPLE = 17, 8


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of x -> (int8 of the same shape, float32 scale for each row), symmetric around 0. A row of zeros has scale 1."""
    x = x.float()
    largest = x.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    return (x / scale[..., None]).round_().to(torch.int8), scale


def integer_product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T of int8 matrices, exactly, as int32."""
    if x_TI.device.type == "cpu":
        return torch._int_mm(x_TI, weight_OI.T)
    num_rows = x_TI.shape[0]
    padded = F.pad(x_TI, (0, -x_TI.shape[1] % GPU_MULTIPLE, 0, max(0, GPU_MIN_ROWS - num_rows)))
    weight_OI = F.pad(weight_OI, (0, -weight_OI.shape[1] % GPU_MULTIPLE, 0, -weight_OI.shape[0] % GPU_MULTIPLE))
    return torch._int_mm(padded, weight_OI.T)[:num_rows]


class _Rows(nn.Module):
    """A matrix in int8 with a scale for each row; both are parameters, so that they are counted, moved and named like any other."""

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, num_columns, dtype=torch.int8, device="meta"), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(num_rows, device="meta"), requires_grad=False)
        self.dtype = dtype

    def set_weight(self, weight: Tensor) -> None:
        """Takes the float matrix, quantized."""
        rows, scale = quantize(weight)
        self.weight, self.scale = (nn.Parameter(value, requires_grad=False) for value in (rows, scale))

    def product(self, x: Tensor) -> Tensor:
        """x W^T in x's dtype."""
        x_TI = x.reshape(-1, x.shape[-1])
        x_int8_TI, scale_T = quantize(x_TI)
        sums_TO = integer_product(x_int8_TI, self.weight)[:, : self.weight.shape[0]]
        y_TO = sums_TO.float().mul_(scale_T[:, None]).mul_(self.scale)
        return y_TO.to(x.dtype).view(*x.shape[:-1], -1)


class Int8Linear(_Rows):
    """Stands for an nn.Linear."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(linear.out_features, linear.in_features, dtype)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias


class Int8Embedding(_Rows):
    """Stands for an nn.Embedding, as a table and, if it is the token embedding, as the head."""

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, dtype)

    def forward(self, ids_T: Tensor) -> Tensor:
        return (self.weight[ids_T].float() * self.scale[ids_T, None]).to(self.dtype)

    def logits(self, x_SD: Tensor) -> Tensor:
        """x_SD -> logits_SV"""
        return self.product(x_SD)


def quantize_modules(root: nn.Module, dtype: torch.dtype) -> None:
    """Puts int8 stand-ins, still without values, in the place of every linear layer and table but routers, which decide and are small."""
    kinds: dict[type[nn.Module], Any] = {nn.Linear: Int8Linear, nn.Embedding: Int8Embedding, TokenEmbedding: Int8Embedding}
    for name, module in list(root.named_modules()):
        kind = kinds.get(type(module))
        if kind is not None and not name.endswith("router"):
            root.set_submodule(name, kind(module, dtype))
