"""Matrices in the order in which the CPU's kernels read them (model/native/product.cpp), in float32 or in int8.

They stand for linear layers and tables as model.quantization's do, with the same arithmetic; bias and activation are applied where the
sums are. Invariant: a row of a product depends on that row of x alone, bit for bit.

Shape letters: T tokens, S rows whose logits are wanted, I input and O output columns, V rows of a table, D its columns.
"""

import ctypes

import torch
from torch import Tensor, nn

from model.layers import ACTIVATIONS, MLP, Embedding, Linear
from model.native import library, name_of
from model.quantization import quantize_weights

CODES = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}


class Product(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weights", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "rows", "inputs", "outputs", "activation")),
        *((name, ctypes.c_void_p) for name in ("scales", "row_sums")),
    )


class PackedMatrix(nn.Module):
    """W [O, I] in panels; quantized, with a scale and a sum for each row."""

    def __init__(self, num_rows: int, num_columns: int, quantized: bool) -> None:
        super().__init__()
        found = library()
        assert found is not None
        self._library = found
        self.shape = num_rows, num_columns
        self.quantized = quantized
        panel = found.panel()
        columns = (num_columns + 3) // 4 * 4 if quantized else num_columns
        dtype = torch.int8 if quantized else torch.float32
        panels = torch.empty((num_rows + panel - 1) // panel, columns, panel, dtype=dtype, device="meta")
        self.weight = nn.Parameter(panels, requires_grad=False)
        self.scale = self.row_sums = None
        if quantized:
            self.scale = nn.Parameter(torch.empty(num_rows, device="meta"), requires_grad=False)
            self.row_sums = nn.Parameter(torch.empty(num_rows, dtype=torch.int32, device="meta"), requires_grad=False)

    @property
    def isa(self) -> str:
        """The width of vectors of its kernels."""
        return name_of(self._library)

    @property
    def num_filling_bytes(self) -> int:
        """Of its memory, what fills up the last panel and holds nothing."""
        return self.weight.nbytes - self.shape[0] * self.shape[1] * self.weight.itemsize

    def allocate(self, device: torch.device) -> None:
        """Memory for the values, which `set_rows` brings."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            if name in ("weight", "scale", "row_sums"):
                setattr(self, name, nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=False))

    def set_rows(self, first: int, rows: Tensor) -> None:
        """Takes rows of the float matrix from number `first` on."""
        rows, end = rows.float().contiguous(), first + len(rows)
        pack = self._library.pack_floats
        if self.scale is not None and self.row_sums is not None:
            rows, self.scale[first:end] = quantize_weights(rows)
            self.row_sums[first:end] = rows.sum(dim=-1, dtype=torch.int32)
            pack = self._library.pack_bytes
        pack(_address(self.weight), _address(rows), *map(ctypes.c_int64, (first, len(rows), self.shape[1])))

    def product(self, x: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        """activation(x W^T + bias)"""
        assert x.dtype is torch.float32
        x_TI = x.reshape(-1, x.shape[-1])
        x_TI = x_TI if x_TI.stride(-1) == 1 else x_TI.contiguous()
        y_TO = x_TI.new_empty(len(x_TI), self.shape[0])
        asked = Product(
            x_TI.data_ptr(),
            self.weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y_TO.data_ptr(),
            x_TI.stride(0),
            len(x_TI),
            self.shape[1],
            self.shape[0],
            CODES[activation],
            None if self.scale is None else self.scale.data_ptr(),
            None if self.row_sums is None else self.row_sums.data_ptr(),
        )
        self._library.product(ctypes.byref(asked), ctypes.c_int64(torch.get_num_threads()))
        return y_TO.view(*x.shape[:-1], self.shape[0])

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of W by number, as float32. Raises IndexError for a number that it has not."""
        if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < self.shape[0]:
            raise IndexError(f"rows {ids_T.min()} to {ids_T.max()} of {self.shape[0]}")
        dtype = torch.int8 if self.quantized else torch.float32
        found = torch.empty(len(ids_T), self.shape[1], dtype=dtype)
        take = self._library.take_bytes if self.quantized else self._library.take_floats
        take(_address(self.weight), _address(ids_T), *map(ctypes.c_int64, (len(ids_T), self.shape[1])), _address(found))
        return found if self.scale is None else found.float() * self.scale[ids_T, None]


class PackedLinear(PackedMatrix):
    """Stands for an nn.Linear, and for the activation behind it."""

    def __init__(self, linear: nn.Linear, quantized: bool) -> None:
        super().__init__(linear.out_features, linear.in_features, quantized)
        self.bias = linear.bias
        self.activation = "none"

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias, self.activation)


class PackedEmbedding(PackedMatrix):
    """Stands for an nn.Embedding, as a table and, if it is the token embedding, as the head."""

    def __init__(self, embedding: nn.Embedding, quantized: bool) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, quantized)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.rows(ids_T)

    def logits(self, x_SD: Tensor) -> Tensor:
        """x_SD -> logits_SV"""
        return self.product(x_SD)


def pack_modules(root: nn.Module, quantized: bool) -> None:
    """Puts packed stand-ins, still without values, in the place of every linear layer and table but routers, which decide and are small."""
    for name, module in list(root.named_modules()):
        if type(module) is Linear and not name.endswith("router"):
            root.set_submodule(name, PackedLinear(module, quantized))
        elif type(module) is Embedding:
            root.set_submodule(name, PackedEmbedding(module, quantized))
    names = {function: name for name, function in ACTIVATIONS.items()}
    for module in root.modules():
        if isinstance(module, MLP):
            up: nn.Module = module.up
            assert isinstance(up, PackedLinear)
            if module.gated:
                module.between = Gate(up, names[module.activation])
            else:
                up.activation, module.between = names[module.activation], nn.Identity()


class Gate(nn.Module):
    """activation(gate) * what it lets through, of rows that hold one behind the other."""

    def __init__(self, up: PackedLinear, activation: str) -> None:
        super().__init__()
        self._library, self._code = up._library, CODES[activation]

    def forward(self, x_TE: Tensor) -> Tensor:
        x_TE = x_TE.contiguous()
        y_TF = x_TE.new_empty(*x_TE.shape[:-1], x_TE.shape[-1] // 2)
        sizes = y_TF.numel() // max(1, y_TF.shape[-1]), y_TF.shape[-1], self._code, torch.get_num_threads()
        self._library.gate(_address(x_TE), _address(y_TF), *map(ctypes.c_int64, sizes))
        return y_TF


def _address(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())
