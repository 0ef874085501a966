"""What the compiler makes of every shipped configuration, for GPUs that need not be there: it fits,
and uses the tensor cores.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.triton import SHARED_KIB

SHAPES = range(7)
"""Those of compile_kernels.py, which imports Triton."""
KERNELS = {"attend", "decode", "scatter"}
VECTORISED = "add_norm", "norm_heads", "gate"
"""Their threads read 16 bytes at once."""
BY_ROWS = *VECTORISED, "draw", "confine"
FLOAT8_ARCHITECTURES = 90, 100
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install -e '.[gpu]'"
)


def expected_instruction(architecture: int, rows: int, size: int) -> str:
    """float32 goes without tensor cores: exact products."""
    if size == 4:
        return "fma.rn.f32"
    if rows < 64 or architecture not in (90, 100):
        return "mma.sync"
    return {90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture]


def run_python(arguments: list[str], cache: Path) -> "subprocess.CompletedProcess[str]":
    """Of a process that compiles kernels, whatever Triton is set to here."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TRITON_")
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        check=False,
        capture_output=True,
        text=True,
    )


def compile_kernels(wanted: list[str], cache: Path) -> "subprocess.CompletedProcess[str]":
    return run_python(["-m", "tests.triton.compile_kernels", *wanted], cache)


def test_a_larger_top_k_compiles_no_further_kernel(tmp_path: Path) -> None:
    program = (
        "from model.devices.gpu.draw import confine\n"
        "print(*(each.name for each in confine.params if each.do_not_specialize))"
    )
    done = run_python(["-c", program], tmp_path)
    assert "likeliest_stride" in done.stdout.split(), done.stderr


def compiled(wanted: list[str], cache: Path) -> list[dict[str, Any]]:
    """What compile_kernels says of these. All of it fits, and what reads or writes float8 has the
    instructions that convert it.
    """
    done = compile_kernels(wanted, cache)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    stored = wanted[0].endswith(":fp8")
    for made in found:
        what = " ".join(
            f"{name} {made[name]}" for name in ("shape", "rows", "groups", "window") if name in made
        )
        print(
            f"sm_{made['architecture']} {made['kernel']:9} {what:45} {made['shared'] / 1024:5.0f} "
            f"KiB shared, {made['registers']:3} registers, {made['spilled']} bytes spilled, "
            f"loops {made['loops']}"
        )
    for made in found:
        assert made["shared"] <= SHARED_KIB[made["architecture"]] * 1024 and made["cubin"] > 0, made
        reads = made["kernel"] in ("attend", "decode")
        writes = made["kernel"] == "scatter" and made["stores"]
        # Triton 3.9 converts to bfloat16 at once where there is an instruction for that.
        converted = made["counts"]["cvt.rn.f16x2.e4m3x2"] + made["counts"]["cvt.rn.bf16x2.e4m3x2"]
        assert (converted > 0) == (stored and reads), made
        assert (made["counts"]["cvt.rn.satfinite.e4m3x2.f32"] > 0) == (stored and writes), made
    return found


def check_instruction(made: dict[str, Any], rows: int, size: int) -> None:
    instruction = expected_instruction(made["architecture"], rows, size)
    others = {"mma.sync", "wgmma.mma_async", "tcgen05.mma"} - {instruction}
    assert made["counts"][instruction] > 0 and not any(made["counts"][other] for other in others), (
        made
    )
    assert size == 4 or made["counts"]["cp.async.c"] > 0, made


def check(wanted: list[tuple[int, int, int]], cache: Path, stored: str = "", size: int = 2) -> None:
    """Compiles (architecture, shape, window): the loads of every loop are copies on their way,
    warps with keys of their own meet at most twice in it, and what is turned is rounded before it
    is added, as torch does.
    """
    found = compiled(
        [
            f"{architecture}:shape{shape}x{size}:{window}{stored}"
            for architecture, shape, window in wanted
        ],
        cache,
    )
    assert [made["kernel"] for made in found].count("attend") == len(wanted)
    assert {made["kernel"] for made in found} == KERNELS
    for made in found:
        if made["kernel"] == "scatter":
            assert not made["counts"]["fma.rn.f32"], made
            continue
        check_instruction(made, made["rows"], size)
        for loop in made["loops"] if size == 2 else ():
            assert loop["copies"] > 0, made
            assert made["groups"] == 1 or loop["barriers"] <= 2, made
        assert len(made["loops"]) >= 1, made


