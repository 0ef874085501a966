"""The held-out loss of a causal model, one sequence at a time, and attention without a cache, which training shares.

Two losses can be compared only if they were measured on the same sequences. Knows nothing of optimizers; a model is any function from token
ids to logits.

Shape letters: B sequences, U = T + 1 tokens of a row, N = B * T tokens, H query heads, h heads of K and V as given, k and v columns of a
key and a value, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from commands import corpus
from model.decoder import Decoder
from model.layers import Rotation
from model.spec import ModelSpec, OptionError

NUM_SEQUENCES = 32
LONGEST = 512
"""Tokens of each sequence by which checkpoints are compared, or a checkpoint's max_positions if that is less."""

Logits = Callable[[Tensor], Tensor]
"""The ids of one sequence, from position 0 -> logits_TV."""


@dataclass(frozen=True, slots=True)
class CausalAttention:
    """`attend` without a cache: N tokens are sequences of `length`, each causal within itself and within the layer's window."""

    length: int
    spec: ModelSpec

    def __call__(self, layer: int, q_NHk: Tensor, k_Nk: Tensor, v_Nv: Tensor, rotation: Rotation | None) -> Tensor:
        if rotation is not None:
            q_NHk, k_Nk = rotation.both(q_NHk, k_Nk)
        q_BHTk, k_BhTk, v_BhTv = (x.unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q_NHk, _headed(k_Nk), _headed(v_Nv)))
        k_BHTk, v_BHTv = (x.expand(-1, q_BHTk.shape[1], -1, -1) for x in (k_BhTk, v_BhTv))
        window, seen_TT = self.spec.window(layer), None
        if window is not None and window < self.length:
            seen_TT = torch.ones(self.length, self.length, dtype=torch.bool, device=q_NHk.device).tril().triu(1 - window)
        o_BHTv = F.scaled_dot_product_attention(
            q_BHTk, k_BHTk, v_BHTv, attn_mask=seen_TT, is_causal=seen_TT is None, scale=self.spec.attention_scale
        )
        return o_BHTv.transpose(1, 2).flatten(0, 1)


def _headed(x_Nd: Tensor) -> Tensor:
    """K or V with a head axis: of length 1, or what a multi-head decoder gave it."""
    return x_Nd.unsqueeze(1) if x_Nd.ndim == 2 else x_Nd


def held_out_rows(documents: list[corpus.Document], tokenizer: Tokenizer, end_ids: tuple[int, ...], length: int) -> np.ndarray:
    """rows_BU, a fixed sample of the held-out documents' sequences. Raises OptionError where they are too short for one."""
    held_out = [document for document in documents if document.held_out]
    stream = corpus.token_stream(held_out, tokenizer, end_ids, fim_rate=0.0, seed=0)
    if len(stream) <= length:
        raise OptionError(f"the held-out documents of the corpus have {len(stream)} tokens, expected more than a sequence of {length}")
    return corpus.sequences(stream, length, seed=0)[:NUM_SEQUENCES].astype(np.int64)


def comparison_rows(documents: list[corpus.Document], tokenizer: Tokenizer, spec: ModelSpec) -> np.ndarray:
    """The held-out rows by which checkpoints of this spec's tokens and positions are compared."""
    return held_out_rows(documents, tokenizer, spec.end_token_ids, min(LONGEST, spec.max_positions))


def decoder_logits(decoder: Decoder) -> Logits:
    """The Logits function of a Decoder."""

    def logits_of(ids_T: Tensor) -> Tensor:
        positions_T = torch.arange(len(ids_T), device=ids_T.device)
        return decoder.logits(decoder(ids_T, positions_T, CausalAttention(len(ids_T), decoder.spec)))

    return logits_of


@torch.no_grad()
def losses(logits_of: Logits, rows_BU: np.ndarray, device: str = "cpu") -> Iterator[float]:
    """The mean loss of each sequence in turn, in nats per token."""
    for row_U in torch.from_numpy(rows_BU).to(device):
        yield F.cross_entropy(logits_of(row_U[:-1]).float(), row_U[1:]).item()
