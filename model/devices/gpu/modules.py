"""Products and norms by the Triton kernels of this folder: modules that replace a decoder's linear layers, norms, heads and tied head.

They hold the same parameters as what they replace. Invariant (batch-invariant): a row of a result depends on that row of x alone, bit for
bit. Quantized products are not replaced: int8's sums are of integers, which no order changes, and fp8's are by our kernel in any case.

Shape letters: T tokens, S rows whose logits are wanted, H query heads, D hidden size, V vocabulary, c columns of the latent, p of a
head without position, v of a head's value.
"""

from typing import Any

from torch import Tensor, nn

from model.attention import HeadProjections
from model.decoder import Decoder
from model.devices.gpu.launches import multiply, norm, softmax
from model.devices.products import Products
from model.devices.replacement import FusedLinear, NormReplacement, replace_modules
from model.layers import Embedding, LayerNorm, Linear, MixtureOfExperts, RMSNorm, Router


class GpuLinear(FusedLinear):
    """Replaces a Linear, and the activation and gate after it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y_T1O = multiply(x.reshape(-1, 1, x.shape[-1]), self.weight[None], self.bias, self.activation, self.gated)
        return y_T1O.view(*x.shape[:-1], -1)


class GpuRouter(GpuLinear):
    """In float32, whatever dtype its weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class GpuEmbedding(Embedding):
    """The same table; as the head of a tied model, by our kernel."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, _weight=embedding.weight, _freeze=True)

    def logits(self, x_SD: Tensor) -> Tensor:
        return multiply(x_SD[:, None], self.weight[None])[:, 0]


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


REPLACEMENTS: dict[type[nn.Module], Any] = {
    Linear: GpuLinear,
    Router: GpuRouter,
    Embedding: GpuEmbedding,
    LayerNorm: GpuNorm,
    RMSNorm: GpuNorm,
    HeadProjections: GpuHeads,
}


class TritonProducts(Products):
    """All products and norms by our kernels."""

    batch_invariant = True

    def finish(self, decoder: Decoder) -> None:
        super().finish(decoder)
        replace_modules(decoder, lambda module: found(module) if (found := REPLACEMENTS.get(type(module))) else None)
        for module in decoder.modules():
            if isinstance(module, MixtureOfExperts):
                module.softmax = softmax
