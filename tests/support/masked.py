"""`onehead` as on a processor with fewer features: `python -m tests.support.masked FLAGS serve
...`, with FLAGS as Linux names them, separated by commas; `none` leaves the kernels out. The server
is the production one; its engines run this module too.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from model.devices.cpu import native
from tests.support.paths import ROOT

VARIABLE = "TEST_PROCESSOR_FLAGS"


def mask(flags: str) -> None:
    """Hides all other CPU features, or all kernels, from this process."""
    if flags == "none":
        native.find_spec = lambda name: None  # type: ignore[attr-defined, assignment]
    native._processor_flags = lambda: set(flags.split(","))


@contextmanager
def kernels(version: str) -> Iterator[None]:
    """Another version of the kernels than this processor's widest, for engines that are loaded and
    run within.
    """
    flags = native._processor_flags
    native._processor_flags = lambda: set(native.FEATURES[version])
    native.library.cache_clear()
    try:
        yield
    finally:
        native._processor_flags = flags
        native.library.cache_clear()


def main() -> int:
    if VARIABLE in os.environ:
        mask(os.environ[VARIABLE])
        from server.engine import worker

        worker.main()
        return 0
    from commands import cli
    from server.supervision import transport

    os.environ[VARIABLE] = sys.argv[1]
    # Engines are started with -P, which keeps them from finding this package by themselves.
    os.environ["PYTHONPATH"] = str(ROOT)
    transport.ENGINE_MODULE = "tests.support.masked"
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
