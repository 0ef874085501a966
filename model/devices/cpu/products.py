"""Matrices packed in the order in which the CPU kernels read them (native/product.cpp), in float32 or int8, and operations on rows.

These modules replace linear layers and embedding tables; arithmetic as in devices/quantization.py. A preceding norm and a following
activation are applied by the product itself. Invariant (batch-invariant): a row of the result depends on that row of x alone, bit for bit.

Shape letters: T tokens, S rows whose logits are wanted, I input and O output columns, V rows of a table, D its columns.
"""

import ctypes

import torch
from torch import Tensor, nn

from model.attention import HeadProjections, MultiQueryAttention
from model.decoder import Block
from model.devices.cpu.huge_pages import HugePages
from model.devices.cpu.native import library, name_of
from model.devices.quantization import quantize_weights
from model.layers import ACTIVATIONS, MLP, Embedding, Linear, RMSNorm, Router

CODES = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}


class Norm(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("kind", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("epsilon", "offset")),
    )


class Product(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "rows")),
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "activation")),
        *((name, ctypes.c_void_p) for name in ("scales", "row_sums")),
        ("norm", Norm),
    )


NO_NORM = Norm()
_memory = HugePages()


class PackedNorm(nn.Module):
    """Stands for a norm of rows, in float32. One that is `absorbed` leaves its x alone: whoever takes that applies it."""

    def __init__(self, norm: nn.LayerNorm | RMSNorm) -> None:
        super().__init__()
        found = library()
        assert found is not None
        self._library = found
        self.weight = norm.weight
        self.bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        self._constants = (1, norm.eps, 0.0) if isinstance(norm, nn.LayerNorm) else (2, norm.epsilon, norm.offset)
        self.absorbed = False

    @property
    def struct(self) -> Norm:
        """As the kernels take it."""
        return Norm(self.weight.data_ptr(), None if self.bias is None else self.bias.data_ptr(), *self._constants)

    def forward(self, x: Tensor) -> Tensor:
        if self.absorbed:
            return x
        assert x.dtype is torch.float32
        rows_TD = x.reshape(-1, x.shape[-1])
        rows_TD = rows_TD if rows_TD.stride(-1) == 1 else rows_TD.contiguous()
        y_TD = torch.empty_like(rows_TD, memory_format=torch.contiguous_format)
        sizes = rows_TD.stride(0), *rows_TD.shape
        norm, threads = self.struct, ctypes.c_int64(torch.get_num_threads())
        self._library.normalise_rows(_address(rows_TD), _address(y_TD), *map(ctypes.c_int64, sizes), ctypes.byref(norm), threads)
        return y_TD.view(x.shape)


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
        assert device.type == "cpu"
        for name, parameter in list(self.named_parameters(recurse=False)):
            if name in ("weight", "scale", "row_sums"):
                setattr(self, name, nn.Parameter(_memory.zeros(parameter.shape, parameter.dtype), requires_grad=False))

    def set_rows(self, first: int, rows: Tensor) -> None:
        """Takes rows of the float matrix from number `first` on."""
        rows, end = rows.float().contiguous(), first + len(rows)
        pack = self._library.pack_floats
        if self.scale is not None and self.row_sums is not None:
            rows, self.scale[first:end] = quantize_weights(rows)
            self.row_sums[first:end] = rows.sum(dim=-1, dtype=torch.int32)
            pack = self._library.pack_bytes
        pack(_address(self.weight), _address(rows), *map(ctypes.c_int64, (first, len(rows), self.shape[1])))

    def _arguments(self, bias: Tensor | None = None, activation: str = "none", norm: PackedNorm | None = None) -> Product:
        """What the kernel is told of activation(norm(x) W^T + bias) whatever x is."""
        return Product(
            weights=self.weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            inputs=self.shape[1],
            outputs=self.shape[0],
            activation=CODES[activation],
            scales=None if self.scale is None else self.scale.data_ptr(),
            row_sums=None if self.row_sums is None else self.row_sums.data_ptr(),
            norm=NO_NORM if norm is None else norm.struct,
        )

    def _product(self, x: Tensor, asked: Product) -> Tensor:
        """What is asked, of x. A step has a hundred of these, and with few rows their costs are those of this method."""
        assert x.dtype is torch.float32
        x_TI = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        num_rows = x_TI.shape[0]
        y_TO = x_TI.new_empty(num_rows, self.shape[0])
        asked.x, asked.y, asked.x_stride, asked.rows = x_TI.data_ptr(), y_TO.data_ptr(), x_TI.stride(0), num_rows
        self._library.product(ctypes.addressof(asked), torch.get_num_threads())
        return y_TO if x.dim() == 2 else y_TO.view(*x.shape[:-1], self.shape[0])

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
    """Stands for an nn.Linear, for the norm that is absorbed before it and for the activation behind it. What it reads is where it was at
    the first product.
    """

    def __init__(self, linear: nn.Linear, quantized: bool) -> None:
        super().__init__(linear.out_features, linear.in_features, quantized)
        self.bias = linear.bias
        self.activation = "none"
        self._norms: tuple[PackedNorm, ...] = ()
        self._asked: Product | None = None

    def allocate(self, device: torch.device) -> None:
        super().allocate(device)
        self._asked = None

    def absorb(self, norm: PackedNorm) -> None:
        """Applies this norm to its x from now on. The norm keeps its place among the decoder's modules, and its parameters."""
        self._asked = None
        self._norms = (norm,)
        norm.absorbed = True

    def forward(self, x: Tensor) -> Tensor:
        if self._asked is None:
            self._asked = self._arguments(self.bias, self.activation, *self._norms)
        return self._product(x, self._asked)


