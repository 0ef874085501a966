"""Triton's interpreter, for the tests that run kernels; whether there is a Triton at all."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels imported from here on run in numpy. Nothing else in a test process imports them."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'onehead[gpu]'")
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        pytest.skip("Triton 3.6's interpreter cannot loop up to a number that it has loaded with numpy 2.4")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
