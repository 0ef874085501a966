"""A pytest plugin of scripts/sanitize: fails before anything runs where the kernels are not the sanitized ones, or are none."""

import pytest

from model.devices.cpu import native


def pytest_sessionstart(session: pytest.Session) -> None:
    for width in native.FEATURES:
        found = native.library(width)
        if found is None or not hasattr(found, "__asan_init"):
            raise pytest.UsageError(f"the kernels for {width} are not sanitized: {found}")
