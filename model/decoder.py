"""Decoder: the only forward pass. Serving, training, scoring and benchmarks run this one and differ in the `attend` they pass.

Tokens of all sequences lie end to end on one axis; there is no batch axis and no notion of prefill or decode.
Invariant: a token's output depends on its id, its position and what `attend` lets it see.

Shape letters: T tokens of the step, S rows whose logits are wanted, D hidden size, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attend, MultiQueryAttention
from model.layers import MLP, norm
from model.spec import ModelSpec


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = norm(spec)
        self.attention = MultiQueryAttention(spec)
        self.mlp_norm = norm(spec)
        self.mlp = MLP(spec)

    def forward(self, x_TD: Tensor, layer: int, attend: Attend) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), layer, attend)
        y_TD: Tensor = x_TD + self.mlp(self.mlp_norm(x_TD))
        return y_TD


class Decoder(nn.Module):
    """A decoder-only transformer with one key/value head, built from a ModelSpec."""

    block: type[Block] = Block

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.token_embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.position_embedding = nn.Embedding(spec.max_positions, spec.hidden_size)
        self.blocks = nn.ModuleList(self.block(spec) for _ in range(spec.num_layers))
        self.final_norm = norm(spec)
        self.head = None if spec.tied_embeddings else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def forward(self, token_ids_T: Tensor, position_ids_T: Tensor, attend: Attend) -> Tensor:
        """Ids and positions of T tokens -> their last hidden states x_TD, not yet normalised (see `logits`)."""
        x_TD: Tensor = self.token_embedding(token_ids_T) + self.position_embedding(position_ids_T)
        for layer, block in enumerate(self.blocks):
            x_TD = block(x_TD, layer, attend)
        return x_TD

    def logits(self, x_SD: Tensor) -> Tensor:
        """Hidden states -> logits_SV. Give it only the rows that need them: the head is a large share of a small step."""
        weight_VD = self.token_embedding.weight if self.head is None else self.head.weight
        return F.linear(self.final_norm(x_SD), weight_VD)
