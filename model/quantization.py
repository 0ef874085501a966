"""Weights in 8 bits with a float32 scale for each output channel: as integers, or as floating point numbers.

int8: activations are quantized token by token as they come, accumulation is exact. x = s (x_q - z) for each token and W = t W_q for each
output channel, so y = (x_q W_q^T - z * rowsums(W_q)) * s * t + b. The zero point z is there because what an MLP's activation gives is
hardly ever negative: without it half the range would lie idle. The sums are integers, so a token's result does not depend on which
others are computed with it.

fp8 (float8_e4m3fn): activations stay as they are. y = (x W_q^T) * t + b with sums in float32: on a GPU by our kernel of products, which
converts as it reads, and a token's result is its own; without it torch converts, some rows at a time.

Invariant: a quantized matrix keeps no float copy of itself.

Shape letters: T tokens, I input and O output columns, V rows of a table, D its columns.
"""

from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cache.pool import FLOAT8, in_float8
from model.layers import Embedding, Linear

LARGEST = 127
# What the GPU's integer product asks for: more rows than this, and sizes that are multiples of 8.
GPU_MIN_ROWS, GPU_MULTIPLE = 17, 8
CONVERTED_AT_ONCE = 2**24
"""Float8 numbers, where torch converts them."""
STORED_AS = {"int8": torch.int8, "fp8": FLOAT8}
EXACT_COLUMNS = 2**24 // (LARGEST * (LARGEST + 1))


def quantize_weights(weight_OI: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """W -> (W_q, t_O): symmetric around 0, a row's largest value being 127 or, in float8, 448. A row of nothing has scale 1."""
    weight_OI = weight_OI.float()
    largest_O = weight_OI.abs().amax(dim=-1)
    scale_O = largest_O / (LARGEST if dtype is torch.int8 else torch.finfo(dtype).max)
    scale_O = torch.where(scale_O > 0, scale_O, torch.ones_like(scale_O))
    weight_OI = weight_OI / scale_O[:, None]
    return weight_OI.round_().to(dtype) if dtype is torch.int8 else in_float8(weight_OI), scale_O


def quantize_tokens(x_TI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x -> (x_q in -128 .. 127, s_T, z_T): from the least to the greatest value of each token, 0 always among what is represented."""
    x_TI = x_TI.float()
    least_T1, greatest_T1 = x_TI.amin(dim=-1, keepdim=True).clamp_(max=0), x_TI.amax(dim=-1, keepdim=True).clamp_(min=0)
    scale_T1 = ((greatest_T1 - least_T1) / (2 * LARGEST + 1)).clamp_(min=torch.finfo(torch.float32).tiny)
    inverse_T1 = scale_T1.reciprocal()
    zero_T1 = -1 - LARGEST - (least_T1 * inverse_T1).round_()
    x_int8_TI = (x_TI * inverse_T1).round_().add_(zero_T1).clamp_(-1 - LARGEST, LARGEST).to(torch.int8)
    return x_int8_TI, scale_T1[:, 0], zero_T1[:, 0].to(torch.int32)


def integer_product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T of int8 matrices, exactly, as int32."""
    if x_TI.shape[1] == 1:
        return x_TI.int() * weight_OI.int().T  # A transposed column looks like a row to torch's product, and is taken for one.
    if x_TI.device.type == "cpu":
        return torch._int_mm(x_TI, weight_OI.T) if _product_is_exact() else product_in_floats(x_TI, weight_OI)
    num_rows, num_columns = x_TI.shape
    padded_TI = _padded(x_TI, max(GPU_MIN_ROWS, num_rows), -(-num_columns // GPU_MULTIPLE) * GPU_MULTIPLE)
    padded_OI = _padded(weight_OI, -(-len(weight_OI) // GPU_MULTIPLE) * GPU_MULTIPLE, padded_TI.shape[1])
    return torch._int_mm(padded_TI, padded_OI.T)[:num_rows, : len(weight_OI)]


def _padded(x: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """x with zeros to that size; itself where it has it."""
    missing = num_columns - x.shape[1], num_rows - x.shape[0]
    return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x


@cache
def _product_is_exact() -> bool:
    """Whether this CPU sums products of bytes in 32 bits. One without VNNI has torch sum pairs of them in 16, which overflow."""
    extreme = torch.full((1, 64), LARGEST, dtype=torch.int8)
    return int(torch._int_mm(extreme, extreme.T)) == 64 * LARGEST**2


def product_in_floats(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """The same through float32, whose 24 bits hold every sum of EXACT_COLUMNS products."""
    sums_TO = torch.zeros(len(x_TI), len(weight_OI), dtype=torch.int32)
    for x, weight in zip(x_TI.split(EXACT_COLUMNS, dim=1), weight_OI.split(EXACT_COLUMNS, dim=1), strict=True):
        sums_TO += (x.float() @ weight.float().T).int()
    return sums_TO


def float8_product(x_TI: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T * t + b in x's dtype, summed in float32."""
    if _multiplied_by_kernels(x_TI.device.type):
        from model.gpu.launches import multiply

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
