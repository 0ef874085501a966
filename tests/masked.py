"""`onehead` as on a processor with fewer features: `python -m tests.masked FLAGS serve ...`, with FLAGS as Linux names them, in one word
with commas between; `none` leaves the kernels out altogether. The server is the production one; its engines run this module as well.
"""

import os
import sys
from pathlib import Path

from model import native

VARIABLE = "TEST_PROCESSOR_FLAGS"
ROOT = Path(__file__).resolve().parents[1]


def mask(flags: str) -> None:
    """From now on this process finds no other features, or no kernels."""
    if flags == "none":
        native.find_spec = lambda name: None
    native._processor_flags = lambda: set(flags.split(","))


def main() -> int:
    if VARIABLE in os.environ:
        mask(os.environ[VARIABLE])
        from server.engine import worker

        worker.main()
        return 0
    from server import cli, transport

    os.environ[VARIABLE] = sys.argv[1]
    # Engines are started with -P, which keeps them from finding this package by themselves.
    os.environ["PYTHONPATH"] = str(ROOT)
    transport.ENGINE_MODULE = "tests.masked"
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
