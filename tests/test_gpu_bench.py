"""The GPU's bench where there is none: its arithmetic, its bars, the code that only a GPU runs over a stand-in, and a small run of it."""

import argparse
import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu.__main__ import child
from bench.gpu.attention import PAGE_SIZE, Problem, flashinfer
from bench.gpu.bars import bars
from bench.gpu.common import SIZES, WORKLOADS, Part, captured, median_seconds
from bench.gpu.floor import Ceilings, Shape, nano_vllm, step_seconds, workload_seconds
from model.decoder import meta_decoder
from model.families import read_spec
from server.config import EMBEDDED_MODEL

ROOT = Path(__file__).resolve().parent.parent
H200 = Ceilings(4.8e12, 790e12)
STARCODER_1B = Shape(1_120_430_080, 24, 16, 128)
SHAPES = {
    "StarCoderBase-1B": STARCODER_1B,
    "StarCoder 15B": Shape(15_465_000_000, 40, 48, 128),
    "Falcon-7B": Shape(6_920_000_000, 32, 71, 64),
    "Gemma-2B": Shape(2_505_000_000, 18, 8, 256),
}


@pytest.mark.parametrize(
    ("model", "context", "expected"),
    [
        ("StarCoderBase-1B", 2048, (0.47, 0.63, 2.07)),
        ("StarCoderBase-1B", 8192, (0.49, 1.14, 6.09)),
        ("StarCoder 15B", 2048, (6.45, 6.72, 12.26)),
        ("StarCoder 15B", 8192, (6.48, 7.56, 18.97)),
        ("Falcon-7B", 2048, (2.89, 3.00, 5.38)),
        ("Falcon-7B", 8192, (2.90, 3.33, 8.06)),
        ("Gemma-2B", 8192, (1.08, 2.05, 9.68)),
    ],
)
def test_the_floor_of_a_step(model: str, context: int, expected: tuple[float, ...]) -> None:
    """Milliseconds at 1, 32 and 256 sequences, worked out beforehand for the vendor's figures."""
    found = [step_seconds(SHAPES[model], batch, context, H200) * 1e3 for batch in (1, 32, 256)]
    assert found == pytest.approx(expected, abs=0.006)


def test_the_workload_and_its_floor() -> None:
    workload = nano_vllm(*WORKLOADS[False])
    lengths = [len(prompt) for prompt in workload.prompts]
    assert (len(lengths), workload.num_tokens, sum(lengths)) == (256, 133_966, 142_827)
    seconds = workload_seconds(STARCODER_1B, lengths, workload.outputs, H200)
    assert seconds == pytest.approx(1.21, abs=0.006)
    assert workload_seconds(STARCODER_1B, lengths, workload.outputs, Ceilings(2.039e12, 312e12)) == pytest.approx(2.91, abs=0.006)


def test_the_model_has_starcoderbase_1b_s_shape(tmp_path: Path) -> None:
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text()) | SIZES[False]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    streamed = sum(parameter.numel() for parameter in meta_decoder(spec).parameters()) - spec.max_positions * spec.hidden_size
    assert streamed == STARCODER_1B.streamed
    assert spec.kv_bytes_per_token(2) == STARCODER_1B.key_bytes == 12_288


# --- the bars


def attention(rate: float, latency: float) -> dict[str, Any]:
    full = {"seconds": 268e6 / rate, "bytes": 268e6}
    return {"16x128": {"1x1024": {"seconds": latency, "bytes": 5e5}, "256x2048": full}}


