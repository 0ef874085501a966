"""engine.deterministic: where it is given anyway, where it is refused before any weight is read,
and what is said of the numerics.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from model.checkpoint.families import read_spec
from model.devices.gpu.device import GpuDevice
from model.options import EngineOptions
from model.runner.runner import ModelRunner, _check_options
from model.spec import OptionError
from server.config import ServeSettings, load
from tests.support.processes import ServerProcess


def made_options(
    dtype: str, quantization: str, page_size: int, deterministic: bool, cache_dtype: str = "auto"
) -> EngineOptions:
    return EngineOptions(
        "cpu", dtype, 1, page_size, 20, None, 256, 4, 64, quantization, deterministic, cache_dtype
    )


def load_runner(
    folder: Path,
    dtype: str,
    quantization: str,
    page_size: int,
    deterministic: bool,
    cache_dtype: str = "auto",
) -> ModelRunner:
    options = made_options(dtype, quantization, page_size, deterministic, cache_dtype)
    return ModelRunner.load(folder, read_spec(folder), options)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_a_cpu_with_kernels_gives_it_anyway(
    dtype: str, quantization: str, tiny_folder: Path
) -> None:
    for asked in (False, True):
        runner = load_runner(tiny_folder, dtype, quantization, 16, asked)
        assert runner.deterministic and runner.kernels == "native"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_refuses_it_where_the_reference_attends(
    dtype: str, tiny_folder: Path, tmp_path: Path
) -> None:
    assert not load_runner(tiny_folder, dtype, "none", 8, False).deterministic
    shutil.copy(tiny_folder / "config.json", tmp_path)  # And no weights: they are not looked for.
    expected = (
        "engine.deterministic is true.*pages of 8 and keys of 16 columns in "
        f"{dtype}.*expected cache.dtype auto, and cache.page_size"
    )
    with pytest.raises(OptionError, match=expected):
        load_runner(tmp_path, dtype, "none", 8, True)


def test_a_cpu_refuses_it_with_a_cache_in_float8(tiny_folder: Path, tmp_path: Path) -> None:
    assert not load_runner(tiny_folder, "float32", "none", 16, False, "fp8").deterministic
    shutil.copy(tiny_folder / "config.json", tmp_path)
    expected = (
        "engine.deterministic is true.*keys of .* columns in float8_e4m3fn.*expected "
        "cache.dtype auto"
    )
    with pytest.raises(OptionError, match=expected):
        load_runner(tmp_path, "float32", "none", 16, True, "fp8")


def test_a_gpu_refuses_it_without_triton_and_where_attention_is_the_references(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(tiny_folder)

    def found(name: str) -> Callable[[str], ModuleSpec | None]:
        return lambda asked: ModuleSpec(name, None) if asked == name else None

    monkeypatch.setattr("model.devices.gpu.device.find_spec", found("triton"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    for dtype in ("auto", "bfloat16", "float16", "float32"):
        for options in (
            made_options(dtype, "none", 64, True),
            made_options(dtype, "none", 64, True, "fp8"),
        ):
            _check_options(spec, options, GpuDevice())
    with pytest.raises(OptionError, match=r"pages of 48.*a power of two from 16"):
        _check_options(spec, made_options("auto", "none", 48, True), GpuDevice())
    monkeypatch.setattr("model.devices.gpu.device.find_spec", found("no triton"))
    with pytest.raises(OptionError, match="expected triton"):
        _check_options(spec, made_options("auto", "none", 64, True), GpuDevice())


def test_the_option_is_off_unless_it_is_asked_for() -> None:
    assert load(ServeSettings, [], "onehead serve").engine.deterministic is False
    assert (
        load(
            ServeSettings, ["--engine.deterministic", "true"], "onehead serve"
        ).engine.deterministic
        is True
    )


def test_a_server_says_so(tiny_folder: Path) -> None:
    server = ServerProcess(tiny_folder, "--engine.deterministic", "true", "--cache.pages", "64")
    info = json.loads(server.get("/info")[1])
    _, answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    server.process.terminate()
    _, log = server.process.communicate(timeout=60)
    assert info["deterministic"] is True and info["kernels"] == "native"
    assert answer["system_fingerprint"].endswith(f"-cpu-{info['kernels']}")
    assert f"by {info['kernels']}, batch-invariant;" in log


def test_a_cpu_without_kernels_is_78(tiny_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.support.masked",
        "none",
        "serve",
        "--model",
        str(tiny_folder),
        "--port",
        "0",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (
        done.returncode == 78
        and "install onehead again, from a wheel or where there is a C++" in done.stderr
        and "Traceback" not in done.stderr
    ), done.stderr
