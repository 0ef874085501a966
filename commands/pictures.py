"""matplotlib, which the extra `train` brings: without it everything but the pictures is written."""

from typing import Any

MISSING = (
    "matplotlib is not installed; `.venv/bin/pip install -c constraints.txt -e '.[train]'` "
    "in onehead's checkout installs it"
)


def load_pyplot() -> Any:
    """matplotlib.pyplot, its SVGs the same each time; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "onehead"
    from matplotlib import pyplot

    return pyplot