WHOLE = {
    "checkpoint": {
        "shape": {"streamed": 1_120_430_080, "layers": 24, "heads": 16, "head_dim": 128, "itemsize": 2},
        "workload": WORKLOADS[False],
    },
    "ceilings": {"copy": 4.3e12, "matmul": 790e12},
    "attention": {"onehead": attention(0.86 * 4.3e12, 7.9e-6), "sdpa": attention(1e12, 9e-6)},
    "step": {"kernels": "triton", "256x2048": {"seconds": 3e-3}},
    "serve": {
        "engine": {"1": {"output_tokens_per_second": 65_000.0, "failed": 0}},
        "http": {"1": {"output_tokens_per_second": 60_000.0, "failed": 0}},
        "host": {"host": 0.9e-3, "gpu": 2.8e-3, "step": 3e-3, "sequences": 256},
    },
    "peers": {"static": {"output_tokens_per_second": 20_000.0}, "continuous": {"output_tokens_per_second": 9_000.0}},
    "numerics": {
        "logits": {"float32": 1e-4, "bfloat16": 0.3, "reference_bfloat16": 0.2, "largest": 14.0},
        "greedy": {"tokens": 200, "asked": 200, "first_difference": None, "gap": None},
        "kernel": {"16x128": {"rows": 16, "differ": 0}},
        "engine": {"deterministic": True, "differ": 0, "requests": 32, "first_difference": None},
    },
}
MUTANTS = {
    "attention/onehead/16x128/256x2048/seconds": (1e-4, "85% of the copy"),
    "attention/onehead/16x128/1x1024/seconds": (8.1e-6, "8 us for 1x1024"),
    "serve/engine/1/output_tokens_per_second": (50_000.0, "engine: 55% of the floor"),
    "serve/http/1/output_tokens_per_second": (45_000.0, "http: 50% of the floor"),
    "serve/host/host": (1.1e-3, "under 1 ms"),
    "serve/host/gpu": (2.6e-3, "the GPU busy 90%"),
    "peers/static/output_tokens_per_second": (65_001.0, "faster than transformers, static"),
    "peers/continuous/output_tokens_per_second": (65_001.0, "faster than transformers, continuous"),
    "peers/continuous/failed": ("status 1", "every part ran whole"),
    "numerics/logits/float32": (2e-3, "float32 logits"),
    "numerics/logits/bfloat16": (0.5, "bfloat16 logits"),
    "numerics/greedy": ({"tokens": 200, "asked": 200, "first_difference": 17, "gap": 0.1}, "greedy tokens"),
    "numerics/greedy/tokens": (199, "greedy tokens"),
    "numerics/kernel/16x128/differ": (1, "kernel of 16x128"),
    "numerics/engine/differ": (1, "engine.deterministic"),
}


def missed(found: dict[str, Any]) -> list[str]:
    return [check.what for check in bars(found, list(WHOLE), judged=True) if not check.holds]


def test_a_run_in_which_everything_holds() -> None:
    assert missed(WHOLE) == []


@pytest.mark.parametrize("path", MUTANTS)
def test_every_bar_can_be_missed(path: str) -> None:
    found = deepcopy(WHOLE)
    *outer, last = path.split("/")
    place: Any = found
    for step in outer:
        place = place[step]
    place[last], words = MUTANTS[path]
    (what,) = missed(found)
    assert words in what


def test_only_what_was_to_run_is_judged() -> None:
    found = {"ceilings": WHOLE["ceilings"], "attention": WHOLE["attention"]}
    assert [check.holds for check in bars(found, ["ceilings", "attention"], judged=True)] == [True] * 3
    assert len(bars(WHOLE, list(WHOLE), judged=False)) == 6


@pytest.mark.parametrize("part", [part for part in WHOLE if part != "step"])
def test_what_was_not_measured_is_missed(part: str) -> None:
    found = {name: figures for name, figures in WHOLE.items() if name != part}
    checks = [check for check in bars(found, list(WHOLE), judged=True) if not check.holds]
    assert checks and all("not measured" in check.found for check in checks)


# --- what only a GPU runs, over a stand-in


class FakeEvent:
    """Reads a clock that a call moves on."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at


class FakeCapture:
    """A stream, a graph, and the contexts of both."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def replay(self) -> None:
        FakeEvent.now += 5.0


