"""Recording what a decoder's modules do, as a list of operations for a kernel (native/step.cpp).

Modules run once on Activations, which stand for tensors and note what is done to them. So there is
one description of a decoder, that of its modules. Invariant: the operations compute what the
modules compute, with the same kernels in the same order. It knows nothing of sequences, and of
modules only what they do to an Activation.

Shape letter: T tokens of the step.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from model.devices.cpu.native import integers

NORM, ADD, MULTIPLY, ROTATE, GATE, PRODUCT, ATTEND = range(7)
"""The kernel's Kinds."""
ALIGNMENT = 16
"""Floats of a cache line."""


class Columns(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = integers("base", "width", "first")


class Operation(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("inputs", Columns * 3),
        ("output", Columns),
        *integers("size", "heads", "choice", "details"),
        ("factor", ctypes.c_float),
    )


class Buffer:
    """The memory of one activation: `width` columns for each token."""

    def __init__(self, width: int) -> None:
        self.width, self.base = width, 0
        self.last_use = 0
        """Number of the last operation that reads or writes it."""


@dataclass(slots=True, eq=False)
class Activation:
    """Stands for a tensor [T, size] or [T, heads, size] of float32 while a program is recorded:
    some columns of a buffer.
    """

    recorder: "Recorder"
    buffer: Buffer
    first: int
    size: int
    heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As a tensor's; -1 for the number of tokens."""
        return (-1, self.size) if self.heads is None else (-1, self.heads, self.size)

    @property
    def width(self) -> int:
        """Columns of all heads."""
        return self.size * (self.heads or 1)

    def __getitem__(self, place: tuple[slice, int]) -> "Activation":
        """One of the heads of all tokens, as [T, size]."""
        assert place[0] == slice(None) and self.heads is not None
        first = self.first + place[1] * self.size
        return Activation(self.recorder, self.buffer, first, self.size)

    def view(self, *shape: int) -> "Activation":
        """The same columns as [T, heads, size]."""
        tokens, heads, size = shape
        assert tokens == -1 and heads * size == self.width
        return Activation(self.recorder, self.buffer, self.first, size, heads)

    def flatten(self, start: int) -> "Activation":
        """The same columns as [T, size]."""
        assert start == -2 and self.heads is not None
        return Activation(self.recorder, self.buffer, self.first, self.width)

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function not in FUNCTIONS:
            return NotImplemented
        return FUNCTIONS[function](*args, **(kwargs or {}))

    def product(self, details: Any, row_bytes: int) -> "Activation":
        """A product by the kernel's struct `details`, whose rows take `row_bytes` when they are
        prepared.
        """
        self.recorder.tile_bytes = max(self.recorder.tile_bytes, row_bytes)
        return self.recorder.add(PRODUCT, [self], details.outputs, details=details)

    def gated(self, activation: int) -> "Activation":
        """activation(first half) * second half."""
        return self.recorder.add(GATE, [self], self.size // 2, choice=activation)

    def normalised(self, details: Any) -> "Activation":
        """Each head by itself, by the kernel's struct `details`."""
        return self.recorder.add(NORM, [self], self.size, heads=self.heads, details=details)


def _add(x: Activation, z: Activation, *, alpha: float = 1.0) -> Activation:
    return x.recorder.add(ADD, [x, z], x.size, factor=alpha)


def _mul(x: Activation, z: Any) -> Activation:
    """By an Activation, or by a tensor of one number."""
    if isinstance(z, Activation):
        return x.recorder.add(MULTIPLY, [x, z], x.size)
    return x.recorder.add(MULTIPLY, [x], x.size, factor=float(z))


def _split(x: Activation, sizes: Sequence[int], dim: int) -> list[Activation]:
    assert dim == -1 and sum(sizes) == x.size and x.heads is None
    firsts = [x.first + sum(sizes[:i]) for i in range(len(sizes))]
    return [
        Activation(x.recorder, x.buffer, first, size)
        for first, size in zip(firsts, sizes, strict=True)
    ]


def side_by_side(outputs: Sequence[Activation]) -> Activation:
    """The outputs of the last operations, which nothing has read yet, in one buffer."""
    whole, size = Buffer(sum(output.size for output in outputs)), 0
    for output in outputs:
        whole.last_use = output.buffer.last_use
        output.buffer, output.first = whole, size
        size += output.size
    return Activation(outputs[0].recorder, whole, 0, size)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.add: _add,
    torch.mul: _mul,
    torch.split_with_sizes: _split,
}
"""What modules may do to an Activation, besides the methods that it has."""


class Recorder:
    """Notes operations, and then gives each buffer its place."""

    def __init__(self, struct: Callable[[int, int], tuple[Any, int]]) -> None:
        self._struct = struct
        """(layer, heads) -> the kernel's struct for attention, and the number of the layer's
        group."""
        self.operations: list[tuple[Operation, list[Activation]]] = []
        self.kept: list[Any] = []
        """Structs to which operations point."""
        self._heads: dict[int, int | None] = {}
        """Query heads of each group's layers."""
        self.tile_bytes = 0
        """Of a token, for the product that takes most."""

    def add(
        self,
        kind: int,
        inputs: Sequence[Activation],
        size: int,
        *,
        heads: int | None = None,
        details: Any = None,
        **fields: Any,
    ) -> Activation:
        """Notes an operation, whose output is [T, size] or [T, heads, size]."""
        output = Activation(self, Buffer(size * (heads or 1)), 0, size, heads)
        if details is not None:
            self.kept.append(details)
            fields["details"] = ctypes.addressof(details)
        operation = Operation(kind=kind, size=size, heads=heads or 1, **fields)
        for used in (*inputs, output):
            used.buffer.last_use = len(self.operations)
        self.operations.append((operation, [*inputs, output]))
        return output

    def attend(
        self,
        layer: int,
        q: Activation,
        k: Activation | None,
        v: Activation | None,
        rotation: int | None = None,
    ) -> Activation:
        """An Attend; `rotation` is the number of a table."""
        if rotation is not None:
            q = self.add(ROTATE, [q], q.size, heads=q.heads, choice=rotation)
            if k is not None:
                k = self.add(ROTATE, [k], k.size, choice=rotation)
        struct, group = self._struct(layer, q.heads or 1)
        assert self._heads.setdefault(group, q.heads) == q.heads, (
            "the kernel shares out the rows of all layers of a group alike"
        )
        stored = [] if k is None or v is None else [k, v]
        return self.add(
            ATTEND, [q, *stored], struct.value_dim, heads=q.heads, details=struct, choice=group
        )

    def place(self, given: Sequence[Buffer], last: Buffer) -> int:
        """Gives buffers places, the given ones first and in their order, and returns the columns
        that all take together. Memory is used again only for a buffer of the same width: operations
        on different tokens are computed at the same time, and a token's columns must not lie where
        another's are.
        """
        free: dict[int, list[int]] = {}
        end, placed = 0, {*given}
        for buffer in given:
            buffer.base, end = end, end + _aligned(buffer.width)
        for number, (operation, used) in enumerate(self.operations):
            *inputs, output = used
            if output.buffer not in placed:
                again = free.get(output.buffer.width)
                output.buffer.base = again.pop() if again else end
            end = max(end, output.buffer.base + _aligned(output.buffer.width))
            placed.add(output.buffer)
            for buffer in [
                buffer for buffer in placed if buffer.last_use <= number and buffer is not last
            ]:
                placed.remove(buffer)
                free.setdefault(buffer.width, []).append(buffer.base)
            for i, each in enumerate(inputs):
                operation.inputs[i] = Columns(each.buffer.base, each.buffer.width, each.first)
            operation.output = Columns(output.buffer.base, output.buffer.width, output.first)
        return end


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
