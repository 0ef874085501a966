"""Pooler: the states of a text's tokens -> one vector, where a model makes that instead of a next
token. It knows no sequences; the mean and every product depend on one text alone.

Shape letters: T tokens of the step, S texts, D hidden size, I input and E output columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from model.layers import Linear
from model.spec import Pooling


class Pooler(nn.Module):
    """The mean of the states, or the last one, and linear layers after it
    (sentence-transformers' Pooling and Dense)."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling
        self.layers = nn.ModuleList(
            Linear(layer.inputs, layer.outputs, bias=layer.bias) for layer in pooling.layers
        )

    def forward(self, x_TD: Tensor, texts: Sequence[slice]) -> Tensor:
        """Normalised states, and where in them the tokens of each text are -> y_SE"""
        if self.pooling.over == "mean":
            # In float64, where the order in which torch adds is lost by rounding.
            rows = [x_TD[text].mean(0, dtype=torch.float64).to(x_TD.dtype) for text in texts]
        else:
            rows = [x_TD[text.stop - 1] for text in texts]
        y_SI = torch.stack(rows)
        for layer, module in zip(self.pooling.layers, self.layers, strict=True):
            y_SI = module(y_SI)
            y_SI = y_SI.tanh() if layer.activation == "tanh" else y_SI
        return y_SI
