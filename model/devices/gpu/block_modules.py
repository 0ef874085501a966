"""Modules with weights in the block formats of devices/blocks.py, which replace a decoder's linear
layers and tables on a GPU.

Blocks of a checkpoint are taken as they are; floats are quantized on the GPU. Routers and the
matrices of HeadProjections stay as they are, as on a CPU. Invariant: a matrix keeps no float copy
of itself.

Shape letters: T tokens, S rows whose logits are wanted, N rows of a matrix, B blocks of a row, b
bytes of a block, j those of its numbers, H numbers that precede these.
"""

from typing import cast

import torch
from torch import Tensor, nn

from model.decoder import Decoder
from model.devices.blocks import BLOCK, FORMATS, BlockFormat
from model.devices.gpu.block_products import (
    INPUTS,
    OUTPUTS,
    BlockWeights,
    dequantized,
    multiply_blocks,
)
from model.devices.gpu.modules import CublasProducts, SlabProducts
from model.devices.replacement import Held, RowMatrix, replace_modules
from model.layers import Embedding, Linear

QUANTIZED_AT_ONCE = 2**22
"""Weights. Of a few rows at a time the launches would take minutes for a large model."""
HEADS = {"int8": 1, "int4": 2}
"""How many numbers in float16 precede those of a block: a scale, and in int4 a minimum."""
HEAD_BYTES = 2


class GpuBlockMatrix(RowMatrix):
    """A matrix as the kernels of block_products.py read it: numbers, scales and minima in one
    allocation, which must not move.
    """

    form: BlockFormat
    stored: BlockWeights
    """Views of the weight."""

    def __init__(
        self, matrix: nn.Module, form: BlockFormat, dtype: torch.dtype, *, fixed_tile: bool
    ) -> None:
        (num_rows, num_columns), heads = cast(Tensor, matrix.weight).shape, HEADS[form.name]
        stored_rows = -(-num_rows // OUTPUTS) * OUTPUTS
        num_blocks = -(-num_columns // INPUTS) * INPUTS // BLOCK
        super().__init__(
            torch.empty(
                form.block_bytes, num_blocks * stored_rows, dtype=torch.uint8, device="meta"
            )
        )
        self.bias: Tensor | None = getattr(matrix, "bias", None)
        self.form = form
        self.shape = (num_rows, num_columns)
        self.dtype = dtype
        self.fixed_tile = fixed_tile
        self.num_filling = self.weight.numel() - num_rows * form.row_bytes(num_columns)
        self._heads_shape = heads, num_blocks, stored_rows
        self._waiting: list[Tensor] = []
        self._first_waiting = 0

    def allocate(self, device: torch.device, stored: Held = torch.float32) -> None:
        super().allocate(device, stored)
        num_heads, _, stored_rows = self._heads_shape
        numbers, heads = self.weight.tensor_split([-num_heads * HEAD_BYTES])
        self._heads_HBN = heads.view(torch.float16).view(self._heads_shape)
        scales_BN, *minima = self._heads_HBN
        self.stored = BlockWeights(
            numbers.view(stored_rows, -1), scales_BN, minima[0] if minima else None, *self.shape
        )

    def set_rows(self, first: int, rows: Tensor) -> None:
        """Quantizes the rows when there are enough of them, or when they are the last."""
        if not self._waiting:
            self._first_waiting = first
        self._waiting.append(rows.to(self.weight.device, copy=True))
        count = sum(map(len, self._waiting))
        if count * self.shape[1] >= QUANTIZED_AT_ONCE or first + len(rows) == self.shape[0]:
            self._quantize()

    def _quantize(self) -> None:
        if self._waiting:
            rows, self._waiting = torch.cat(self._waiting), []
            first = self._first_waiting
            for some in rows.split(max(1, QUANTIZED_AT_ONCE // self.shape[1])):
                self._put(first, self.form.quantize(some))
                first += len(some)

    def set_blocks(self, first: int, rows: Tensor) -> None:
        self._quantize()
        self._put(first, rows.to(self.weight.device))

    def _put(self, first: int, rows: Tensor) -> None:
        blocks_NBb = rows.unflatten(1, (-1, self.form.block_bytes))
        (count, num_blocks, _), weights = blocks_NBb.shape, self.stored
        num_bytes = len(self._heads_HBN) * HEAD_BYTES
        heads_NBH = blocks_NBb[..., :num_bytes].contiguous().view(torch.float16)
        self._heads_HBN[:, :num_blocks, first : first + count] = heads_NBH.permute(2, 1, 0)
        numbers_NBj = blocks_NBb[..., num_bytes:]
        if weights.minima_BN is None:
            numbers_NBj = numbers_NBj ^ 128
        weights.numbers_Nj[first : first + count, : numbers_NBj[0].numel()] = numbers_NBj.flatten(1)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the matrix by number."""
        return dequantized(self.stored, 0, len(ids_T), self.dtype, ids_T)

    def product(self, x: Tensor) -> Tensor:
        """x W^T + b in x's dtype."""
        y_TO = multiply_blocks(
            x.reshape(-1, x.shape[-1]), self.stored, self.bias, fixed_tile=self.fixed_tile
        )
        return y_TO.view(*x.shape[:-1], self.shape[0])


class GpuBlockLinear(GpuBlockMatrix):
    """Replaces a Linear."""

    forward = GpuBlockMatrix.product


class GpuBlockEmbedding(GpuBlockMatrix):
    """Replaces an Embedding, as a table and, if it is the token embedding of a tied model, as the
    head.
    """

    forward, logits = GpuBlockMatrix.rows, GpuBlockMatrix.product


IN_BLOCKS: dict[type[nn.Module], type[GpuBlockMatrix]] = {
    Linear: GpuBlockLinear,
    Embedding: GpuBlockEmbedding,
}


class BlockProducts(CublasProducts):
    """Products of matrices in blocks: by our kernel of a tile that suits the number of rows, of
    many rows by torch.
    """

    def replace(self, decoder: Decoder, dtype: torch.dtype) -> None:
        form, fixed_tile = FORMATS[self.quantization], self.batch_invariant

        def replacement(module: nn.Module) -> nn.Module | None:
            found = IN_BLOCKS.get(type(module))
            return None if found is None else found(module, form, dtype, fixed_tile=fixed_tile)

        replace_modules(decoder, replacement)


class InvariantBlockProducts(BlockProducts, SlabProducts):
    """Products of matrices in blocks by our kernels, with tiles that do not depend on the number of
    rows; others in slabs.
    """

    row_multiple = 1
