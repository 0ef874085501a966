"""Triton's interpreter, for the tests that run kernels; whether there is a Triton at all.

Triton asks for the variable when it is imported, for functions of its own, and whenever a kernel is. It is imported here, because this
file is read before any test runs: torch and transformers import it on their way, as a compiler.
"""

import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest

NAME = "TRITON_INTERPRET"

if find_spec("triton") is not None:
    assert "triton" not in sys.modules, "something imported by a test's module imports triton as a compiler"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NAME, "1")
        import triton  # noqa: F401


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels imported from here on run in numpy. Nothing else in a test process imports them."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'onehead[gpu]'")
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip("Triton 3.6's interpreter cannot loop up to a number that it has loaded with numpy 2.4")
    monkeypatch.setenv(NAME, "1")
