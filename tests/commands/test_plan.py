"""`onehead plan` on the published dimensions, and its arithmetic against the allocator's."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.layout import CacheLayout
from cache.pages import PageAllocator
from cache.table import PageTable
from commands import cli
from commands.options import PlanOptions
from commands.plan import make_plan
from commands.train.twin import MultiHeadDecoder
from model.checkpoint.families import read_spec
from model.decoder import Decoder, meta_decoder
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import CheckpointError
from tests.support.paths import MODELS
from tests.support.torch_blocks import BlockProducts

BIGCODE = {
    "model_type": "gpt_bigcode",
    "multi_query": True,
    "vocab_size": 49152,
    "n_positions": 8192,
    "eos_token_id": 0,
}
# Parameters; bytes of K and V of a token in bfloat16, with one key/value head and with one for each
# query head.
PUBLISHED = {
    "tiny_starcoder_py": (164_144_128, 5_120, 61_440),
    "starcoderbase-1b": (1_137_207_296, 12_288, 196_608),
    "starcoderbase-3b": (3_043_311_104, 18_432, 405_504),
    "starcoderbase-7b": (7_327_263_232, 21_504, 688_128),
    "starcoder": (15_517_456_384, 20_480, 983_040),
    "granite-20b-code": (20_066_993_152, 26_624, 1_277_952),
    "falcon-7b": (6_921_720_704, 8_192, 581_632),
    "gemma-2b": (2_506_172_416, 18_432, 147_456),
    "gemma-3-270m": (268_098_176, 18_432, 73_728),
    "gemma-3-1b": (999_885_952, 26_624, 106_496),
    "gemma-4-e2b": (4_628_569_379, 18_432, 147_456),
    "deepseek-v2-lite": (15_706_484_224, 31_104, 276_480),
    "minicpm3-4b": (4_073_875_968, 35_712, 793_600),
}


def config_folder(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_published_config_is_planned_here() -> None:
    assert {path.name for path in MODELS.iterdir() if path.is_dir()} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_dimensions(name: str, caplog: pytest.LogCaptureFixture) -> None:
    parameters, multi_query, multi_head = PUBLISHED[name]
    plan = make_plan(PlanOptions(model=MODELS / name, memory=80 * 2**30, device="cuda"))
    assert plan.parameters == parameters and not caplog.records  # No key of the file is unknown.
    assert plan.kv_bytes_per_token["bfloat16"] == {
        "multi_query": multi_query,
        "multi_head": multi_head,
    }
    assert plan.kv_bytes_per_token["float32"] == {
        "multi_query": 2 * multi_query,
        "multi_head": 2 * multi_head,
    }
    assert (
        plan.weight_bytes["bfloat16"] == 2 * plan.parameters
        and plan.weight_bytes["float32"] == 4 * plan.parameters
    )
    assert (
        plan.weight_bytes["int8"] < 1.09 * plan.parameters
        and plan.weight_bytes["int4"] < 0.66 * plan.parameters
    )
    assert plan.fit is not None and all(row["multi_query"] > row["multi_head"] for row in plan.fit)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `onehead plan` within this process; gives its exit status, what it prints, and its
    errors.
    """

    def run_once(*arguments: str) -> tuple[int, str, str]:
        try:
            status = cli.main(["plan", *arguments])
        except SystemExit as exit:  # A usage error.
            status = int(exit.code or 0)
        return status, *capsys.readouterr()

    return run_once


def test_the_command_prints_exact_bytes_and_works_from_config_json_alone(run: Run) -> None:
    folder = str(MODELS / "granite-20b-code")
    command = [
        sys.executable,
        "-m",
        "commands.cli",
        "plan",
        folder,
        "--memory",
        "80GiB",
        "--device",
        "cuda",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for figure in ("26,624", "1,277,952", "53,248", "2,555,904", "40,133,986,304"):
        assert figure in done.stdout
    as_json = json.loads(run(folder, "--memory", "80GiB", "--format", "json")[1])
    assert as_json["kv_bytes_per_token"]["bfloat16"] == {
        "multi_query": 26_624,
        "multi_head": 1_277_952,
    }
    assert "the weights alone do not fit" in run(folder, "--memory", "20GiB", "--device", "cuda")[1]


def test_refusals(tmp_path: Path, run: Run) -> None:
    status, _, errors = run(str(tmp_path))
    assert status == 78 and "config.json: no such file" in errors
    assert run(str(tmp_path), "--memory", "80 gigs")[0] == 78
    assert run(str(tmp_path), "--dtype", "float8")[0] == 78
    assert run()[0] == 2
    for options in (
        ["--memory", "0.5"],
        ["--page_size", "0"],
        ["--step_tokens", "-1"],
        ["--text", "x"],
    ):
        status, _, errors = run(str(MODELS / "gemma-2b"), *options)
        assert status == 2 and options[0][2:] in errors


def test_what_the_plan_says_is_what_the_runner_takes(tiny_folder: Path) -> None:
    spec = read_spec(tiny_folder)
    runner = ModelRunner.load(
        tiny_folder, spec, EngineOptions("cpu", "float32", 1, 64, 10, None, 512, 4, 64)
    )
    plan = make_plan(PlanOptions(model=tiny_folder, memory=10**9, dtype="float32"))
    assert plan.weight_bytes["float32"] == runner.weight_bytes
    assert plan.kv_bytes_per_token["float32"]["multi_query"] * 64 * 10 == runner.pool.num_bytes
    for dtype in ("float32", "bfloat16"):
        small = ModelRunner.load(
            tiny_folder, spec, EngineOptions("cpu", dtype, 1, 64, 10, None, 512, 4, 64, "int8")
        )
        assert (
            make_plan(PlanOptions(model=tiny_folder, memory=10**9, dtype=dtype)).weight_bytes[
                "int8"
            ]
            == small.weight_bytes
        )


def test_the_device_that_is_here_is_planned_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = MODELS / "gemma-2b"
    expected = {
        (False, "auto"): (
            "cpu",
            "float32",
            "planned for a CPU: torch finds no GPU here; --device cuda plans one",
        ),
        (True, "auto"): (
            "cuda",
            "bfloat16",
            "planned for a GPU: torch finds a GPU here; --device cpu plans a CPU",
        ),
        (False, "cuda"): ("cuda", "bfloat16", "planned for a GPU: --device says so"),
    }
    for (has_gpu, device), (planned, dtype, line) in expected.items():
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        assert cli.main(["plan", str(folder), "--memory", "16GiB", "--device", device]) == 0
        assert line in capsys.readouterr().out
        made = make_plan(PlanOptions(model=folder, memory=2**34, device=device))  # type: ignore[arg-type]
        assert (made.device, made.dtype, made.as_json()["device"]) == (planned, dtype, planned)


SEVERAL_HEADS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "GPT-2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
            "eos_token_id": 50256,
        },
        12,
        124_439_808,
        2 * 12 * 12 * 64,
    ),
    "Llama-3-8B": (
        {
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
        }
        | {
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "eos_token_id": 128001,
        },
        8,
        8_030_261_248,
        2 * 32 * 8 * 128,
    ),
}


