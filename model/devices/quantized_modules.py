"""Modules with weights in float8 and a scale for each row, which replace a decoder's linear layers and embedding tables.

Invariant: a quantized matrix keeps no float copy of itself.

Shape letters: T tokens, S rows whose logits are wanted, I input and O output columns, V rows of a table, D its columns.
"""

from typing import Any

import torch
from torch import Tensor, nn

from cache.pool import FLOAT8
from model.devices.quantization import Float8Product, quantize_weights
from model.devices.replacement import Held, RowMatrix, replace_modules
from model.layers import Embedding, Linear


class QuantizedMatrix(RowMatrix):
    """A matrix in float8 with a scale for each row. Both are parameters, so that they are counted and moved."""

    quantized = True

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype, multiply: Float8Product) -> None:
        super().__init__(torch.empty(num_rows, num_columns, dtype=FLOAT8, device="meta"))
        self.scale: Any = nn.Parameter(torch.empty(num_rows, device="meta"), requires_grad=False)
        self.dtype, self.multiply = dtype, multiply

    def allocate(self, device: torch.device, stored: Held = torch.float32) -> None:
        super().allocate(device, stored)
        self._allocate("scale", device)

    def set_rows(self, first: int, rows: Tensor) -> None:
        end = first + len(rows)
        self.weight[first:end], self.scale[first:end] = quantize_weights(rows.to(self.weight.device))

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the matrix by number, as float32."""
        # As bytes: torch does not index float8 on every device.
        rows_TD = self.weight.view(torch.uint8)[ids_T].view(self.weight.dtype)
        y_TD: Tensor = rows_TD.float() * self.scale[ids_T, None]
        return y_TD

    def product(self, x: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + b in x's dtype."""
        return self.multiply(x.reshape(-1, x.shape[-1]), self.weight, self.scale, bias_O).view(*x.shape[:-1], -1)


class QuantizedLinear(QuantizedMatrix):
    """Replaces an nn.Linear."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, multiply: Float8Product) -> None:
        super().__init__(linear.out_features, linear.in_features, dtype, multiply)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class QuantizedEmbedding(QuantizedMatrix):
    """Replaces an nn.Embedding, as a table and, if it is the token embedding of a tied model, as the head."""

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype, multiply: Float8Product) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, dtype, multiply)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.rows(ids_T).to(self.dtype)

    def logits(self, x_SD: Tensor) -> Tensor:
        """x_SD -> logits_SV"""
        return self.product(x_SD)


def quantize_modules(root: nn.Module, dtype: torch.dtype, multiply: Float8Product) -> None:
    """Puts quantized modules, still without values, in the place of every linear layer and table.

    Routers stay in float, because rounding could change which experts they choose; so do the HeadProjections of latent attention, whose
    rows each head applies separately.
    """
    by_type: dict[type[nn.Module], Any] = {Linear: QuantizedLinear, Embedding: QuantizedEmbedding}
    replace_modules(root, lambda module: found(module, dtype, multiply) if (found := by_type.get(type(module))) else None)
