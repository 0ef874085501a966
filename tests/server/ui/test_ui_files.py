"""Files of the playground that need no browser to be tested: the state of the page map, under node,
and what is taken from elsewhere.
"""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

VENDOR = ROOT / "server" / "ui" / "vendor"
UPLOT = {
    # SHA-256 of the files of uPlot 1.6.32 in the npm registry: dist/uPlot.iife.min.js,
    # dist/uPlot.min.css and LICENSE.
    "uPlot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
EXPORT = b"export default uPlot;\n"
"""What makes a module of the script."""


def test_uplot_is_what_its_authors_have_published() -> None:
    assert {path.name for path in VENDOR.iterdir()} == UPLOT.keys()
    for name, digest in UPLOT.items():
        published = (VENDOR / name).read_bytes().removesuffix(EXPORT)
        assert hashlib.sha256(published).hexdigest() == digest, name
    assert (VENDOR / "uPlot.js").read_bytes().endswith(EXPORT)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_state_of_the_page_map_under_node() -> None:
    script = Path(__file__).with_name("cache_state.test.mjs")
    done = subprocess.run(
        ["node", "--test", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