def test_calls_are_timed_by_events_behind_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {name: FakeCapture for name in ("Stream", "stream", "CUDAGraph", "graph", "current_stream")}
    for name, fake in (fakes | {"Event": FakeEvent, "synchronize": lambda: None}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    log: list[str] = []

    def flush() -> None:
        FakeEvent.now += 100.0
        log.append("flush")

    def call() -> None:
        FakeEvent.now += 3.0
        log.append("call")

    monkeypatch.setattr(torch, "zeros", lambda *_, **__: SimpleNamespace(sum=flush))
    assert median_seconds(call, "cuda", 4) == pytest.approx(3e-3)
    assert log == ["call"] * 3 + ["flush", "call"] * 4
    assert median_seconds(captured(call), "cuda", 4) == pytest.approx(5e-3)


class FakeWrapper:
    """FlashInfer's, by its documentation: indptr, indices and last page's length; 4-dimensional pages."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert workspace.dtype is torch.uint8 and layout == "NHD" and use_tensor_cores

    def plan(self, *lists_and_sizes: Any, q_data_type: Any, kv_data_type: Any, sm_scale: float) -> None:
        self.ends, self.order, self.last, *sizes = lists_and_sizes
        assert all(x.dtype is torch.int32 for x in (self.ends, self.order, self.last)) and sizes[1:] == [1, 32, PAGE_SIZE]
        self.scale = sm_scale

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        outputs = []
        for i, q_Hd in enumerate(q):
            order = self.order[self.ends[i] : self.ends[i + 1]].long()
            keys, values = (x[order, :, 0].flatten(0, 1)[: (len(order) - 1) * PAGE_SIZE + self.last[i]] for x in pages)
            outputs.append((q_Hd @ keys.T * self.scale).softmax(-1) @ values)
        return torch.stack(outputs)


def test_flashinfer_is_asked_for_what_ours_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper))
    monkeypatch.setattr("bench.gpu.attention.backend_name", lambda *_: "reference")
    problem = Problem(4, 32, [70, 64, 1], torch.float32, "cpu")
    torch.testing.assert_close(problem.ours()(0), flashinfer(problem)(0))


# --- parts


def test_what_fails_is_written_down_and_the_rest_goes_on(tmp_path: Path) -> None:
    part = Part(tmp_path / "part.json", "cpu", True, tmp_path, 10.0)
    for error in (RuntimeError("no such kernel"), SystemExit("no server"), ModuleNotFoundError("No module named 'peer'")):
        with part.guarded(type(error).__name__):
            raise error
    part.note("a/b", 1.5)
    found = json.loads(part.path.read_text())
    assert found["RuntimeError"] == {"failed": "RuntimeError: no such kernel"} and found["SystemExit"] == {
        "failed": "SystemExit: no server"
    }
    assert found["ModuleNotFoundError"] == {"missing": "No module named 'peer'"} and found["a"] == {"b": 1.5}


def test_a_part_out_of_time_is_ended(tmp_path: Path) -> None:
    options = argparse.Namespace(output=tmp_path, device="cpu", small=True)
    assert "not done after" in child(options, "ceilings", tmp_path, 0.02)["failed"]


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--output", str(tmp_path / "out"), *options]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def test_a_small_run(tmp_path: Path) -> None:
    done = run(tmp_path, "--small", "--only", "ceilings,attention")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["machine"] and all(check["holds"] for check in found["checks"])
    cases = {
        kernel: {heads: set(by_case) for heads, by_case in found["parts"]["attention"][kernel].items()}
        for kernel in ("onehead", "sdpa", "flex")
    }
    assert cases["onehead"] == {"4x32": {"1x64", "3x128"}, "3x16": {"1x64", "3x128"}}
    assert cases["sdpa"] == cases["flex"] == {"4x32": {"3x128"}, "3x16": {"3x128"}}
    assert (tmp_path / "out" / "gpu.png").stat().st_size > 10_000
    assert "onehead 4x32 3x128" in done.stdout


def test_options_that_cannot_be_are_named(tmp_path: Path) -> None:
    assert "add --small" in run(tmp_path).stderr
    assert "no 'kernel'" in run(tmp_path, "--small", "--only", "kernel").stderr
