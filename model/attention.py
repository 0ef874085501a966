"""MultiQueryAttention: many query heads, one key head, one value head (Shazeer 2019, arXiv 1911.02150, section 3).

The layer projects; who attends to what is the business of the `attend` callable it is given, which owns the cache (in serving) or
the causal mask (in training). It knows nothing of pages, sequences or positions.

Shape letters: T tokens of the step, D hidden size, H query heads, d head size.
"""

from collections.abc import Callable

from torch import Tensor, nn

from model.spec import ModelSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THd, k_Td, v_Td) -> o_THd. K and V have no head axis: that is the whole point."""


class MultiQueryAttention(nn.Module):
    """softmax(q_h K^T * scale) V for every query head h, over one shared K and V; then the output projection.

    `qkv` is one matrix whose rows are the H query heads, then K, then V: of its (H + 2) * d rows only 2 * d feed the cache.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.num_query_heads = spec.num_query_heads
        self.head_dim = spec.head_dim
        query_size = spec.num_query_heads * spec.head_dim
        self.qkv = nn.Linear(spec.hidden_size, query_size + 2 * spec.head_dim)
        self.out = nn.Linear(query_size, spec.hidden_size)

    def forward(self, x_TD: Tensor, layer: int, attend: Attend) -> Tensor:
        """x_TD -> y_TD, for any number of tokens of any number of sequences laid end to end."""
        query_size = self.num_query_heads * self.head_dim
        q_TE, k_Td, v_Td = self.qkv(x_TD).split([query_size, self.head_dim, self.head_dim], dim=-1)
        q_THd = q_TE.unflatten(-1, (self.num_query_heads, self.head_dim))
        o_THd = attend(layer, q_THd, k_Td, v_Td)
        y_TD: Tensor = self.out(o_THd.flatten(-2))
        return y_TD
