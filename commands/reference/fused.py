"""All query heads in one projection, K and V broadcast over the head axis: the formulations without a list.

`BroadcastAttention` keeps K and V apart, spells out the softmax and returns its weights; `FusedAttention` projects K and V together and
leaves the rest to scaled_dot_product_attention.

Shape letters: b batch, n queries (and keys: this is self-attention), d model size, h heads, k head size.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from commands.reference.masking import attention_weights, checked_dropout, dropped, head_size


class BroadcastAttention(nn.Module):
    """Fused queries; one K and one V with a head axis of length 1. Raises ValueError where d is not a multiple of h."""

    def __init__(self, model_size: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size(model_size, num_heads)
        self.dropout = checked_dropout(dropout)
        self.query = nn.Linear(model_size, model_size)
        self.key = nn.Linear(model_size, self.head_size)
        self.value = nn.Linear(model_size, self.head_size)
        self.out = nn.Linear(model_size, model_size)

    def forward(self, x_bnd: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x_bnd -> y_bnd, weights_bhnm. `mask` broadcasts to [b, h, n, n]."""
        q_bhnk = self.query(x_bnd).unflatten(-1, (self.num_heads, self.head_size)).transpose(1, 2)
        k_b1mk, v_b1mk = self.key(x_bnd).unsqueeze(1), self.value(x_bnd).unsqueeze(1)
        logits_bhnm = q_bhnk @ k_b1mk.transpose(-2, -1) / self.head_size**0.5
        weights_bhnm = dropped(attention_weights(logits_bhnm, mask), self.dropout, self.training)
        o_bnd = (weights_bhnm @ v_b1mk).transpose(1, 2).flatten(-2)
        return self.out(o_bnd), weights_bhnm


class FusedAttention(nn.Module):
    """One projection for all queries, one for K and V. No biases. Raises ValueError where d is not a multiple of h."""

    def __init__(self, model_size: int, num_heads: int, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size(model_size, num_heads)
        self.causal = causal
        self.dropout = checked_dropout(dropout)
        self.query = nn.Linear(model_size, model_size, bias=False)
        self.key_value = nn.Linear(model_size, 2 * self.head_size, bias=False)
        self.out = nn.Linear(model_size, model_size, bias=False)

    def forward(self, x_bnd: Tensor) -> Tensor:
        """x_bnd -> y_bnd; causal or not, as built."""
        q_bhnk = self.query(x_bnd).unflatten(-1, (self.num_heads, self.head_size)).transpose(1, 2)
        shape = (-1, self.num_heads, -1, -1)
        k_bhmk, v_bhmk = self.key_value(x_bnd).unsqueeze(1).expand(shape).split(self.head_size, dim=-1)
        dropout = self.dropout if self.training else 0.0
        o_bhnk = F.scaled_dot_product_attention(q_bhnk, k_bhmk, v_bhmk, dropout_p=dropout, is_causal=self.causal)
        return dropped(self.out(o_bhnk.transpose(1, 2).flatten(-2)), self.dropout, self.training)
