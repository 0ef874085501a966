"""What the compiler makes of every shipped configuration, for GPUs that need not be there: it fits, and uses the tensor cores."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from model.backends.triton.configurations import TABLE

ROOT = Path(__file__).resolve().parents[2]
SHARED_KIB = {80: 163, 90: 227, 100: 227}
KERNELS = {"attend", "join", "scatter"}
SAMPLE = [0, 5]
"""Lines of the table: tiles of 16 rows, and of 64."""

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'onehead[gpu]'")


def expected_instruction(architecture: int, rows: int, size: int) -> str:
    """float32 goes without tensor cores: exact products."""
    if size == 4:
        return "fma.rn.f32"
    if rows < 64 or architecture == 80:
        return "mma.sync"
    return {90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture]


def check(architectures: list[int], windows: list[int], lines: list[int], cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    arguments = [",".join(map(str, numbers)) for numbers in (architectures, windows, lines)]
    command = [sys.executable, "-m", "tests.triton.compile_kernels", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": str(cache)}, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    attended = [made for made in found if made["kernel"] == "attend"]
    assert len(attended) == len(architectures) * len(windows) * len(lines) and {made["kernel"] for made in found} == KERNELS
    for made in found:
        assert made["shared"] <= SHARED_KIB[made["architecture"]] * 1024 and made["cubin"] > 0, made
    for made in attended:
        *_, size, configuration = TABLE[made["line"]]
        wanted = expected_instruction(made["architecture"], configuration.rows, size)
        others = {"mma.sync", "wgmma.mma_async", "tcgen05.mma"} - {wanted}
        assert made["counts"][wanted] > 0 and not any(made["counts"][other] for other in others), made
        assert size == 4 or made["counts"]["cp.async.c"] > 0, made


def test_a_sample_compiles_with_the_expected_instructions(tmp_path: Path) -> None:
    check(list(SHARED_KIB), [0], SAMPLE, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", SHARED_KIB)
def test_every_configuration_compiles_with_the_expected_instructions(architecture: int, tmp_path: Path) -> None:
    check([architecture], [0, 512], list(range(len(TABLE))), tmp_path)
