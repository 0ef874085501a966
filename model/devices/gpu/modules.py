"""What a GPU computes otherwise than the decoder's modules say: modules and functions that replace
a decoder's.

Norms, with the sums before them, and gates are our Triton kernels. Products are cuBLAS's, but for
those of a single row; SlabProducts computes so many rows at a time that a row's bits depend on that
row alone. Replacements hold the same parameters as what they replace. Invariant of everything but
CublasProducts' products (batch-invariant): a row of a result depends on that row of x alone, bit
for bit. Products of int8 and int4 are block_modules.py's.

Shape letters: T tokens, S rows whose logits are wanted, H query heads, D hidden size, V vocabulary,
c columns of the latent, p of a head without position, v of a head's value.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import HeadProjections, MultiQueryAttention
from model.decoder import Block, Decoder
from model.devices.gpu.launches import add_norm, gate, norm, norm_heads, softmax
from model.devices.gpu.one_row import MOST_WEIGHTS, multiply_row
from model.devices.products import Products
from model.devices.replacement import NormReplacement, replace_modules
from model.layers import MLP, Embedding, LayerNorm, Linear, MixtureOfExperts, RMSNorm, Router
from model.spec import OptionError


class CublasLinear(nn.Module):
    """Replaces a Linear. A single row is multiplied by our kernel."""

    activation = "none"
    """Applied to the product. The tanh form of GELU by cuBLAS, which takes no longer for it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._has_kernel = self.weight.itemsize == 2 and self.weight.numel() <= MOST_WEIGHTS

    def forward(self, x: Tensor) -> Tensor:
        if self._has_kernel and len(x) == 1:
            return multiply_row(x, self.weight, self.bias, self.activation)
        if self.activation == "none":
            return F.linear(x, self.weight, self.bias)
        if x.device.type == "cpu":  # Where torch's epilogue is another form of GELU.
            return F.gelu(F.linear(x, self.weight, self.bias), approximate="tanh")
        return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)


class GpuNorm(NormReplacement):
    """Replaces a LayerNorm or an RMSNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self)


SLAB = 256
"""Rows of a batch-invariant product."""


def in_slabs(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`product` of SLAB rows at a time, the last of which are filled with zeros.

    What a library adds up, and in which order, depends on the shapes alone, so that a row's bits do
    not depend on how many others there are. That they do not depend on its place either is proved
    of every shape when a model is loaded (prove_places). Measured on an H100: 56 us for a layer of
    StarCoderBase-1B, whose single rows take 45 us and whose 4,096 rows 445 us at once.
    """
    missing = -len(x) % SLAB
    # What prove_places has computed is contiguous, and the library may take another way for others.
    filled = torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x.contiguous()
    slabs = [product(slab) for slab in filled.split(SLAB)]
    return (slabs[0] if len(slabs) == 1 else torch.cat(slabs))[: len(x)]


def _inputs(module: Any) -> Sequence[int]:
    """The shape of an input row of a module with one weight matrix [outputs, inputs]."""
    return tuple(module.weight.shape[1:])


IN_SLABS: dict[type[nn.Module], dict[str, Callable[[Any], Sequence[int]]]] = {
    CublasLinear: {"forward": _inputs},
    Router: {"forward": _inputs},
    Embedding: {"logits": _inputs},
    HeadProjections: {
        "keys": lambda heads: (heads.num_heads, heads.latent.plain_dim),
        "values": lambda heads: (heads.num_heads, heads.latent.rank),
    },
}
"""Modules with matrix products: the method of each product, and the shape of a row of its input."""


def multiply_in_slabs(module: nn.Module) -> None:
    """Computes the products of a module in slabs."""
    for name in IN_SLABS.get(type(module), ()):
        setattr(module, name, partial(in_slabs, getattr(module, name)))


def prove_places(decoder: Decoder) -> None:
    """Raises OptionError if a row of some product has other bits at another place. Of each shape
    one is computed, with its rows in two orders.
    """
    proved, tied = set(), None if decoder.head is not None else decoder.token_embedding
    for module in decoder.modules():
        for name, width_of in IN_SLABS.get(type(module), {}).items():
            product, width = getattr(module, name), width_of(module)
            weight: Any = module.weight
            shape = type(module), weight.shape, getattr(module, "activation", None), width
            if shape in proved or (isinstance(module, Embedding) and module is not tied):
                continue
            proved.add(shape)
            x = torch.randn(SLAB, *width, dtype=weight.dtype, device=weight.device)
            order = torch.randperm(SLAB, device=weight.device)
            if not torch.equal(product(x[order]), product(x)[order]):
                raise OptionError(
                    "engine.deterministic: on this device a product of a matrix of "
                    f"{' by '.join(map(str, weight.shape))} has other bits for a row at another "
                    "place, so that answers would depend on the batch; leave it out"
                )


def _replacement(module: nn.Module) -> nn.Module | None:
    """What replaces a module; None for those that torch computes, norms without weights too."""
    if type(module) is Linear:
        return CublasLinear(module)
    if isinstance(module, LayerNorm | RMSNorm) and module.weight is not None:
        return GpuNorm(module)
    return None


class CublasProducts(Products):
    """cuBLAS's products, or quantized ones. Sums and the norms after them, norms of heads, and
    gates are one launch each.
    """

    def finish(self, decoder: Decoder) -> None:
        super().finish(decoder)
        replace_modules(decoder, _replacement)
        for module in decoder.modules():
            if isinstance(module, Block):
                module.add_norm = add_norm
            elif isinstance(module, MultiQueryAttention):
                module.norm_heads = norm_heads
            elif isinstance(module, MLP):
                _fuse_activation(module)


class SlabProducts(CublasProducts):
    """cuBLAS's products in slabs."""

    batch_invariant = True
    row_multiple = SLAB

    def finish(self, decoder: Decoder) -> None:
        super().finish(decoder)
        decoder.row_multiple = self.row_multiple
        for module in decoder.modules():
            multiply_in_slabs(module)
            if isinstance(module, MixtureOfExperts):
                module.softmax = softmax
        with torch.inference_mode():
            prove_places(decoder)


def _fuse_activation(mlp: MLP) -> None:
    """Into one launch with the gate's product, or with the matrix product where cuBLAS has that."""
    if mlp.gated:
        mlp.between = partial(gate, activation=mlp.activation)
        return
    up: nn.Module = mlp.up
    if isinstance(up, CublasLinear) and up.bias is not None and mlp.activation == "gelu_tanh":
        up.activation, mlp.between = mlp.activation, None
