"""One query projection per head, concatenated: the two formulations with a list of heads.

They differ as their sources do: `HeadwiseAttention` spells out the softmax and has biases, `HeadListAttention` leaves each head to
scaled_dot_product_attention, has none, and drops out its output.

Shape letters: b batch, n queries (and keys: this is self-attention), d model size, h heads, k head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commands.reference.masking import attention_weights, checked_dropout, dropped, head_size


class HeadwiseAttention(nn.Module):
    """head_i = softmax(x W_i^Q (x W^K)^T / sqrt(k)) x W^V; y = Concat(head_1 .. head_h) W^O.

    Raises ValueError where d is not a multiple of h.
    """

    def __init__(self, model_size: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_size = head_size(model_size, num_heads)
        self.dropout = checked_dropout(dropout)
        self.queries = nn.ModuleList(nn.Linear(model_size, self.head_size) for _ in range(num_heads))
        self.key = nn.Linear(model_size, self.head_size)
        self.value = nn.Linear(model_size, self.head_size)
        self.out = nn.Linear(model_size, model_size)

    def forward(self, x_bnd: Tensor, mask: Tensor | None = None) -> Tensor:
        """x_bnd -> y_bnd. `mask` broadcasts to [b, h, n, n]."""
        k_bnk, v_bnk = self.key(x_bnd), self.value(x_bnd)
        logits = [query(x_bnd) @ k_bnk.transpose(1, 2) / self.head_size**0.5 for query in self.queries]
        weights_bhnm = dropped(attention_weights(torch.stack(logits, dim=1), mask), self.dropout, self.training)
        heads = [weights_bnm @ v_bnk for weights_bnm in weights_bhnm.unbind(dim=1)]
        y_bnd: Tensor = self.out(torch.cat(heads, dim=-1))
        return y_bnd


class HeadListAttention(nn.Module):
    """A list of heads, each one fused attention over the same K and V. No biases. Raises ValueError where d is not a multiple of h."""

    def __init__(self, model_size: int, num_heads: int, dropout: float = 0.0, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.dropout = checked_dropout(dropout)
        size = head_size(model_size, num_heads)
        self.queries = nn.ModuleList(nn.Linear(model_size, size, bias=False) for _ in range(num_heads))
        self.key = nn.Linear(model_size, size, bias=False)
        self.value = nn.Linear(model_size, size, bias=False)
        self.out = nn.Linear(model_size, model_size, bias=False)

    def forward(self, x_bnd: Tensor) -> Tensor:
        """x_bnd -> y_bnd; causal or not, as built."""
        k_bnk, v_bnk = self.key(x_bnd), self.value(x_bnd)
        dropout = self.dropout if self.training else 0.0
        heads = [
            F.scaled_dot_product_attention(query(x_bnd), k_bnk, v_bnk, dropout_p=dropout, is_causal=self.causal) for query in self.queries
        ]
        return dropped(self.out(torch.cat(heads, dim=-1)), self.dropout, self.training)
