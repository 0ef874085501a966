"""Products by our CPU kernels (native/product.cpp, native/blocks.cpp): matrices packed in the order
in which they are read, as floats or quantized in blocks.

The modules replace a decoder's linear layers, embedding tables and norms; devices/blocks.py defines
the arithmetic of blocks. A product applies the norm before it and the activation after it.
Invariants: a row of the result depends on that row of x alone (batch-invariant); weights in
bfloat16 or float16 give the bits that the same numbers in float32 give.

Shape letters: T tokens, S rows whose logits are wanted, I input and O output columns, V rows of a
table, D its columns.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import HeadProjections, MultiQueryAttention
from model.decoder import Block, Decoder
from model.devices.blocks import FORMATS, BlockFormat
from model.devices.cpu import native
from model.devices.cpu.huge_pages import HugePages
from model.devices.cpu.native import NUMBER_TYPES, integers, library
from model.devices.cpu.recording import Activation, side_by_side
from model.devices.products import Products
from model.devices.replacement import (
    Held,
    NormReplacement,
    RowMatrix,
    StoredTable,
    parameter,
    replace_modules,
)
from model.layers import MLP, Embedding, LayerNorm, Linear, RMSNorm, Router

BLOCK_TYPES = {"int8": 3, "int4": 4}
"""The kernels' WeightType of each format."""
CODES = {"none": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}


class Norm(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *integers("weight", "bias", "kind"),
        *((name, ctypes.c_float) for name in ("epsilon", "offset")),
    )


class Product(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        *integers(
            "x",
            "y",
            "x_stride",
            "y_stride",
            "rows",
            "weights",
            "bias",
            "inputs",
            "outputs",
            "activation",
            "weight_type",
        ),
        ("norm", Norm),
    )


NO_NORM = Norm()
_memory = HugePages()


class PackedNorm(NormReplacement):
    """Replaces a LayerNorm or RMSNorm of rows, in float32."""

    @property
    def struct(self) -> Norm:
        """The norm as the kernels take it."""
        return Norm(
            _address(self.weight),
            _address(self.bias),
            1 if self.centred else 2,
            self.epsilon,
            self.offset,
        )

    def forward(self, x: Any) -> Any:
        if isinstance(x, Activation):
            return x.normalised(self.struct)
        assert x.dtype is torch.float32
        rows_TD = x.reshape(-1, x.shape[-1])
        rows_TD = rows_TD if rows_TD.stride(-1) == 1 else rows_TD.contiguous()
        y_TD = torch.empty_like(rows_TD, memory_format=torch.contiguous_format)
        norm, sizes = self.struct, (rows_TD.stride(0), *rows_TD.shape)
        library().normalise_rows(
            rows_TD.data_ptr(),
            y_TD.data_ptr(),
            *sizes,
            ctypes.addressof(norm),
            torch.get_num_threads(),
        )
        return y_TD.view(x.shape)


