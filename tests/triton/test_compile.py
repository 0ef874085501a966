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
FLOAT8_ARCHITECTURES = 90, 100
SAMPLE = [(80, 0, 0), (90, 5, 0), (100, 5, 512)]
FLOAT8_SAMPLE = [(90, 0, 0), (100, 0, 0)]
"""Line 0 of the table has tiles of 16 rows, line 5 of 64."""

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install 'onehead[gpu]'")


def expected_instruction(architecture: int, rows: int, size: int) -> str:
    """float32 goes without tensor cores: exact products."""
    if size == 4:
        return "fma.rn.f32"
    if rows < 64 or architecture == 80:
        return "mma.sync"
    return {90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture]


def compile_kernels(wanted: list[tuple[int, int, int]], cache: Path, stored: str = "") -> "subprocess.CompletedProcess[str]":
    """Compiles (architecture, line of the table, window)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    command = [sys.executable, "-m", "tests.triton.compile_kernels", *(":".join(map(str, numbers)) + stored for numbers in wanted)]
    return subprocess.run(
        command, cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": str(cache)}, check=False, capture_output=True, text=True
    )


def check(wanted: list[tuple[int, int, int]], cache: Path, stored: str = "") -> None:
    """All of it fits and has its instructions; over float8 those that convert it, too."""
    done = compile_kernels(wanted, cache, stored)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    attended = [made for made in found if made["kernel"] == "attend"]
    products = [made for made in found if made["kernel"] == "scaled_product"]
    assert len(attended) == len(wanted) and {made["kernel"] for made in found} == KERNELS | ({"scaled_product"} if stored else set())
    for made in found:
        assert made["shared"] <= SHARED_KIB[made["architecture"]] * 1024 and made["cubin"] > 0, made
    for made in attended:
        *_, size, configuration = TABLE[made["line"]]
        instruction = expected_instruction(made["architecture"], configuration.rows, size)
        others = {"mma.sync", "wgmma.mma_async", "tcgen05.mma"} - {instruction}
        assert made["counts"][instruction] > 0 and not any(made["counts"][other] for other in others), made
        assert size == 4 or made["counts"]["cp.async.c"] > 0, made
    for made in products:
        assert made["counts"][expected_instruction(made["architecture"], 64, TABLE[made["line"]][2])] > 0, made
    for made in found:
        reads, writes = made in attended or made in products, made["kernel"] == "scatter"
        assert (made["counts"]["cvt.rn.f16x2.e4m3x2"] > 0) == (bool(stored) and reads), made
        assert (made["counts"]["cvt.rn.satfinite.e4m3x2.f32"] > 0) == (bool(stored) and writes), made


def test_a_sample_compiles_with_the_expected_instructions(tmp_path: Path) -> None:
    check(SAMPLE, tmp_path)


def test_a_sample_over_float8_compiles_with_instructions_that_convert_it(tmp_path: Path) -> None:
    check(FLOAT8_SAMPLE, tmp_path, ":fp8")


def test_there_is_no_float8_before_its_instructions(tmp_path: Path) -> None:
    """Why the option is refused there."""
    done = compile_kernels([(80, 0, 0)], tmp_path, ":fp8")
    assert done.returncode == 1 and "fp8e4nv not supported in this architecture" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", FLOAT8_ARCHITECTURES)
def test_every_configuration_over_float8_compiles(architecture: int, tmp_path: Path) -> None:
    check([(architecture, line, window) for line in range(len(TABLE)) for window in (0, 512)], tmp_path, ":fp8")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", SHARED_KIB)
def test_every_configuration_compiles_with_the_expected_instructions(architecture: int, tmp_path: Path) -> None:
    check([(architecture, line, window) for line in range(len(TABLE)) for window in (0, 512)], tmp_path)
