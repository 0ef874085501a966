"""Products: what computes a decoder's matrix products. torch does by default; devices with kernels
of their own replace modules.

`replace` runs before a checkpoint is read: quantized matrices are filled row by row, and no float
copy of them ever exists. `finish` runs when they are filled. It knows nothing of checkpoints.
"""

import torch

from model.decoder import Decoder


class Products:
    """torch's products, of weights in a decoder's dtype."""

    batch_invariant = False
    """Whether a row of a product depends on that row alone, bit for bit."""
    keeps_blocks = False
    """Whether matrices that a GGUF file stores in blocks are held in blocks."""

    def __init__(self, quantization: str = "none", name: str = "torch") -> None:
        self.quantization, self.name = quantization, name

    def replace(self, decoder: Decoder, dtype: torch.dtype) -> None:
        """Puts modules without values in the place of a decoder's, whose parameters have no values
        yet either.
        """
        assert self.quantization in ("auto", "none"), self.quantization

    def finish(self, decoder: Decoder) -> None:
        """Completes a decoder whose parameters have been read."""
        decoder.products, decoder.batch_invariant = self.name, self.batch_invariant
