"""Products of weights quantized in blocks by torch's operations: the definition that kernels are
tested against. The same numbers as the CPU kernels', bit for bit before the activation.

Shape letters: T tokens, S rows whose logits are wanted, V rows of a table, I input and O output
columns, N rows of a matrix, B blocks of a row, k inputs of a block.
"""

import torch
from torch import Tensor, nn

from model.decoder import Decoder
from model.devices.blocks import FORMATS, INT8, LARGEST, TINY, BlockFormat, in_blocks
from model.devices.products import Products
from model.devices.replacement import RowMatrix, replace_modules
from model.layers import Embedding, Linear


def parts(form: BlockFormat, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """uint8 [N, B * block_bytes] -> scale_NB and minimum_NB (None in int8) in float32, q_NBk as
    int8.
    """
    blocks = rows.unflatten(1, (-1, form.block_bytes))
    if form is INT8:
        return _halves(blocks[..., :2]), None, blocks[..., 2:].view(torch.int8)
    packed = blocks[..., 4:]
    numbers = torch.cat([packed & 15, packed >> 4], dim=-1).view(torch.int8)
    return _halves(blocks[..., :2]), _halves(blocks[..., 2:4]), numbers


def _halves(pairs: Tensor) -> Tensor:
    return pairs.contiguous().view(torch.float16)[..., 0].float()


def dequantize(form: BlockFormat, rows: Tensor, num_inputs: int) -> Tensor:
    """uint8 [N, row bytes] -> the matrix that they stand for, [N, I] in float32."""
    scale_NB, minimum_NB, numbers_NBk = parts(form, rows)
    weight_NBk = numbers_NBk.float() * scale_NB[..., None]
    weight_NBk = weight_NBk if minimum_NB is None else weight_NBk + minimum_NB[..., None]
    return weight_NBk.flatten(1)[:, :num_inputs]


def quantize_activations(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """x -> (q_TBk as whole float32 numbers, t_TB). Where a block is not finite, t is NaN."""
    x_TBk = in_blocks(x_TI)
    largest_TB = x_TBk.abs().amax(dim=-1)
    is_finite_TB = largest_TB.isfinite()
    scale_TB = torch.where(is_finite_TB, (largest_TB / LARGEST).clamp_(min=TINY), torch.nan)
    numbers_TBk = (x_TBk * scale_TB.reciprocal()[..., None]).round_()
    return torch.where(is_finite_TB[..., None], numbers_TBk, 0.0), scale_TB


def product(form: BlockFormat, x_TI: Tensor, rows: Tensor) -> Tensor:
    """x W^T in float32, of W as `form` stores its rows."""
    x_TBk, x_scale_TB = quantize_activations(x_TI)
    scale_OB, minimum_OB, numbers_OBk = parts(form, rows)
    y_TO = torch.zeros(len(x_TI), len(rows))
    for b, (x_Tk, x_scale_T) in enumerate(
        zip(x_TBk.unbind(dim=1), x_scale_TB.unbind(dim=1), strict=True)
    ):
        # The sums of a block are whole numbers below 2^24, so that float32 holds them in whatever
        # order they are added.
        value_TO = (x_Tk @ numbers_OBk[:, b].float().T).mul_(scale_OB[:, b])
        if minimum_OB is not None:
            value_TO += x_Tk.sum(dim=-1, keepdim=True) * minimum_OB[:, b]
        y_TO += value_TO.mul_(x_scale_T[:, None])
    return y_TO


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