def check_rows(wanted: list[tuple[int, int]], cache: Path) -> None:
    """Compiles (architecture, bytes of a number)."""
    found = compiled([f"{architecture}:rows{size}" for architecture, size in wanted], cache)
    assert {made["kernel"] for made in found} == {"join", *BY_ROWS}
    for made in found:
        if made["kernel"] in VECTORISED:
            assert (
                made["counts"]["ld.global.v4.b32"] > 0
                and not made["counts"]["ld.global.b16"] + made["counts"]["ld.global.b32"]
            ), made


def check_blocks(architecture: int, form: str, cache: Path) -> None:
    """Every tile fits, by tensor cores, fed by asynchronous copies; integers become floats without
    the slow conversion.
    """
    done = compile_kernels([f"{architecture}:{form}"], cache)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [made["kernel"] for made in found] == ["block_product"] * 8 + ["join"] + [
        "dequantize"
    ] * 2
    for made in found:
        counts = made["counts"]
        assert made["shared"] <= SHARED_KIB[architecture] * 1024 and made["cubin"] > 0, made
        assert counts["cvt.rn.f32.u"] == counts["cvt.rn.f32.s"] == 0, made
        if made["kernel"] == "block_product":
            check_instruction(made, 64, 2 if made["number"] == "bf16" else 4)
            # Of numbers, scales, minima and rows of x, in the loop and before it.
            assert counts["cp.async.c"] >= 8, made


def check_one_row(architecture: int, cache: Path) -> None:
    """It is multiplied without tensor cores, and W is read past the caches."""
    for made in compiled([f"{architecture}:one_row"], cache):
        assert made["kernel"] == "one_row" and made["counts"]["ld.global.L1::evict_first"] > 0, made
        assert not any(
            made["counts"][name] for name in ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
        ), made


def test_products_of_one_row_compile(tmp_path: Path) -> None:
    check_one_row(80, tmp_path)
    check_one_row(90, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", SHARED_KIB)
def test_products_of_one_row_compile_everywhere(architecture: int, tmp_path: Path) -> None:
    check_one_row(architecture, tmp_path)


def test_products_of_blocks_compile_with_the_expected_instructions(tmp_path: Path) -> None:
    check_blocks(89, "int4", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("architecture", SHARED_KIB)
def test_all_products_of_blocks_compile_with_the_expected_instructions(
    architecture: int, form: str, tmp_path: Path
) -> None:
    check_blocks(architecture, form, tmp_path)


def test_a_sample_of_attention_compiles_with_the_expected_instructions(tmp_path: Path) -> None:
    check([(90, 0, 0), (100, 2, 0), (86, 3, 0)], tmp_path)
    check([(80, 3, 512)], tmp_path, size=4)


def test_a_sample_of_kernels_for_rows_compiles(tmp_path: Path) -> None:
    check_rows([(80, 2), (90, 2), (100, 4)], tmp_path)


def test_a_sample_over_float8_compiles_with_instructions_that_convert_it(tmp_path: Path) -> None:
    check([(90, 0, 0)], tmp_path, ":fp8")


def test_there_is_no_float8_before_its_instructions(tmp_path: Path) -> None:
    """Why the option is refused there."""
    done = compile_kernels(["80:shape0x2:0:fp8"], tmp_path)
    assert done.returncode == 1 and "fp8e4nv not supported in this architecture" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", FLOAT8_ARCHITECTURES)
def test_every_configuration_over_float8_compiles(architecture: int, tmp_path: Path) -> None:
    wanted = [(architecture, shape, window) for shape in SHAPES for window in (0, 512)]
    check(wanted, tmp_path, ":fp8")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", SHARED_KIB)
def test_every_configuration_compiles_with_the_expected_instructions(
    architecture: int, tmp_path: Path
) -> None:
    check([(architecture, shape, window) for shape in SHAPES for window in (0, 512)], tmp_path)
    check([(architecture, shape, 0) for shape in SHAPES], tmp_path, size=4)
    check_rows([(architecture, size) for size in (2, 4)], tmp_path)
