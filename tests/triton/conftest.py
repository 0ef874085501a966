"""Triton's interpreter, for the tests that run kernels; whether there is a Triton at all.

Triton asks for the variable when it is imported, for functions of its own, and whenever a kernel
is. It is imported here, because this file is read before any test runs: torch and transformers
import it on their way, as a compiler.

Its conversions of float8 are wrong: a mantissa that is rounded up to the next power of two comes
out as half of it, what is below 2**-6 is cut off instead of rounded, and NaN is a number. They are
replaced by torch's, which are what the instructions of a GPU do (`cvt.rn.satfinite.e4m3x2.f32`,
`cvt.rn.f16x2.e4m3x2`; test_compile.py finds these in the code). Its conversion of float32 to
bfloat16, which cuts off instead of rounding, is replaced too.

Its matrix products are numpy's, which give a row other bits at other places of the matrix on some
processors, where a GPU's instructions do not. Each row is therefore multiplied on its own.
"""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

NAME = "TRITON_INTERPRET"
TORCH_TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

if find_spec("triton") is not None:
    assert "triton" not in sys.modules, (
        "something imported by a test's module imports triton as a compiler"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NAME, "1")
        import triton  # noqa: F401


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels imported from here on run in numpy. Nothing else in a test process imports them."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install -e '.[gpu]'")
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip(
            "Triton 3.6's interpreter cannot loop up to a number that it has loaded with numpy 2.4"
        )
    monkeypatch.setenv(NAME, "1")
    from triton.runtime import interpreter

    theirs = interpreter._convert_float

    def convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if "fp8e4nv" not in (str(source), str(target)) and (str(source), str(target)) != (
            "fp32",
            "bf16",
        ):
            return theirs(x, source, target, rounding)
        numbers = (
            torch.from_numpy(np.ascontiguousarray(x))
            .view(TORCH_TYPES[str(source)])
            .to(TORCH_TYPES[str(target)])
        )
        return numbers.view(BITS[numbers.itemsize]).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    multiply = interpreter.InterpreterBuilder.create_dot

    def multiply_rows(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        handle = interpreter.TensorHandle
        rows = (
            handle(a.data[..., None, :], a.dtype),
            handle(b.data[..., None, :, :], b.dtype),
            handle(d.data[..., None, :], d.dtype),
        )
        return handle(multiply(builder, *rows, *options).data[..., 0, :], d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply_rows)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN."""
    new_empty = torch.Tensor.new_empty

    def new(x: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        made = new_empty(x, *size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() and made.numel() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new)
