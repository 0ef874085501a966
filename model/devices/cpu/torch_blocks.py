"""Products of weights quantized in blocks by torch's operations, where our CPU kernels were not
compiled.

The same numbers as the kernels', bit for bit before the activation, and slow: a block of a matrix
is converted to float32 at a time.

Shape letters: T tokens, S rows whose logits are wanted, V rows of a table.
"""

import torch
from torch import Tensor, nn

from model.decoder import Decoder
from model.devices.blocks import FORMATS, BlockFormat, dequantize, product
from model.devices.products import Products
from model.devices.replacement import RowMatrix, replace_modules
from model.layers import Embedding, Linear


class BlockMatrix(RowMatrix):
    """A matrix whose rows lie one after the other, in blocks."""

    def __init__(self, num_rows: int, num_columns: int, form: BlockFormat) -> None:
        super().__init__(
            torch.empty(num_rows, form.row_bytes(num_columns), dtype=torch.uint8, device="meta")
        )
        self._form = self.form = form
        self.shape = num_rows, num_columns

    def set_rows(self, first: int, rows: Tensor) -> None:
        self.set_blocks(first, self._form.quantize(rows))

    def set_blocks(self, first: int, rows: Tensor) -> None:
        self.weight[first : first + len(rows)] = rows

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows by number, as float32."""
        return dequantize(self._form, self.weight[ids_T], self.shape[1])

    def product(self, x: Tensor) -> Tensor:
        """x W^T in x's dtype."""
        return (
            product(self._form, x.reshape(-1, x.shape[-1]), self.weight)
            .to(x.dtype)
            .view(*x.shape[:-1], -1)
        )


class BlockLinear(BlockMatrix):
    """Replaces an nn.Linear."""

    def __init__(self, linear: nn.Linear, form: BlockFormat) -> None:
        super().__init__(linear.out_features, linear.in_features, form)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias


class BlockEmbedding(BlockMatrix):
    """Replaces an nn.Embedding, as a table and, if it is the token embedding of a tied model, as
    the head.
    """

    def __init__(self, embedding: nn.Embedding, form: BlockFormat, dtype: torch.dtype) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, form)
        self._dtype = dtype

    def forward(self, ids_T: Tensor) -> Tensor:
        """Rows by number."""
        return self.rows(ids_T).to(self._dtype)

    def logits(self, x_SD: Tensor) -> Tensor:
        """x_SD -> logits_SV"""
        return self.product(x_SD)


class BlockProducts(Products):
    """torch's products of matrices in blocks."""

    def replace(self, decoder: Decoder, dtype: torch.dtype) -> None:
        form = FORMATS[self.quantization]

        def replacement(module: nn.Module) -> nn.Module | None:
            if type(module) is Linear:  # And no router: they decide, and are small.
                return BlockLinear(module, form)
            return BlockEmbedding(module, form, dtype) if type(module) is Embedding else None

        replace_modules(decoder, replacement)
