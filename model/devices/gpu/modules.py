"""What a GPU computes otherwise than the decoder's modules say: modules and functions that replace
a decoder's.

By default norms, with the sums before them, and gates are our Triton kernels, and products
cuBLAS's, but for those of a single row; TritonProducts replaces linear layers, heads and the tied
head too. Replacements hold the same parameters as what they replace. Invariant of everything but
CublasProducts' products (batch-invariant): a row of a result depends on that row of x alone, bit
for bit. Products of int8 and int4 are block_modules.py's.

Shape letters: T tokens, S rows whose logits are wanted, H query heads, D hidden size, V vocabulary,
c columns of the latent, p of a head without position, v of a head's value.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import HeadProjections, MultiQueryAttention
from model.decoder import Block, Decoder
from model.devices.gpu.launches import add_norm, gate, multiply, norm, norm_heads, softmax
from model.devices.gpu.one_row import MOST_WEIGHTS, multiply_row
from model.devices.products import Products
from model.devices.replacement import FusedLinear, NormReplacement, replace_modules
from model.layers import MLP, Embedding, LayerNorm, Linear, MixtureOfExperts, RMSNorm, Router


class GpuLinear(FusedLinear):
    """Replaces a Linear, and the activation and gate after it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y_T1O = multiply(
            x.reshape(-1, 1, x.shape[-1]), self.weight[None], self.bias, self.activation, self.gated
        )
        return y_T1O.view(*x.shape[:-1], -1)


class GpuRouter(GpuLinear):
    """In float32, whatever dtype its weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class GpuEmbedding(Embedding):
    """The same table; as the head of a tied model, by our kernel."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(
            embedding.num_embeddings,
            embedding.embedding_dim,
            _weight=embedding.weight,
            _freeze=True,
        )

    def logits(self, x_SD: Tensor) -> Tensor:
        return multiply(x_SD[:, None], self.weight[None])[:, 0]


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
        return norm(x, self.weight, self.bias, self.epsilon, self.offset, centred=self.centred)


class GpuHeads(HeadProjections):
    """HeadProjections with all heads in one launch."""

    def __init__(self, heads: HeadProjections) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.latent, self.weight = heads.num_heads, heads.latent, heads.weight

    def keys(self, q_THp: Tensor) -> Tensor:
        return multiply(q_THp, self.parts()[0].transpose(1, 2))

    def values(self, o_THc: Tensor) -> Tensor:
        return multiply(o_THc, self.parts()[1])


NORMS: dict[type[nn.Module], Any] = {LayerNorm: GpuNorm, RMSNorm: GpuNorm}
CUBLAS = NORMS | {Linear: CublasLinear}
TRITON = NORMS | {
    Linear: GpuLinear,
    Router: GpuRouter,
    Embedding: GpuEmbedding,
    HeadProjections: GpuHeads,
}


class CublasProducts(Products):
    """cuBLAS's products, or quantized ones. Sums and the norms after them, norms of heads, and
    gates are one launch each.
    """

    replacements = CUBLAS

    def finish(self, decoder: Decoder) -> None:
        super().finish(decoder)
        replace_modules(
            decoder,
            lambda module: (
                found(module) if (found := self.replacements.get(type(module))) else None
            ),
        )
        for module in decoder.modules():
            if isinstance(module, Block):
                module.add_norm = add_norm
            elif isinstance(module, MultiQueryAttention):
                module.norm_heads = norm_heads
            elif isinstance(module, MLP) and module.between is not None:
                _fuse_activation(module)


class TritonProducts(CublasProducts):
    """All products too by our kernels."""

    batch_invariant = True
    replacements = TRITON

    def finish(self, decoder: Decoder) -> None:
        super().finish(decoder)
        for module in decoder.modules():
            if isinstance(module, MixtureOfExperts):
                module.softmax = softmax


def _fuse_activation(mlp: MLP) -> None:
    """Into one launch with the gate's product, or with the matrix product where cuBLAS has that."""
    if mlp.gated:
        mlp.between = partial(gate, activation=mlp.activation)
        return
    up: nn.Module = mlp.up
    if isinstance(up, CublasLinear) and up.bias is not None and mlp.activation == "gelu_tanh":
        up.activation, mlp.between = mlp.activation, None
