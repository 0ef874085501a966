"""Muon (Jordan et al. 2024) that steps all matrices of one shape in one batch: few large operations
in place of many small ones.

Invariant: the update of `torch.optim.Muon` with the size of AdamW's (`match_rms_adamw`), matrix by
matrix, up to rounding; the saved state is laid out like that optimizer's. Knows nothing of models
and schedules.
"""

import math

import torch
from torch import Tensor, nn

from commands.train.precision import multiplies_bfloat16

NEWTON_SCHULZ, ITERATIONS = (3.4445, -4.7750, 2.0315), 5


class Muon(torch.optim.Optimizer):
    """Steps matrices; `lr` is read at each step. A matrix without a gradient, an expert that no
    token chose, is left alone.
    """

    def __init__(
        self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps every matrix against its gradient."""
        for group in self.param_groups:
            for shape in dict.fromkeys(p.shape for p in group["params"] if p.grad is not None):
                matrices = [p for p in group["params"] if p.shape == shape and p.grad is not None]
                gradients = [p.grad for p in matrices]
                momenta = [
                    self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    for p in matrices
                ]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                updates = orthogonalised(
                    torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"]))
                )
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(
                    matrices,
                    list(updates.float().unbind()),
                    alpha=-0.2 * group["lr"] * math.sqrt(max(shape)),
                )


def orthogonalised(x: Tensor) -> Tensor:
    """Each matrix of the batch with its singular values near 1, by Newton-Schulz iterations: in
    bfloat16, or in float32 where that is faster.
    """
    a, b, c = NEWTON_SCHULZ
    x = x.to(torch.bfloat16 if multiplies_bfloat16(x.device.type) else torch.float32)
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if x.shape[-2] > x.shape[-1] else wide
