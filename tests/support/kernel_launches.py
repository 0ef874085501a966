"""Launches of Triton kernels under its interpreter, seen by a test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def watched(
    seen: Callable[[str, Callable[[], None]], None], computes: bool = True
) -> Iterator[None]:
    """Calls `seen` with each launched kernel's name and a function that repeats the launch. Without
    `computes` kernels do nothing.
    """
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def compute(kernel: Any, *args: Any, **options: Any) -> None:
        # What the interpreter does by torch is no operation of its own on a GPU.
        with _disable_current_modes():
            run(kernel, *args, **options)

    def watch(kernel: Any, *args: Any, **options: Any) -> None:
        if computes:
            compute(kernel, *args, **options)
        seen(kernel.__name__, partial(compute, kernel, *args, **options))

    with patch.object(InterpretedFunction, "run", watch):
        yield