class PackedMatrix(RowMatrix):
    """W [O, I] in panels of rows, held in a dtype, in blocks of a format or, if that is None, as it
    is stored.
    """

    def __init__(self, num_rows: int, num_columns: int, held: Held | None) -> None:
        super().__init__(torch.empty(0))
        self._library, self._held = library(), held
        self.shape = num_rows, num_columns
        self._hold(held or torch.float32)

    def _hold(self, held: Held) -> None:
        """Makes the weight, without memory yet, of a dtype or a format."""
        num_rows, num_columns = self.shape
        panel = self._library.panel()
        num_panels = (num_rows + panel - 1) // panel
        if isinstance(held, BlockFormat):
            self.form, row_size, dtype = held, held.row_bytes(num_columns), torch.uint8
        else:
            self.form, row_size, dtype = None, num_columns, held
        weight = torch.empty(num_panels, panel * row_size, dtype=dtype, device="meta")
        self.weight = parameter(weight)
        self.num_filling = weight.numel() - num_rows * row_size

    def _kernel(self, name: str) -> Any:
        return getattr(self._library, name if self.form is None else f"{name}_{self.form.name}")

    def allocate(self, device: torch.device, stored: Held = torch.float32) -> None:
        if self._held is None and (isinstance(stored, BlockFormat) or stored in NUMBER_TYPES):
            self._hold(stored)
        super().allocate(device, stored)

    def _memory(self, like: Tensor, device: torch.device) -> Tensor:
        return _memory.zeros(like.shape, like.dtype)

    def set_rows(self, first: int, rows: Tensor) -> None:
        if self.form is not None:
            rows = rows.float().contiguous()
            blocks = torch.empty(len(rows), self.form.row_bytes(rows.shape[1]), dtype=torch.uint8)
            self._kernel("quantize")(rows.data_ptr(), blocks.data_ptr(), *rows.shape)
            self.set_blocks(first, blocks)
            return
        rows = rows.to(self.weight.dtype).contiguous()
        self._library.pack(
            self.weight.data_ptr(), rows.data_ptr(), first, len(rows), self.shape[1], rows.itemsize
        )

    def set_blocks(self, first: int, rows: Tensor) -> None:
        assert self.form is not None and rows.is_contiguous()
        self._kernel("pack")(
            self.weight.data_ptr(),
            rows.data_ptr(),
            first,
            len(rows),
            rows.shape[1] // self.form.block_bytes,
        )

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows by number, as float32. Raises IndexError for a number out of range."""
        if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < self.shape[0]:
            raise IndexError(f"rows {ids_T.min()} to {ids_T.max()} of {self.shape[0]}")
        dtype = torch.float32 if self.form is not None else self.weight.dtype
        found = torch.empty(len(ids_T), self.shape[1], dtype=dtype)
        itemsize = (found.itemsize,) if self.form is None else ()
        self._kernel("take")(
            self.weight.data_ptr(), ids_T.data_ptr(), found.data_ptr(), *found.shape, *itemsize
        )
        return found.float()

    def _arguments(
        self, bias: Tensor | None = None, activation: str = "none", norm: PackedNorm | None = None
    ) -> Product:
        """The kernel's arguments for activation(norm(x) W^T + bias) that do not depend on x."""
        return Product(
            weights=self.weight.data_ptr(),
            bias=_address(bias),
            inputs=self.shape[1],
            outputs=self.shape[0],
            activation=CODES[activation],
            weight_type=NUMBER_TYPES[self.weight.dtype]
            if self.form is None
            else BLOCK_TYPES[self.form.name],
            norm=NO_NORM if norm is None else norm.struct,
        )

    def _product(self, x: Tensor, product: Product) -> Tensor:
        """Runs the kernel on x. A step has a hundred of these calls; with few rows this method's
        own cost is what counts.
        """
        assert x.dtype is torch.float32
        x_TI = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        num_rows = x_TI.shape[0]
        y_TO = x_TI.new_empty(num_rows, self.shape[0])
        product.x, product.y, product.rows = x_TI.data_ptr(), y_TO.data_ptr(), num_rows
        product.x_stride, product.y_stride = x_TI.stride(0), self.shape[0]
        self._library.product(ctypes.addressof(product), torch.get_num_threads())
        return y_TO if x.dim() == 2 else y_TO.view(*x.shape[:-1], self.shape[0])


class PackedLinear(PackedMatrix):
    """Replaces an nn.Linear, the norm before it where `norm` is set, and the activation after it.

    Where a checkpoint stores some of its rows otherwise than the rest, it has a matrix for each
    part. The first product fixes the addresses that it reads: parameters must not move afterwards.
    """

    activation, gated = "none", False
    """Activation function of the product; if `gated`, activation(first half) * second half."""

    def __init__(self, linear: nn.Linear, held: Held | None) -> None:
        super().__init__(linear.out_features, linear.in_features, held)
        self.bias = linear.bias
        self.norm: PackedNorm | None = None
        self.stack = nn.ModuleList()
        self.parts: list[tuple[PackedMatrix, Product]] = []
        """Its matrices with the kernel's arguments, once it has computed."""

    def divided(self, stored: Sequence[tuple[int, Held]]) -> Sequence[RowMatrix]:
        if self._held is not None or len({held for _, held in stored}) == 1:
            return [self]
        parts = [PackedMatrix(rows, self.shape[1], None) for rows, _ in stored]
        self.stack.extend(parts)
        self.weight, self.num_filling = parameter(torch.empty(0)), 0
        return parts

    def _fix(self) -> None:
        matrices: list[Any] = [*self.stack] or [self]
        rows = [matrix.shape[0] for matrix in matrices]
        biases = [None] * len(rows) if self.bias is None else self.bias.split(rows)
        activation = "none" if self.gated else self.activation
        self.parts = [
            (matrix, matrix._arguments(bias, activation, self.norm))
            for matrix, bias in zip(matrices, biases, strict=True)
        ]

    def forward(self, x: Any) -> Any:
        if not self.parts:
            self._fix()
        if isinstance(x, Activation):
            prepared = self._library.prepared_bytes
            recorded = side_by_side(
                [x.product(each, prepared(ctypes.addressof(each))) for _, each in self.parts]
            )
            return recorded.gated(CODES[self.activation]) if self.gated else recorded
        y, *others = (matrix._product(x, product) for matrix, product in self.parts)
        y = torch.cat([y, *others], dim=-1) if others else y
        return self._gate(y) if self.gated else y

    def _gate(self, x_TE: Tensor) -> Tensor:
        """activation(first half) * second half of each row."""
        size, threads = x_TE.shape[-1] // 2, torch.get_num_threads()
        y_TF = x_TE.new_empty(*x_TE.shape[:-1], size)
        self._library.gate(
            x_TE.data_ptr(),
            y_TF.data_ptr(),
            y_TF.numel() // max(1, size),
            size,
            CODES[self.activation],
            threads,
        )
        return y_TF


