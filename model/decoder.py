"""Decoder: the forward pass. Serving, training, scoring and benchmarks run this one and differ in
the `attend` they pass.

The tokens of all sequences are concatenated on one axis; there is no batch axis and no notion of
prefill or decode. Invariant: a token's output depends on its id, its position and what `attend`
lets it attend to.

Shape letters: T tokens of the step, S rows whose logits are wanted, D hidden size, V vocabulary.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import Attend, LatentAttention, MultiQueryAttention
from model.layers import (
    MLP,
    Embedding,
    Linear,
    MixtureOfExperts,
    RotaryTable,
    Rotation,
    add_norm,
    norm,
)
from model.spec import ModelSpec


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream, in sequence or in parallel.

    A sum and the norm that is read next belong together, since kernels compute both at once. So a
    block is given its first norm's output and ends with the norm after it.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.parallel, self.residual_scale = spec.parallel, spec.residual_scale
        self.attention_norm = norm(spec)
        self.attention = (
            MultiQueryAttention(spec) if spec.latent is None else LatentAttention(spec, spec.latent)
        )
        self.mlp_norm = None if spec.shared_norm else norm(spec)
        dense = spec.experts is None or layer < spec.experts.first_layer
        self.mlp = (
            MLP(spec) if dense or spec.experts is None else MixtureOfExperts(spec, spec.experts)
        )
        self.attention_branch_norm = norm(spec) if spec.branch_norms else None
        self.mlp_branch_norm = norm(spec) if spec.branch_norms else None
        self.add_norm = add_norm
        """Replaced by devices with a kernel for it."""

    def forward(
        self,
        x_TD: Tensor,
        normed_TD: Tensor,
        layer: int,
        attend: Attend,
        rotation: Rotation | None,
        next_norm: nn.Module,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and its `attention_norm` -> the stream after this block and its
        `next_norm`.
        """
        attended = self.attention(normed_TD, layer, attend, rotation), self.attention_branch_norm
        if self.parallel or self.mlp_norm is None:
            fed_TD = self.mlp(normed_TD if self.mlp_norm is None else self.mlp_norm(x_TD))
            return self.add_norm(
                x_TD, [attended, (fed_TD, self.mlp_branch_norm)], self.residual_scale, next_norm
            )
        x_TD, normed_TD = self.add_norm(x_TD, [attended], self.residual_scale, self.mlp_norm)
        return self.add_norm(
            x_TD, [(self.mlp(normed_TD), self.mlp_branch_norm)], self.residual_scale, next_norm
        )


class Decoder(nn.Module):
    """A decoder-only transformer with one key/value head, built from a ModelSpec."""

    block: type[Block] = Block

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.token_embedding = Embedding(spec.vocab_size, spec.hidden_size)
        self.position_embedding = (
            Embedding(spec.max_positions, spec.hidden_size) if spec.rotary is None else None
        )
        self.blocks = nn.ModuleList(self.block(spec, layer) for layer in range(spec.num_layers))
        self.final_norm = norm(spec)
        self.head = (
            None if spec.tied_embeddings else Linear(spec.hidden_size, spec.vocab_size, bias=False)
        )
        self._rotary = None if spec.rotary is None else RotaryTable(spec.rotary)
        self._window_rotary = (
            self._rotary if spec.window_rotary is None else RotaryTable(spec.window_rotary)
        )
        self.products, self.batch_invariant = "torch", False
        """Name of the kernels that compute its matrix products, and whether a row of a product
        depends on that row alone, bit for bit."""
        self.row_multiple = 1
        """Of a step's tokens: other numbers of them are filled up at every product."""
        self.block_forms = Counter[str]()
        """Where matrices are held in blocks as in their file: how many tensors of the file in each
        format."""
        # Counted before any module is replaced: quantized ones have scales besides.
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        self.num_parts_run = 0

    def forward(self, token_ids_T: Tensor, position_ids_T: Tensor, attend: Attend) -> Tensor:
        """Ids and positions of T tokens -> their last hidden states x_TD, normalised."""
        x_TD = self.embed(token_ids_T, position_ids_T)
        return self.run_blocks(x_TD, self.rotations(position_ids_T, x_TD.dtype), attend)

    def embed(self, token_ids_T: Tensor, position_ids_T: Tensor) -> Tensor:
        """Ids and positions -> x_TD, the input of the first block."""
        x_TD: Tensor = self.token_embedding(token_ids_T)
        if self.spec.embedding_scale != 1.0:
            # Rounded to the dtype first, as these models were trained.
            x_TD = x_TD * torch.tensor(self.spec.embedding_scale, dtype=x_TD.dtype)
        if self.position_embedding is not None:
            x_TD = x_TD + self.position_embedding(position_ids_T)
        return x_TD

    def rotations(
        self, position_ids_T: Tensor, dtype: torch.dtype
    ) -> tuple[Rotation | None, Rotation | None]:
        """The rotary embedding of positions, in layers without a window and in those with one; None
        where there is none.
        """
        if self._rotary is None or self._window_rotary is None:
            return None, None
        rotation = self._rotary(position_ids_T, dtype)
        return rotation, rotation if self._window_rotary is self._rotary else self._window_rotary(
            position_ids_T, dtype
        )

    def run_blocks(
        self, x_TD: Tensor, rotations: tuple[Rotation | None, Rotation | None], attend: Attend
    ) -> Tensor:
        """All blocks, one after another. -> the final norm of the residual stream"""
        blocks: list[Any] = list(self.blocks)
        norms = [*(block.attention_norm for block in blocks), self.final_norm]
        normed_TD: Tensor = norms[0](x_TD)
        for layer, block in enumerate(blocks):
            x_TD, normed_TD = block(
                x_TD,
                normed_TD,
                layer,
                attend,
                # torch 2.11 compiles no index by a truth value.
                rotations[int(self.spec.window(layer) is not None)],
                norms[layer + 1],
            )
            self.num_parts_run += 1
        return normed_TD

    def logits(self, x_SD: Tensor) -> Tensor:
        """Hidden states -> logits_SV. Give it only the rows that need them: the head is a large
        share of a small step.
        """
        self.num_parts_run += 1
        if self.spec.logit_scale != 1.0:
            x_SD = x_SD * self.spec.logit_scale
        logits_SV: Tensor = (
            self.token_embedding.logits(x_SD) if self.head is None else self.head(x_SD)
        )
        return logits_SV


def meta_decoder(spec: ModelSpec) -> Decoder:
    """A decoder on torch's meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Decoder(spec)
