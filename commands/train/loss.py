"""The training loss, compiled on a GPU; bfloat16 autocast where the hardware multiplies it
natively.

On a CPU nothing is compiled: measured on two cores, a compiled step takes as long as another, and
the compiler up to two minutes. Invariant: compiled or not, the same loss up to rounding. Knows
nothing of optimizers and of where batches come from.

Shape letters: N tokens of the batch, V vocabulary.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from commands.causal_attention import CausalAttention
from commands.train.precision import multiplies_bfloat16
from model.decoder import Decoder

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(ids_N, targets_N, positions_N) -> mean cross-entropy in nats per token."""


class Loss:
    """Mean cross-entropy of a batch. `compiler` is a backend of torch.compile; what it refuses is
    computed without it, after one line.
    """

    def __init__(
        self, decoder: Decoder, device: str, compiler: str | Callable[..., Any] | None = None
    ) -> None:
        self.decoder, self.device, self.compiler = decoder, device, compiler
        self._functions: dict[int, LossFunction] = {}

    def __call__(
        self, ids_N: Tensor, targets_N: Tensor, positions_N: Tensor, length: int
    ) -> Tensor:
        """-> nats per token, of sequences of `length` tokens each."""
        if length not in self._functions:
            self._functions[length] = self._function(length)
        self.decoder.num_parts_run = (
            0  # The compiler takes it for a constant, and would compile again when it has changed.
        )
        try:
            return self._functions[length](ids_N, targets_N, positions_N)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split())[:900]
            print(
                f"onehead train: the loss cannot be compiled, so that steps take longer: {reason}",
                file=sys.stderr,
            )
            self.compiler = None
            self._functions.clear()
            return self(ids_N, targets_N, positions_N, length)

    def _function(self, length: int) -> LossFunction:
        decoder = self.decoder
        attend = CausalAttention(length, self.decoder.spec)
        device = self.device
        enabled = multiplies_bfloat16(device)

        def loss(ids_N: Tensor, targets_N: Tensor, positions_N: Tensor) -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=enabled):
                logits_NV = decoder.logits(decoder(ids_N, positions_N, attend))
            return F.cross_entropy(logits_NV.float(), targets_N)

        if self.compiler is None:
            return loss
        compiled: LossFunction = torch.compile(
            loss, dynamic=False, fullgraph=True, backend=self.compiler
        )
        return compiled