class PackedEmbedding(PackedMatrix):
    """Replaces an nn.Embedding, as a table and, if it is the token embedding of a tied model, as
    the head.
    """

    def __init__(self, embedding: nn.Embedding, held: Held | None) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim, held)

    forward = PackedMatrix.rows

    def logits(self, x_SD: Tensor) -> Tensor:
        """x_SD -> logits_SV"""
        return self._product(x_SD, self._arguments())


class PackedHeads(HeadProjections):
    """HeadProjections with a packed matrix for each head. `pack` makes them when the weight has
    been read.
    """

    def pack(self) -> None:
        key_up_Hpc, value_up_Hvc = self.parts()
        self.matrices = nn.ModuleList(
            _packed(matrix) for matrix in (*key_up_Hpc.transpose(1, 2), *value_up_Hvc)
        )
        self.weight = parameter(self.weight.new_empty(0))

    def keys(self, q_THp: Tensor) -> Tensor:
        return self._each(q_THp, 0)

    def values(self, o_THc: Tensor) -> Tensor:
        return self._each(o_THc, self.num_heads)

    def _each(self, x_THi: Tensor, first: int) -> Tensor:
        return torch.stack(
            [self.matrices[first + head](x_THi[:, head]) for head in range(self.num_heads)], dim=1
        )


def _packed(matrix: Tensor) -> PackedLinear:
    rows, columns = matrix.shape
    with torch.device("meta"):
        linear = PackedLinear(Linear(columns, rows, bias=False), torch.float32)
    linear.allocate(matrix.device)
    linear.set_rows(0, matrix)
    return linear


class NativeProducts(Products):
    """Products of our CPU kernels, of matrices in blocks or, if not quantized, in `held` (None: as
    the checkpoint stores them, with quantization `auto` those in blocks too). Routers stay in
    float32, because they decide, and so do the matrices of PackedHeads.
    """

    batch_invariant = True

    def __init__(self, quantization: str, held: torch.dtype | None = None) -> None:
        super().__init__(quantization, native.name())
        self._held = FORMATS.get(quantization, held)
        self.keeps_blocks = quantization == "auto" and held is None

    def replace(self, decoder: Decoder, dtype: torch.dtype) -> None:
        if decoder.layer_inputs is not None:
            # Of billions of numbers a step reads some thousand for each token.
            decoder.layer_inputs.table = StoredTable()
        replace_modules(decoder, self._replacement)
        for module in decoder.modules():
            if isinstance(module, MLP):
                up: Any = module.up
                assert isinstance(up, PackedLinear)
                up.activation, up.gated, module.between = module.activation, module.gated, None
        decoder.cap = cap

    def _replacement(self, module: nn.Module) -> nn.Module | None:
        if isinstance(module, Linear):
            return PackedLinear(module, torch.float32 if isinstance(module, Router) else self._held)
        if type(module) is Embedding:
            return PackedEmbedding(module, self._held)
        if type(module) is HeadProjections:
            with torch.device("meta"):
                return PackedHeads(module.num_heads, module.latent)
        return PackedNorm(module) if isinstance(module, LayerNorm | RMSNorm) else None

    def finish(self, decoder: Decoder) -> None:
        super().finish(decoder)
        for module in list(decoder.modules()):
            if isinstance(module, PackedHeads):
                module.pack()
            if isinstance(module, Block):
                _fuse_norms(module)


def cap(logits_SV: Tensor, most: float) -> Tensor:
    """model.decoder.cap, of which torch's bits depend on the place of a number."""
    capped_SV, bound = torch.empty_like(logits_SV), ctypes.c_float(most)
    library().cap_logits(
        logits_SV.data_ptr(),
        capped_SV.data_ptr(),
        *logits_SV.shape,
        ctypes.addressof(bound),
        torch.get_num_threads(),
    )
    return capped_SV


def _fuse_norms(block: Block) -> None:
    """Moves a norm into the products that read its output, where nothing else does."""
    attention: nn.Module = block.attention
    qkv = attention.qkv if isinstance(attention, MultiQueryAttention) else None
    up = block.mlp.up if isinstance(block.mlp, MLP) else None
    readers: dict[str, Any] = {
        "attention_norm": (qkv, up) if block.mlp_norm is None else (qkv,),
        "mlp_norm": (up,),
    }
    for name, products in readers.items():
        norm = getattr(block, name)
        if isinstance(norm, PackedNorm) and all(
            isinstance(product, PackedLinear) for product in products
        ):
            for product in products:
                product.norm = norm
            setattr(block, name, nn.Identity())


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
