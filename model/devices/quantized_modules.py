"""Modules with weights in 8 bits, which replace a decoder's linear layers and embedding tables where no packed CPU kernel does.

int8 products are exact integer sums (devices/quantization.py). fp8 products are summed in float32: on a GPU by our product kernel, which
converts as it reads and whose rows depend on no other rows; elsewhere torch converts, a number of rows at a time.

Invariant: a quantized matrix keeps no float copy of itself.

Shape letters: T tokens, S rows whose logits are wanted, I input and O output columns, V rows of a table, D its columns.
"""

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cache.pool import FLOAT8
from model.devices.quantization import integer_product, quantize_tokens, quantize_weights
from model.layers import Embedding, Linear

CONVERTED_AT_ONCE = 2**24
"""Elements that torch converts from float8 at a time."""
STORED_AS = {"int8": torch.int8, "fp8": FLOAT8}


def float8_product(x_TI: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T * t + b in x's dtype, summed in float32."""
    if _multiplied_by_kernels(x_TI.device.type):
        from model.devices.gpu.launches import multiply

        return multiply(x_TI[:, None], weight_OI[None], bias_O, scale_O=scale_O)[:, 0]
    rows = max(1, CONVERTED_AT_ONCE // weight_OI.shape[1])
    wide_TI = x_TI.float()
    y_TO = torch.cat([F.linear(wide_TI, weight.float()) for weight in weight_OI.split(rows)], dim=-1).mul_(scale_O)
    return (y_TO if bias_O is None else y_TO.add_(bias_O)).to(x_TI.dtype)


@cache
def _multiplied_by_kernels(device_type: str) -> bool:
    return device_type != "cpu" and find_spec("triton") is not None


class QuantizedMatrix(nn.Module):
    """A matrix in 8 bits with a scale for each row, and in int8 a sum; all are parameters, so that they are counted, moved and named like
    any other.
    """

    def __init__(self, num_rows: int, num_columns: int, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        weight_OI = torch.empty(num_rows, num_columns, dtype=STORED_AS[kind], device="meta")
        self.weight = nn.Parameter(weight_OI, requires_grad=False)
        self.scale = nn.Parameter(torch.empty(num_rows, device="meta"), requires_grad=False)
        self.row_sums = None
        if kind == "int8":
            self.row_sums = nn.Parameter(torch.empty(num_rows, dtype=torch.int32, device="meta"), requires_grad=False)
        self.dtype = dtype

    def allocate(self, device: torch.device) -> None:
        """Memory for the values, which `set_rows` brings."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            if name in ("weight", "scale", "row_sums"):
                setattr(self, name, nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False))

    def set_rows(self, first: int, rows: Tensor) -> None:
        """Takes rows of the float matrix from number `first` on, quantized."""
        quantized, scale = quantize_weights(rows.to(self.weight.device), self.weight.dtype)
        end = first + len(rows)
        self.weight[first:end], self.scale[first:end] = quantized, scale
        if self.row_sums is not None:
            self.row_sums[first:end] = quantized.sum(dim=-1, dtype=torch.int32)

    def product(self, x: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + b in x's dtype."""
        x_TI = x.reshape(-1, x.shape[-1])
        if self.row_sums is None:
            return float8_product(x_TI, self.weight, self.scale, bias_O).view(*x.shape[:-1], -1)
        x_int8_TI, scale_T, zero_T = quantize_tokens(x_TI)
        sums_TO = integer_product(x_int8_TI, self.weight)
        y_TO = sums_TO.addcmul_(zero_T[:, None], self.row_sums, value=-1).float().mul_(scale_T[:, None]).mul_(self.scale)
        y = y_TO.to(x.dtype).view(*x.shape[:-1], -1)
        return y if bias_O is None else y + bias_O


class QuantizedLinear(QuantizedMatrix):
    """Stands for an nn.Linear."""

    def __init__(self, linear: nn.Linear, kind: str, dtype: torch.dtype) -> None:
        super().__init__(linear.out_features, linear.in_features, kind, dtype)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class QuantizedEmbedding(QuantizedMatrix):
    """Stands for an nn.Embedding, as a table and, if it is the token embedding, as the head."""

    def __init__(self, embedding: nn.Embedding, kind: str, dtype: torch.dtype) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, kind, dtype)

    def forward(self, ids_T: Tensor) -> Tensor:
        # Taken as bytes: torch does not index float8 everywhere.
        rows_TD = self.weight.view(torch.uint8)[ids_T].view(self.weight.dtype)
        return (rows_TD.float() * self.scale[ids_T, None]).to(self.dtype)

    def logits(self, x_SD: Tensor) -> Tensor:
        """x_SD -> logits_SV"""
        return self.product(x_SD)


def quantize_modules(root: nn.Module, kind: str, dtype: torch.dtype) -> None:
    """Puts stand-ins of this kind, still without values, in the place of every linear layer and table.

    Routers, which decide and are small, stay in float, and so does what heads apply rows of (latent attention's second projection).
    """
    for name, module in list(root.named_modules()):
        if type(module) is Linear:
            root.set_submodule(name, QuantizedLinear(module, kind, dtype))
        elif type(module) is Embedding:
            root.set_submodule(name, QuantizedEmbedding(module, kind, dtype))
