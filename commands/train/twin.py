"""MultiHeadDecoder: the serving decoder with a key and a value head for every query head, to
compare the two by training.

It differs from Decoder in its attention alone, so a twin of each kind may share everything else:
data, schedule, number of parameters. It is saved as a gpt_bigcode checkpoint with multi_query
false, which `transformers` reads and onehead refuses to serve.

Shape letters: T tokens of the step, D hidden size, H heads, d head size.
"""

from torch import Tensor, nn

from model.attention import Attend
from model.decoder import Block, Decoder
from model.layers import Linear, Rotation
from model.spec import ModelSpec


class MultiHeadAttention(nn.Module):
    """softmax(q_h K_h^T * scale) V_h for every head h, then the output projection.

    The rows of `qkv` are q, k, v of the first head, then of the second, and so on: the order of the
    family's checkpoints.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.num_heads = spec.num_query_heads
        width = spec.num_query_heads * spec.head_dim
        self.qkv = Linear(spec.hidden_size, 3 * width)
        self.out = Linear(width, spec.hidden_size)

    def forward(
        self, x_TD: Tensor, layer: int, attend: Attend, rotation: Rotation | None = None
    ) -> Tensor:
        """x_TD -> y_TD. `attend` is given K and V with a head axis."""
        q_THd, k_THd, v_THd = self.qkv(x_TD).unflatten(-1, (self.num_heads, -1)).chunk(3, dim=-1)
        y_TD: Tensor = self.out(attend(layer, q_THd, k_THd, v_THd, None).flatten(-2))
        return y_TD


class MultiHeadBlock(Block):
    """A block whose attention has as many key/value heads as query heads."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.attention = MultiHeadAttention(spec)  # type: ignore[assignment]


class MultiHeadDecoder(Decoder):
    """The decoder of such blocks."""

    block = MultiHeadBlock


def equal_mlp(hidden_size: int, num_heads: int, multi_head_mlp: int) -> int:
    """The MLP width that gives the multi-query twin as many parameters as the multi-head one, to
    within one unit of width.

    A block's attention has 2 (D - d) rows of D + 1 fewer with one key/value head; a unit of MLP
    width costs 2 D + 1. The paper widens its MLP for the same reason (section 4.1: 4096 to 5440).
    """
    saved = 2 * (hidden_size - hidden_size // num_heads) * (hidden_size + 1)
    return multi_head_mlp + round(saved / (2 * hidden_size + 1))
