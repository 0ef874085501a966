"""Products: what computes a decoder's matrix products. torch does by default; devices with kernels of their own replace modules.

`replace` runs before a checkpoint is read: quantized matrices are filled row by row, and no float copy of them ever exists. `finish` runs
when they are filled. It knows nothing of checkpoints.
"""

import torch

from model.decoder import Decoder
from model.devices.quantization import Float8Product, float8_product
from model.devices.quantized_modules import quantize_modules


class Products:
    """torch's products, of weights in a decoder's dtype or in float8."""

    batch_invariant = False
    """Whether a row of a product depends on that row alone, bit for bit."""
    keeps_blocks = False
    """Whether matrices that a GGUF file stores in blocks are held in blocks."""

    def __init__(self, quantization: str = "none", name: str = "torch", multiply_float8: Float8Product = float8_product) -> None:
        self.quantization, self.name, self.multiply_float8 = quantization, name, multiply_float8

    def replace(self, decoder: Decoder, dtype: torch.dtype) -> None:
        """Puts modules without values in the place of a decoder's, whose parameters have no values yet either."""
        assert self.quantization in ("auto", "none", "fp8"), self.quantization
        if self.quantization == "fp8":
            quantize_modules(decoder, dtype, self.multiply_float8)

    def finish(self, decoder: Decoder) -> None:
        """Completes a decoder whose parameters have been read."""
        decoder.products, decoder.batch_invariant = self.name, self.batch_invariant
