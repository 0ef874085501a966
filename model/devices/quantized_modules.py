"""Modules with weights in 8 bits and a scale for each row, which replace a decoder's linear layers and embedding tables on a GPU.

Invariant: a quantized matrix keeps no float copy of itself.

Shape letters: T tokens, S rows whose logits are wanted, I input and O output columns, V rows of a table, D its columns.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cache.pool import FLOAT8
from model.devices.quantization import HOST, Arithmetic, quantize_tokens, quantize_weights
from model.devices.replacement import RowMatrix, replace_modules
from model.layers import Embedding, Linear

STORED_AS = {"int8": torch.int8, "fp8": FLOAT8}


class QuantizedMatrix(RowMatrix):
    """A matrix in 8 bits with a scale for each row, and in int8 each row's sum. All are parameters, so that they are counted and moved."""

    quantized = True
    arithmetic = HOST

    def __init__(self, num_rows: int, num_columns: int, kind: str, dtype: torch.dtype) -> None:
        super().__init__(torch.empty(num_rows, num_columns, dtype=STORED_AS[kind], device="meta"))
        self.scale: Any = nn.Parameter(torch.empty(num_rows, device="meta"), requires_grad=False)
        self.row_sums: Any = None
        if kind == "int8":
            self.row_sums = nn.Parameter(torch.empty(num_rows, dtype=torch.int32, device="meta"), requires_grad=False)
        self.dtype = dtype

    def allocate(self, device: torch.device, stored: torch.dtype = torch.float32) -> None:
        super().allocate(device, stored)
        self._allocate("scale", device)
        if self.row_sums is not None:
            self._allocate("row_sums", device)

    def set_rows(self, first: int, rows: Tensor) -> None:
        end = first + len(rows)
        self.weight[first:end], self.scale[first:end] = quantize_weights(rows.to(self.weight.device), self.weight.dtype)
        if self.row_sums is not None:
            self.row_sums[first:end] = self.weight[first:end].sum(dim=-1, dtype=torch.int32)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the matrix by number, as float32."""
        # As bytes: torch does not index float8 on every device.
        rows_TD = self.weight.view(torch.uint8)[ids_T].view(self.weight.dtype)
        y_TD: Tensor = rows_TD.float() * self.scale[ids_T, None]
        return y_TD

    def product(self, x: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + b in x's dtype."""
        x_TI = x.reshape(-1, x.shape[-1])
        if self.row_sums is None:
            return self.arithmetic.float8_product(x_TI, self.weight, self.scale, bias_O).view(*x.shape[:-1], -1)
        x_int8_TI, scale_T, zero_T = quantize_tokens(x_TI)
        sums_TO = self.arithmetic.integer_product(x_int8_TI, self.weight)
        y_TO = sums_TO.addcmul_(zero_T[:, None], self.row_sums, value=-1).float().mul_(scale_T[:, None]).mul_(self.scale)
        y = y_TO.to(x.dtype).view(*x.shape[:-1], -1)
        return y if bias_O is None else y + bias_O


class QuantizedLinear(QuantizedMatrix):
    """Replaces an nn.Linear."""

    def __init__(self, linear: nn.Linear, kind: str, dtype: torch.dtype) -> None:
        super().__init__(linear.out_features, linear.in_features, kind, dtype)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class QuantizedEmbedding(QuantizedMatrix):
    """Replaces an nn.Embedding, as a table and, if it is the token embedding of a tied model, as the head."""

    def __init__(self, embedding: nn.Embedding, kind: str, dtype: torch.dtype) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, kind, dtype)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.rows(ids_T).to(self.dtype)

    def logits(self, x_SD: Tensor) -> Tensor:
        """x_SD -> logits_SV"""
        return self.product(x_SD)


def quantize_modules(root: nn.Module, kind: str, dtype: torch.dtype, arithmetic: Arithmetic = HOST) -> None:
    """Puts quantized modules, still without values, in the place of every linear layer and table.

    Routers stay in float, because rounding could change which experts they choose; so do the HeadProjections of latent attention, whose
    rows each head applies separately.
    """
    by_type: dict[type[nn.Module], Any] = {Linear: QuantizedLinear, Embedding: QuantizedEmbedding}

    def replacement(module: nn.Module) -> nn.Module | None:
        if type(module) not in by_type:
            return None
        found: QuantizedMatrix = by_type[type(module)](module, kind, dtype)
        found.arithmetic = arithmetic
        return found

    replace_modules(root, replacement)
