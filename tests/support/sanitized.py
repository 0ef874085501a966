"""A pytest plugin for scripts/sanitize: fails before any test if the sanitized kernels are not the
ones in use.
"""

import pytest

from model.devices.cpu import native


def pytest_sessionstart(session: pytest.Session) -> None:
    for width in native.FEATURES:
        found = native.library(width)
        if not hasattr(found, "__asan_init"):
            raise pytest.UsageError(f"the kernels for {width} are not sanitized: {found}")
