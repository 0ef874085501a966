"""Decoder: the forward pass. Serving, training, scoring and benchmarks run this one and differ in
the `attend` they pass.

The tokens of all sequences are concatenated on one axis; there is no batch axis and no notion of
prefill or decode. Invariant: a token's output depends on its id, its position and what `attend`
lets it attend to, and on whether it is in the step's tail, if the step has one.

Shape letters: T tokens of the step, K those of them whose logits are wanted, S rows of logits, D
hidden size, L layers, P columns of a layer's input, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
    add,
    add_norm,
    norm,
)
from model.pooling import Pooler
from model.spec import ModelSpec


class Tail(NamedTuple):
    """The tokens of a step that pass the layers after the last one that stores keys and values:
    those whose logits are wanted.
    """

    rows_K: Tensor
    """Their indices on T."""
    attend: Attend


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
            MultiQueryAttention(spec, layer)
            if spec.latent is None
            else LatentAttention(spec, spec.latent)
        )
        self.mlp_norm = None if spec.shared_norm else norm(spec)
        experts = spec.experts
        self.mlp = (
            MLP(spec, spec.intermediate_size_of(layer))
            if experts is None or layer < experts.first_layer
            else MixtureOfExperts(spec, experts)
        )
        self.attention_branch_norm = norm(spec) if spec.branch_norms else None
        self.mlp_branch_norm = norm(spec) if spec.branch_norms else None
        self.layer_input = None
        """A narrow MLP whose activations are multiplied by the columns that the layer is given of
        each token (Gemma 4)."""
        if spec.layer_input_size:
            ungated = replace(spec, gated_mlp=False, mlp_bias=False)
            self.layer_input = MLP(ungated, spec.layer_input_size)
        self.layer_input_norm = norm(spec) if spec.layer_input_size else None
        self.scale = nn.Parameter(torch.ones(1)) if spec.layer_scale else None
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
        input_TP: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and its `attention_norm` -> the stream after this block and its
        `next_norm`. `input_TP`: the columns that the layer is given of each token.
        """
        attended = self.attention(normed_TD, layer, attend, rotation), self.attention_branch_norm
        if self.parallel or self.mlp_norm is None:
            fed_TD = self.mlp(normed_TD if self.mlp_norm is None else self.mlp_norm(x_TD))
            return self.add_norm(
                x_TD, [attended, (fed_TD, self.mlp_branch_norm)], self.residual_scale, next_norm
            )
        x_TD, normed_TD = self.add_norm(x_TD, [attended], self.residual_scale, self.mlp_norm)
        fed = self.mlp(normed_TD), self.mlp_branch_norm
        if self.layer_input is not None:
            x_TD = add(x_TD, fed, self.residual_scale)
            fed = self.layer_input(x_TD, input_TP), self.layer_input_norm
        if self.scale is None:
            return self.add_norm(x_TD, [fed], self.residual_scale, next_norm)
        x_TD = torch.mul(add(x_TD, fed, self.residual_scale), self.scale)
        return x_TD, next_norm(x_TD)


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
        self.layer_inputs = LayerInputs(spec) if spec.layer_input_size else None
        self.blocks = nn.ModuleList(self.block(spec, layer) for layer in range(spec.num_layers))
        self.final_norm = norm(spec)
        self.head = (
            None if spec.tied_embeddings else Linear(spec.hidden_size, spec.vocab_size, bias=False)
        )
        self.pooler = None if spec.pooling is None else Pooler(spec.pooling)
        # Of a model that drafts tokens for another: from that one's width to its own, and back.
        self.input_projection = self.output_projection = None
        if spec.backbone_size:
            self.input_projection = Linear(2 * spec.backbone_size, spec.hidden_size, bias=False)
            self.output_projection = Linear(spec.hidden_size, spec.backbone_size, bias=False)
        self.cap = cap
        """Replaced by devices with a kernel for it."""
        self._rotary = None if spec.rotary is None else RotaryTable(spec.rotary)
        self._window_rotary = (
            None if spec.window_rotary is None else RotaryTable(spec.window_rotary)
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

    def forward(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        attend: Attend,
        tail: Tail | None = None,
        run: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Ids and positions of T tokens -> their last hidden states x_TD, normalised. With `tail`
        only those of its rows are; the others are what the last layer that stores keys and values
        has left. `run`: what computes layers in place of `run_layers`.
        """
        run = run or self.run_layers
        x_TD = self.embed(token_ids_T, position_ids_T)
        rotations = self.rotations(position_ids_T, x_TD.dtype)
        inputs_TLP = None if self.layer_inputs is None else self.layer_inputs(token_ids_T, x_TD)
        num_layers, num_storing = self.spec.num_layers, self.spec.num_storing_layers
        if tail is None:
            return run(x_TD, inputs_TLP, rotations, attend, range(num_layers))
        rows_K, early, late = tail.rows_K, None, None
        if inputs_TLP is not None:
            early, late = inputs_TLP[:, :num_storing], inputs_TLP[rows_K, num_storing:]
        x_TD = run(x_TD, early, rotations, attend, range(num_storing))
        if not len(rows_K):
            return x_TD
        turned = [rotation and rotation.of(rows_K) for rotation in rotations]
        last_KD = run(x_TD[rows_K], late, turned, tail.attend, range(num_storing, num_layers))
        return x_TD.index_copy_(0, rows_K, last_KD)

    def embed(self, token_ids_T: Tensor, position_ids_T: Tensor) -> Tensor:
        """Ids and positions -> x_TD, the input of the first block."""
        x_TD: Tensor = self.token_embedding(token_ids_T)
        if self.spec.embedding_scale != 1.0:
            # Rounded to the dtype first, as these models were trained.
            x_TD = x_TD * torch.tensor(self.spec.embedding_scale, dtype=x_TD.dtype)
        if self.position_embedding is not None:
            x_TD = x_TD + self.position_embedding(position_ids_T)
        return x_TD

    def rotations(self, position_ids_T: Tensor, dtype: torch.dtype) -> list[Rotation | None]:
        """The rotary embedding of positions, in layers without a window and in those with one; None
        where there is none.
        """
        rotation = None if self._rotary is None else self._rotary(position_ids_T, dtype)
        if self._window_rotary is None:
            return [rotation, rotation]
        return [rotation, self._window_rotary(position_ids_T, dtype)]

    def run_layers(
        self,
        x_TD: Tensor,
        inputs_TLP: Tensor | None,
        rotations: Sequence[Rotation | None],
        attend: Attend,
        layers: range,
    ) -> Tensor:
        """These layers, one after another: the residual stream before them -> the one after them
        or, after the last layer of all, the final norm of it. `inputs_TLP`: the columns that these
        layers are given of each token, if they are given any.
        """
        norms: list[Any] = [*(block.attention_norm for block in self.blocks), self.final_norm]
        normed_TD = norms[layers.start](x_TD)
        for index, layer in enumerate(layers):
            x_TD, normed_TD = self.blocks[layer](
                x_TD,
                normed_TD,
                layer,
                attend,
                # torch 2.11 compiles no index by a truth value.
                rotations[int(self.spec.window(layer) is not None)],
                norms[layer + 1],
                None if inputs_TLP is None else inputs_TLP[:, index],
            )
            self.num_parts_run += 1
        return normed_TD if layers.stop == self.spec.num_layers else x_TD

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
        return (
            logits_SV if self.spec.logit_cap is None else self.cap(logits_SV, self.spec.logit_cap)
        )


class LayerInputs(nn.Module):
    """The columns that each layer is given of a token (Gemma 4): the sum of a row of a table
    and a normalised projection of the token's embedding.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.num_layers, self.size = spec.num_layers, spec.layer_input_size
        self.table: nn.Module = Embedding(spec.layer_input_vocab_size, spec.num_layers * self.size)
        self.projection = Linear(spec.hidden_size, spec.num_layers * self.size, bias=False)
        self.norm = norm(spec, self.size)
        self.scale = spec.hidden_size**-0.5

    def forward(self, token_ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """-> inputs_TLP, for each of L layers"""
        shape = (-1, self.num_layers, self.size)
        row_TLP = self.table(token_ids_T).view(shape)
        # Rounded to the dtype first, as these models were trained.
        factor = torch.tensor(self.size**0.5, dtype=row_TLP.dtype)
        inputs_TLP: Tensor = self.norm(self.projection(x_TD).mul_(self.scale).view(shape))
        # In place: of a long prompt these are as many numbers as its activations.
        return inputs_TLP.add_(row_TLP.mul_(factor)).mul_(2.0**-0.5)


def cap(logits_SV: Tensor, most: float) -> Tensor:
    """Bounds logits softly: z -> most * tanh(z / most)."""
    return (logits_SV / most).tanh() * most


def meta_decoder(spec: ModelSpec) -> Decoder:
    """A decoder on torch's meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Decoder(spec)
