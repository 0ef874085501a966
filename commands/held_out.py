"""The held-out loss of a causal model, one sequence at a time.

Two losses can be compared only if they were measured on the same sequences. Knows nothing of
optimizers; a model is any function from token ids to logits.

Shape letters: B sequences, T tokens of a sequence, U = T + 1 tokens of a row, V vocabulary.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from commands import corpus
from commands.causal_attention import CausalAttention
from model.decoder import Decoder
from model.spec import ModelSpec, OptionError

NUM_SEQUENCES = 32
LONGEST = 512
"""Tokens of each sequence by which checkpoints are compared, or a checkpoint's max_positions if
that is less."""

NO_TARGET = -100
"""What PyTorch's cross-entropy leaves out."""
Logits = Callable[[Tensor], Tensor]
"""The ids of one sequence, from position 0 -> logits_TV."""


def held_out_rows(
    documents: list[corpus.Document], tokenizer: Tokenizer, end_ids: tuple[int, ...], length: int
) -> np.ndarray:
    """rows_BU, a fixed sample of the held-out documents' sequences. Raises OptionError where they
    are too short for one.
    """
    held_out = [document for document in documents if document.held_out]
    stream = corpus.token_stream(held_out, tokenizer, end_ids, fim_rate=0.0, seed=0)
    if len(stream) <= length:
        found = f"the held-out documents of the corpus have {len(stream)} tokens"
        remedy = "give more text or, to train, a smaller --sequence"
        raise OptionError(f"{found}, expected more than a sequence of {length}; {remedy}")
    return corpus.sequences(stream, length, seed=0)[:NUM_SEQUENCES].astype(np.int64)


def comparison_rows(
    documents: list[corpus.Document], tokenizer: Tokenizer, spec: ModelSpec
) -> np.ndarray:
    """The held-out rows by which checkpoints of this spec's tokens and positions are compared."""
    return held_out_rows(documents, tokenizer, spec.end_token_ids, min(LONGEST, spec.max_positions))


def decoder_logits(decoder: Decoder) -> Logits:
    """The Logits function of a Decoder."""

    def logits_of(ids_T: Tensor) -> Tensor:
        positions_T = torch.arange(len(ids_T), device=ids_T.device)
        return decoder.logits(
            decoder(ids_T, positions_T, CausalAttention(len(ids_T), decoder.spec))
        )

    return logits_of


def inputs_and_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that rows of U = T + 1 tokens read and, of each, the one that is to follow: NO_TARGET
    where it is not learnt, which the rows hold as ~id. A row of such tokens alone is learnt whole,
    because the mean of no losses is no number.
    """
    ids, learnt = torch.where(rows < 0, ~rows, rows), rows >= 0
    learnt |= ~learnt[..., 1:].any(-1, keepdim=True)
    return ids[..., :-1], ids.masked_fill(~learnt, NO_TARGET)[..., 1:]


@torch.no_grad()
def losses(logits_of: Logits, rows_BU: np.ndarray, device: str = "cpu") -> Iterator[float]:
    """The mean loss of each sequence in turn, in nats per token."""
    for row_U in torch.from_numpy(rows_BU).to(device):
        ids_T, targets_T = inputs_and_targets(row_U)
        yield F.cross_entropy(logits_of(ids_T).float(), targets_T).item()
