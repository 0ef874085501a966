"""The pieces of a block besides attention. Pure functions of their input; none of them knows of sequences or caches.

Shape letters: T tokens of the step, D hidden size, F intermediate size.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from model.spec import ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class MLP(nn.Module):
    """x_TD -> activation(x W_up + b) W_down + b, through F = intermediate_size."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden_size, spec.intermediate_size)
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD: Tensor = self.down(self.activation(self.up(x_TD)))
        return y_TD


def norm(spec: ModelSpec) -> nn.LayerNorm:
    """The normalisation of this spec over D."""
    return nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon)
