"""Stand-ins for a loaded decoder's linear layers, norms, heads of a latent and tied head, computed by the kernels of this folder.

They hold the very parameters of what they stand for. Invariant: a row of what comes out depends on that row of x alone, bit for bit.
Quantized products stay as they are: int8's sums are of integers, which no order changes, and fp8's are by our kernel in any case.

Shape letters: T tokens, S rows whose logits are wanted, H query heads, D hidden size, V vocabulary, c columns of the latent, p of a
head without position, v of a head's value.
"""

from torch import Tensor, nn

from model.attention import HeadProjections
from model.devices.gpu.launches import multiply, norm, softmax
from model.layers import ACTIVATIONS, MLP, Embedding, Linear, MixtureOfExperts, RMSNorm, Router


class GpuLinear(nn.Module):
    """Stands for a Linear and for the activation and the gate behind it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.activation, self.gated = "none", False

    def forward(self, x: Tensor) -> Tensor:
        y_T1O = multiply(x.reshape(-1, 1, x.shape[-1]), self.weight[None], self.bias, self.activation, self.gated)
        return y_T1O.view(*x.shape[:-1], -1)


class GpuRouter(GpuLinear):
    """In float32, whatever its weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class GpuEmbedding(Embedding):
    """A table as it was, and the head of a tied model."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, _weight=embedding.weight, _freeze=True)

    def logits(self, x_SD: Tensor) -> Tensor:
        return multiply(x_SD[:, None], self.weight[None])[:, 0]


class GpuNorm(nn.Module):
    """Stands for a LayerNorm or an RMSNorm."""

    computed_by = "triton"

    def __init__(self, module: nn.LayerNorm | RMSNorm) -> None:
        super().__init__()
        self.weight, self.centred = module.weight, isinstance(module, nn.LayerNorm)
        self.bias = module.bias if isinstance(module, nn.LayerNorm) else None
        self.epsilon, self.offset = (module.eps, 0.0) if isinstance(module, nn.LayerNorm) else (module.epsilon, module.offset)

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.epsilon, self.offset, centred=self.centred)


class GpuHeads(HeadProjections):
    """The same, all heads in one launch."""

    def __init__(self, heads: HeadProjections) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.latent, self.weight = heads.num_heads, heads.latent, heads.weight

    def keys(self, q_THp: Tensor) -> Tensor:
        return multiply(q_THp, self.parts()[0].transpose(1, 2))

    def values(self, o_THc: Tensor) -> Tensor:
        return multiply(o_THc, self.parts()[1])


REPLACEMENTS = {
    Linear: GpuLinear,
    Router: GpuRouter,
    Embedding: GpuEmbedding,
    nn.LayerNorm: GpuNorm,
    RMSNorm: GpuNorm,
    HeadProjections: GpuHeads,
}


def replace_modules(root: nn.Module) -> None:
    """Puts the stand-ins in the place of what they stand for, once the weights are there."""
    for name, module in list(root.named_modules()):
        if type(module) in REPLACEMENTS:
            root.set_submodule(name, REPLACEMENTS[type(module)](module))
    names = {function: name for name, function in ACTIVATIONS.items()}
    for module in root.modules():
        if isinstance(module, MLP):
            up: nn.Module = module.up
            if isinstance(up, GpuLinear):
                up.activation, up.gated, module.between = names[module.activation], module.gated, None
        if isinstance(module, MixtureOfExperts):
            module.softmax = softmax