class PackedEmbedding(PackedMatrix):
    """Stands for an nn.Embedding, as a table and, if it is the token embedding, as the head."""

    def __init__(self, embedding: nn.Embedding, quantized: bool) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, quantized)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.rows(ids_T)

    def logits(self, x_SD: Tensor) -> Tensor:
        """x_SD -> logits_SV"""
        return self._product(x_SD, self._arguments())


class PackedHeads(HeadProjections):
    """The same with a product for each head. Loaded as it is, then packed."""

    def pack(self) -> None:
        """Puts packed matrices in the place of the weight."""
        key_up_Hpc, value_up_Hvc = self.parts()
        self.matrices = nn.ModuleList(_packed(matrix) for matrix in (*key_up_Hpc.transpose(1, 2), *value_up_Hvc))
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def keys(self, q_THp: Tensor) -> Tensor:
        return self._each(q_THp, 0)

    def values(self, o_THc: Tensor) -> Tensor:
        return self._each(o_THc, self.num_heads)

    def _each(self, x_THi: Tensor, first: int) -> Tensor:
        return torch.stack([self.matrices[first + head](x_THi[:, head]) for head in range(self.num_heads)], dim=1)


def _packed(matrix: Tensor) -> PackedLinear:
    rows, columns = matrix.shape
    with torch.device("meta"):
        linear = PackedLinear(Linear(columns, rows, bias=False), quantized=False)
    linear.allocate(matrix.device)
    linear.set_rows(0, matrix)
    return linear


def _replacement(module: nn.Module, quantized: bool) -> nn.Module | None:
    if isinstance(module, Linear):
        return PackedLinear(module, quantized and not isinstance(module, Router))
    if type(module) is Embedding:
        return PackedEmbedding(module, quantized)
    if type(module) is HeadProjections:
        with torch.device("meta"):
            return PackedHeads(module.num_heads, module.latent)
    return PackedNorm(module) if isinstance(module, nn.LayerNorm | RMSNorm) else None


def pack_modules(root: nn.Module, quantized: bool) -> None:
    """Puts packed stand-ins, still without values, in the place of every linear layer, table and norm. Routers stay in float: they
    decide, and are small.
    """
    for name, module in list(root.named_modules()):
        replacement = _replacement(module, quantized)
        if replacement is not None:
            root.set_submodule(name, replacement)
    names = {function: name for name, function in ACTIVATIONS.items()}
    for module in root.modules():
        if isinstance(module, MLP):
            up: nn.Module = module.up
            assert isinstance(up, PackedLinear)
            if module.gated:
                module.between = Gate(up, names[module.activation])
            else:
                up.activation, module.between = names[module.activation], None
    for module in root.modules():
        if isinstance(module, Block):
            _absorb_norms(module)


def _absorb_norms(block: Block) -> None:
    """Gives a norm to the products that take what it gives, where products are all that does."""
    attention: nn.Module = block.attention
    projection = attention.qkv if isinstance(attention, MultiQueryAttention) else None
    up = block.mlp.up if isinstance(block.mlp, MLP) else None
    takers: list[tuple[nn.Module, list[nn.Module | None]]] = [(block.attention_norm, [projection])]
    if block.mlp_norm is None:
        takers[0][1].append(up)
    else:
        takers.append((block.mlp_norm, [up]))
    for norm, products in takers:
        linears = [product for product in products if isinstance(product, PackedLinear)]
        if isinstance(norm, PackedNorm) and len(linears) == len(products):
            for linear in linears:
                linear.absorb(norm)


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