@pytest.mark.parametrize("name", SEVERAL_HEADS)
def test_a_checkpoint_with_several_heads_is_compared_with_what_convert_makes_of_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, heads, parameters, numbers_of_a_token = SEVERAL_HEADS[name]
    folder = config_folder(tmp_path, config)
    plan = make_plan(PlanOptions(model=folder, memory=80 * 2**30, device="cuda"))
    assert (
        plan.weight_bytes_as_is["float32"] == 4 * parameters
        and plan.weight_bytes_as_is["bfloat16"] == 2 * parameters
    )
    assert plan.kv_bytes_per_token["bfloat16"] == {
        "multi_query": 2 * numbers_of_a_token // heads,
        "multi_head": 2 * numbers_of_a_token,
    }
    assert plan.fit is not None and all(
        row["multi_query"] > heads / 1.2 * row["multi_head"] > 0 for row in plan.fit
    )
    assert cli.main(["plan", str(folder), "--memory", "80GiB"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"{heads} key/value heads of" in printed
        and "as `onehead convert` makes it" in printed
        and printed.count(f"with {heads} heads") == 3
    )
    assert cli.main(["plan", str(folder), "--memory", "80GiB", "--format", "json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["key_value_heads"] == as_json["compared_key_value_heads"] == heads


def test_as_it_is_in_8_bits_to_the_byte(tmp_path: Path) -> None:
    """Against a decoder with as many heads, in the forms that the server would hold."""
    config = BIGCODE | {
        "multi_query": False,
        "vocab_size": 300,
        "n_positions": 64,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
    }
    plan = make_plan(
        PlanOptions(
            model=config_folder(tmp_path, config), memory=10**9, dtype="bfloat16", device="cuda"
        )
    )
    decoder = meta_decoder(plan.spec)
    with torch.device("meta"):
        several = MultiHeadDecoder(plan.spec)
    decoder_bytes, several_bytes = (weight_bytes_of(each) for each in (decoder, several))
    assert {form: decoder_bytes[form] for form in plan.weight_bytes} == plan.weight_bytes
    assert {form: several_bytes[form] for form in plan.weight_bytes} == plan.weight_bytes_as_is


def weight_bytes_of(decoder: Decoder) -> dict[str, int]:
    """Counted on the decoder itself, with what stays in bfloat16."""
    found = {"float32": 4 * decoder.num_parameters, "bfloat16": 2 * decoder.num_parameters}
    for products in (BlockProducts("int8"), BlockProducts("int4")):
        quantized = copy.deepcopy(decoder)
        products.replace(quantized, torch.float32)
        parameters = quantized.parameters()
        found[products.quantization] = sum(
            2 * p.numel() if p.dtype is torch.float32 else p.nbytes for p in parameters
        )
    return found


def test_what_convert_cannot_read_is_refused_as_the_server_refuses_it(tmp_path: Path) -> None:
    for change, words in (
        ({"num_kv_heads": 71, "new_decoder_architecture": True}, "num_kv_heads is 71"),
        ({"model_type": "x"}, "supported: "),
    ):
        with pytest.raises(CheckpointError, match=words) as refused:
            make_plan(
                PlanOptions(
                    model=config_folder(
                        tmp_path,
                        json.loads((MODELS / "falcon-7b" / "config.json").read_text()) | change,
                    ),
                    memory=10**9,
                )
            )
        with pytest.raises(CheckpointError) as by_the_server:
            read_spec(tmp_path)
        assert str(refused.value) == str(by_the_server.value)


@given(
    st.integers(0, 400),
    st.integers(1, 300),
    st.integers(1, 80),
    st.sampled_from([(), (None, 20, 20), (9, 9, 9), (None, 40, 40)]),
)
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
    # With windows a sequence may lie luckily on its pages; without there is nothing to be lucky
    # about.
    if not windows:
        assert num_pages - allocator.num_owned < layout.most_pages(num_tokens, step)
