"""Triton's interpreter, for the tests that run kernels; whether there is a Triton at all."""

from importlib.util import find_spec

import pytest


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels imported from here on run in numpy. Nothing else in a test process imports them."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'onehead[gpu]'")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
