"""What the browser tests share beside the fixtures. Importing it skips a test module where Playwright is missing."""

from typing import Any

import pytest

playwright: Any = pytest.importorskip("playwright.sync_api", reason="the extra [browser] is not installed: scripts/browser does it")
expect = playwright.expect
TIMEOUT = 15_000
"""Milliseconds that an expectation may take: the machine may be busy."""
expect.set_options(timeout=TIMEOUT)
