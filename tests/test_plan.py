"""`onehead plan` on the published dimensions, and its arithmetic against the allocator's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.layout import CacheLayout
from cache.pages import PageAllocator
from cache.table import PageTable
from model.families import read_spec
from model.runner import ModelRunner, RunnerOptions
from model.tools.options import PlanOptions
from model.tools.pictures import MISSING
from model.tools.plan import draw, make_plan
from server import cli

BIGCODE = {"model_type": "gpt_bigcode", "multi_query": True, "vocab_size": 49152, "n_positions": 8192, "eos_token_id": 0}
GEMMA3 = {"model_type": "gemma3_text", "vocab_size": 262144, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768}
GEMMA3 |= {"num_attention_heads": 4, "sliding_window": 512, "eos_token_id": [1, 106]}
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "StarCoderBase-1B": (BIGCODE | {"n_embd": 2048, "n_head": 16, "n_layer": 24, "n_inner": 8192}, 12_288, 196_608),
    "StarCoder": (BIGCODE | {"n_embd": 6144, "n_head": 48, "n_layer": 40, "n_inner": 24576}, 20_480, 983_040),
    "granite-20b-code": (BIGCODE | {"n_embd": 6144, "n_head": 48, "n_layer": 52, "n_inner": 24576}, 26_624, 1_277_952),
    "Falcon-7B": (
        {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32}
        | {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "bias": False, "eos_token_id": 11},
        8_192,
        581_632,
    ),
    "Gemma-2B": (
        {"model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 18}
        | {"num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384, "max_position_embeddings": 8192, "eos_token_id": 1},
        18_432,
        147_456,
    ),
    "Gemma-3-270m": (GEMMA3 | {"hidden_size": 640, "num_hidden_layers": 18, "intermediate_size": 2048}, 18_432, 73_728),
    "Gemma-3-1b": (GEMMA3 | {"hidden_size": 1152, "num_hidden_layers": 26, "intermediate_size": 6912}, 26_624, 106_496),
}
PARAMETERS = {"StarCoderBase-1B": 1.137e9, "Falcon-7B": 6.921e9, "Gemma-2B": 2.506e9, "Gemma-3-270m": 0.268e9, "Gemma-3-1b": 1.000e9}


def config_folder(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_dimensions(name: str, tmp_path: Path) -> None:
    config, multi_query, multi_head = PUBLISHED[name]
    plan = make_plan(PlanOptions(config_folder(tmp_path, config), memory=80 * 2**30))
    assert plan.kv_bytes_per_token["bfloat16"] == {"multi_query": multi_query, "multi_head": multi_head}
    assert plan.kv_bytes_per_token["float32"] == {"multi_query": 2 * multi_query, "multi_head": 2 * multi_head}
    assert plan.weight_bytes["bfloat16"] == 2 * plan.parameters and plan.weight_bytes["float32"] == 4 * plan.parameters
    assert plan.weight_bytes["int8"] < 1.02 * plan.parameters
    if name in PARAMETERS:
        assert abs(plan.parameters / PARAMETERS[name] - 1) < 1e-3
    assert plan.fit is not None and all(row["multi_query"] > row["multi_head"] for row in plan.fit)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "server.cli", "plan", *arguments], capture_output=True, text=True, timeout=60)


def test_the_command_prints_exact_bytes_and_works_from_config_json_alone(tmp_path: Path) -> None:
    folder = str(config_folder(tmp_path, PUBLISHED["granite-20b-code"][0]))
    done = run(folder, "--memory", "80GiB")
    assert done.returncode == 0, done.stderr
    for figure in ("26,624", "1,277,952", "53,248", "2,555,904", "40,133,986,304"):
        assert figure in done.stdout
    as_json = json.loads(run(folder, "--memory", "80GiB", "--format", "json").stdout)
    assert as_json["kv_bytes_per_token"]["bfloat16"] == {"multi_query": 26_624, "multi_head": 1_277_952}
    assert "the weights alone do not fit" in run(folder, "--memory", "20GiB").stdout


def test_refusals(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.returncode == 78 and "config.json: no such file" in done.stderr
    assert run(str(tmp_path), "--memory", "80 gigs").returncode == 78
    assert run(str(tmp_path), "--dtype", "float8").returncode == 78
    assert run().returncode == 2
    for options in (["--memory", "0.5"], ["--page_size", "0"], ["--step_tokens", "-1"], ["--picture", "x.txt"], ["--data", "."]):
        done = run(str(config_folder(tmp_path, PUBLISHED["Gemma-2B"][0])), *options)
        assert done.returncode == 2 and options[0][2:] in done.stderr and "Traceback" not in done.stderr
    done = run(str(tmp_path), "--memory", "1MB", "--picture", str(tmp_path / "x.svg"))
    assert done.returncode == 2 and "nothing to draw" in done.stderr


def test_what_the_plan_says_is_what_the_runner_takes(tiny_folder: Path) -> None:
    spec = read_spec(tiny_folder)
    runner = ModelRunner.load(tiny_folder, spec, RunnerOptions("cpu", "float32", 1, 64, 10, None, 512, 4, 64))
    plan = make_plan(PlanOptions(tiny_folder, memory=10**9, dtype="float32"))
    assert plan.weight_bytes["float32"] == runner.weight_bytes
    assert plan.kv_bytes_per_token["float32"]["multi_query"] * 64 * 10 == runner.pool.num_bytes
    for dtype in ("float32", "bfloat16"):
        small = ModelRunner.load(tiny_folder, spec, RunnerOptions("cpu", dtype, 1, 64, 10, None, 512, 4, 64, "int8"))
        assert make_plan(PlanOptions(tiny_folder, memory=10**9, dtype=dtype)).weight_bytes["int8"] == small.weight_bytes


@given(st.integers(0, 400), st.integers(1, 300), st.integers(1, 80), st.sampled_from([(), (None, 20, 20), (9, 9, 9), (None, 40, 40)]))
def test_as_many_sequences_as_it_says_do_fit_and_one_more_does_not(
    num_pages: int, num_tokens: int, step: int, windows: tuple[int | None, ...]
) -> None:
    """Growing one after the other, each at rest when the next begins."""
    layout = CacheLayout.of(3, windows, 16)
    count = layout.sequences(num_pages, num_tokens, step)
    allocator = PageAllocator(max(1, num_pages))
    for _ in range(count):
        table = PageTable(allocator, layout)
        for start in range(0, num_tokens, step):
            end = min(start + step, num_tokens)
            table.grow(num_tokens, end)
            table.drop(end)
    if not windows:  # With windows a sequence may lie luckily on its pages; without there is nothing to be lucky about.
        assert num_pages - allocator.num_owned < layout.most_pages(num_tokens, step)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_picture(suffix: str, tmp_path: Path) -> None:
    folder = config_folder(tmp_path, PUBLISHED["Gemma-3-1b"][0])
    draw(make_plan(PlanOptions(folder, memory=80 * 2**30)), tmp_path / f"plan{suffix}")
    assert (tmp_path / f"plan{suffix}").stat().st_size > 5000


def test_without_matplotlib_the_plan_is_printed_and_the_picture_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder, picture = config_folder(tmp_path, PUBLISHED["Gemma-3-1b"][0]), tmp_path / "plan.svg"
    assert cli.main(["plan", str(folder), "--memory", "80GiB", "--picture", str(picture)]) == 2
    printed = capsys.readouterr()
    assert "sequences that fit" in printed.out and not picture.exists()
    assert printed.err == f"onehead plan: picture {picture} is not written: {MISSING}\n"
