"""`python -m bench.gpu`: run.py, once what it needs is known to be there."""

import sys
from importlib.util import find_spec

NEEDED = "torch", "numpy", "msgspec", "safetensors"

if __name__ == "__main__":
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(
            f"bench.gpu: {sys.executable} cannot import {', '.join(missing)}; bench/gpu/README.md "
            "says what a host needs, and scripts/gpu-bundle collects it for one without internet"
        )
    from bench.gpu.run import main

    sys.exit(main())
