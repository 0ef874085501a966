"""The GPU's bench where there is none: its arithmetic, its bars, the code that only a GPU runs over
a stand-in, and a small run of it.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import launch_costs
from bench.gpu import run as gpu
from bench.gpu.archive import Archive, read
from bench.gpu.attention import PAGE_SIZE, Problem, flashinfer, flex, layers_of, sdpa
from bench.gpu.bars import bars, full_cases
from bench.gpu.common import CASES, HEADS, SIZES, WORKLOADS, Part, captured, median_seconds
from bench.gpu.floor import Ceilings, Shape, nano_vllm, step_seconds, workload_seconds
from bench.gpu.run import child
from bench.gpu.serve import fill, steady
from bench.gpu.step import GREEDY, kinds, plan_of, waiting
from model.checkpoint.families import read_spec
from model.decoder import meta_decoder
from model.step import SampledToken, SampleError
from server.config import EMBEDDED_MODEL
from tests.support.drawing import draw
from tests.support.listed_backend import ListedReference
from tests.support.paths import ROOT

H200 = Ceilings(4.8e12, 790e12)
STARCODER_1B = Shape(1_120_430_080, 24, 16, 128)
SHAPES = {
    "StarCoderBase-1B": STARCODER_1B,
    "StarCoder 15B": Shape(15_465_000_000, 40, 48, 128),
    "Falcon-7B": Shape(6_920_000_000, 32, 71, 64),
    "Gemma-2B": Shape(2_505_000_000, 18, 8, 256),
}


@pytest.mark.parametrize(
    ("model", "context", "worked_out"),
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
def test_the_floor_of_a_step(model: str, context: int, worked_out: tuple[float, ...]) -> None:
    """Milliseconds at 1, 32 and 256 sequences, worked out beforehand for the vendor's figures."""
    found = [step_seconds(SHAPES[model], batch, context, H200) * 1e3 for batch in (1, 32, 256)]
    assert found == pytest.approx(worked_out, abs=0.006)


def test_the_workload_and_its_floor() -> None:
    workload = nano_vllm(*WORKLOADS[False])
    lengths = [len(prompt) for prompt in workload.prompts]
    assert (len(lengths), workload.num_tokens, sum(lengths)) == (256, 133_966, 142_827)
    seconds = workload_seconds(STARCODER_1B, lengths, workload.outputs, H200)
    assert seconds == pytest.approx(1.21, abs=0.006)
    assert workload_seconds(
        STARCODER_1B, lengths, workload.outputs, Ceilings(2.039e12, 312e12)
    ) == pytest.approx(2.91, abs=0.006)


def test_the_model_has_starcoderbase_1b_s_shape(tmp_path: Path) -> None:
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text()) | SIZES[False]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    streamed = (
        sum(parameter.numel() for parameter in meta_decoder(spec).parameters())
        - spec.max_positions * spec.hidden_size
    )
    assert streamed == STARCODER_1B.streamed
    assert spec.kv_bytes_per_token(2) == STARCODER_1B.key_bytes == 12_288


# --- the bars


def attention(rate: float, latency: float) -> dict[str, Any]:
    """Of bfloat16, everything at this rate but the call that is judged by its latency."""
    found: dict[str, Any] = {}
    for heads, head_dim in HEADS:
        sizes = {f"{batch}x{context}": 4.0 * batch * context * head_dim for batch, context in CASES}
        found[f"{heads}x{head_dim}"] = {
            case: {"seconds": size / rate, "bytes": size, "graph": True}
            for case, size in sizes.items()
        }
        found[f"{heads}x{head_dim}"]["1x1024"]["seconds"] = latency
    return found


WHOLE: dict[str, Any] = {
    "checkpoint": {
        "shape": {
            "streamed": 1_120_430_080,
            "layers": 24,
            "heads": 16,
            "head_dim": 128,
            "itemsize": 2,
        },
        "workload": WORKLOADS[False],
    },
    "ceilings": {"copy": {"rate": 4.3e12}, "read": {"rate": 4.4e12}, "matmul": {"rate": 790e12}},
    "ceilings_after": {
        "copy": {"rate": 4.2e12},
        "read": {"rate": 4.3e12},
        "matmul": {"rate": 760e12},
    },
    "attention": {"onehead": attention(0.86 * 4.3e12, 7.9e-6), "sdpa": attention(1e12, 9e-6)},
    "step": {
        "kernels": "triton",
        "256x2048": {"seconds": 3e-3},
        "waits": {"asked": True, "kinds": ["greedy", "mask"], "waiting": {}},
    },
    "serve": {
        "engine": {"output_tokens_per_second": 65_000.0, "rounds": [{"failed": 0}]},
        "http": {"output_tokens_per_second": 60_000.0, "rounds": [{"failed": 0}]},
        "host": {"host": 0.9e-3, "step": 3e-3, "sequences": 256, "overlapped": 0.98},
        "gpu": {"seconds": 2.8e-3},
    },
    "peers": {
        "static": {"output_tokens_per_second": 20_000.0},
        "continuous": {"output_tokens_per_second": 9_000.0},
    },
    "numerics": {
        "logits": {"float32": 1e-4, "bfloat16": 0.3, "reference_bfloat16": 0.2, "largest": 14.0},
        "engine": {"differ": 0, "requests": 32, "first_difference": None},
    },
}
MUTANTS: dict[str, tuple[Any, ...]] = {
    "ceilings_after/matmul/rate": (740e12, "copy and matrix product at the end"),
    "attention/onehead/16x128/256x2048/seconds": (1e-4, "85% of the copy"),
    "attention/onehead/16x128/1x1024/seconds": (10.6e-6, "10.5 us for 1x1024"),
    "attention/onehead/71x64/256x8192": (
        {"failed": "RuntimeError"},
        "every part ran whole",
        "attention of 71x64: 85%",
    ),
    "step/waits/waiting": (
        {"mask": "called a synchronizing CUDA operation"},
        "a launch wait for the GPU",
    ),
    "serve/engine/output_tokens_per_second": (50_000.0, "engine: 55% of the floor"),
    "serve/http/output_tokens_per_second": (45_000.0, "http: 50% of the floor"),
    "serve/host/host": (1.1e-3, "under 1 ms"),
    "serve/host/overlapped": (0.94, "the host is overlapped"),
    "peers/static/output_tokens_per_second": (65_001.0, "faster than transformers, static"),
    "peers/continuous/output_tokens_per_second": (65_001.0, "faster than transformers, continuous"),
    "peers/static": ({"output_tokens_per_second": 0.0}, "faster than transformers, static"),
    "peers/continuous/failed": ("status 1", "every part ran whole"),
    "numerics/logits/float32": (2e-3, "float32 logits"),
    "numerics/logits/bfloat16": (0.5, "bfloat16 logits"),
    "numerics/engine/differ": (1, "engine.deterministic"),
    "numerics/engine": ({"failed": "MemoryError"}, "every part ran whole", "engine.deterministic"),
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
    place[last], *words = MUTANTS[path]
    assert [word in what for word, what in zip(words, missed(found), strict=True)] == [True] * len(
        words
    )


def test_what_cannot_be_judged_costs_no_other_bar() -> None:
    found = deepcopy(WHOLE)
    found["serve"]["host"]["host"] = "soon"
    assert missed(found) == ["service: can be judged"]
    assert (
        len(bars(found, list(WHOLE), judged=True)) == len(bars(WHOLE, list(WHOLE), judged=True)) - 3
    )


def test_a_floor_that_nobody_can_beat_and_a_share_of_the_copy() -> None:
    checks = {check.what: check.found for check in bars(WHOLE, list(WHOLE), judged=True)}
    workload = nano_vllm(*WORKLOADS[False])
    seconds = workload_seconds(
        STARCODER_1B, list(map(len, workload.prompts)), workload.outputs, Ceilings(4.4e12, 790e12)
    )
    assert (
        f"of {workload.num_tokens / seconds:,.0f} tokens/s"
        in checks["engine: 55% of the floor's rate"]
    )
    assert (
        "256x2048 86% (of the read's 84%)"
        in checks[
            "attention of 16x128: 85% of the copy's bandwidth from 200 MB on, without writing keys"
        ]
    )


def test_cases_of_which_bandwidth_is_asked() -> None:
    assert full_cases(128) == ["32x32768", "256x2048", "256x8192"] and full_cases(64) == [
        "32x32768",
        "256x8192",
    ]


def test_only_what_was_to_run_is_judged() -> None:
    found = {"ceilings": WHOLE["ceilings"], "attention": WHOLE["attention"]}
    assert [check.holds for check in bars(found, ["ceilings", "attention"], judged=True)] == [
        True
    ] * 9
    assert len(bars(WHOLE, list(WHOLE), judged=False)) == 4


@pytest.mark.parametrize("part", WHOLE)
def test_what_was_not_measured_is_missed(part: str) -> None:
    found = {name: figures for name, figures in WHOLE.items() if name != part}
    checks = [check for check in bars(found, list(WHOLE), judged=True) if not check.holds]
    assert checks and all("not measured" in check.found for check in checks)


# --- what only a GPU runs, over a stand-in


class FakeEvent:
    """Reads a clock that a call moves on. Its device is `behind` for as long as nobody has
    waited.
    """

    now = 0.0
    behind = True

    def __init__(self, enable_timing: bool = False) -> None:
        self.done = not FakeEvent.behind

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        time.sleep(0.005)
        self.done = True

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at


class FakeCapture:
    """A stream, a graph, and the contexts of both."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None:
        FakeCapture.on = "the capture's"

    on = "ours"

    def wait_stream(self, _: Any) -> None: ...

    def replay(self) -> None:
        FakeEvent.now += 5.0


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_stream(_: Any) -> None:
        FakeCapture.on = "ours"

    fakes: dict[str, Any] = {
        name: FakeCapture for name in ("Stream", "stream", "CUDAGraph", "current_stream")
    }
    fakes |= {
        "graph": lambda _, stream: FakeCapture(),
        "Event": FakeEvent,
        "synchronize": lambda: None,
        "set_stream": set_stream,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)


@pytest.mark.usefixtures("fake_cuda")
def test_calls_are_timed_by_events_behind_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def flush() -> None:
        FakeEvent.now += 100.0
        log.append("flush")

    def call() -> None:
        FakeEvent.now += 3.0
        log.append("call")

    monkeypatch.setattr(torch, "zeros", lambda *_, **__: SimpleNamespace(sum=flush))
    assert median_seconds(call, "cuda", 4, 0.0) == pytest.approx(3e-3)
    assert log == ["call"] * 3 + ["flush", "call"] * 4
    assert median_seconds(captured(call), "cuda", 4, 0.0) == pytest.approx(5e-3)
    log.clear()
    began = time.perf_counter()
    assert median_seconds(call, "cuda", 1, 0.02) == pytest.approx(3e-3)
    assert time.perf_counter() - began > 0.02 and log[3:5] == ["flush"] * 2  # Its clocks rise.


@pytest.mark.usefixtures("fake_cuda")
def test_a_capture_that_fails_leaves_us_on_our_stream() -> None:
    def call() -> None:
        raise RuntimeError("not to be captured")

    with pytest.raises(RuntimeError, match="not to be captured"):
        captured(call)
    assert FakeCapture.on == "ours"


class FakeFlight:
    def __init__(self, drawn: SampledToken | SampleError) -> None:
        self._drawn = drawn

    def result(self) -> Any:
        assert FakeRunner.mode == "default"
        return SimpleNamespace(drawn=(self._drawn,))


class FakeRunner:
    """Waits for the device, which an error says, or the failure of a row whose draw got that
    error.
    """

    mode = "default"

    def __init__(self, how: str) -> None:
        self._how = how

    def run(self, _: Any) -> None:
        assert FakeRunner.mode == "default"

    def launch(self, _: Any) -> FakeFlight:
        assert FakeRunner.mode == "error"
        if self._how == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return FakeFlight(
            SampleError("an internal error") if self._how == "row" else SampledToken(1, 0.0)
        )


def test_launches_that_wait_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: setattr(FakeRunner, "mode", mode)
    )
    plan = plan_of(PAGE_SIZE, [GREEDY])
    assert [waiting(FakeRunner(how), plan) for how in ("", "error", "row")] == [
        None,
        "called a synchronizing CUDA operation",
        "an internal error",
    ]
    assert FakeRunner.mode == "default" and len(kinds(100)["together"]) == len(kinds(100)) - 1


def test_every_kind_of_request_draws() -> None:
    """What could draw nothing would be told as one that waits."""
    samples = kinds(100)["together"]
    assert all(
        isinstance(drawn, SampledToken) for drawn in draw(torch.randn(len(samples), 100), samples)
    )


@pytest.mark.parametrize("behind", [True, False])
def test_waiting_is_not_the_host_s_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """The real engine and worker over a stand-in's stream: 5 ms of every step are the device's."""
    # Kernels are imported in tests/triton alone, under its interpreter.
    monkeypatch.setattr(launch_costs, "create_backend", lambda _, *sizes: ListedReference(*sizes))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "behind", behind)
    monkeypatch.setattr(launch_costs.Done, "mark", lambda _: FakeEvent())
    part = Part(tmp_path / "gpu.zip", "part", "cpu", True, tmp_path, 100.0)
    wait = FakeEvent.synchronize
    worker = launch_costs.make_worker(len(part.workload.prompts), 256)
    fill(part, worker.core)
    found = steady(part, worker)
    assert found["sequences"] == 6 and found["overlapped"] == (1.0 if behind else 0.0)
    assert found["step"] > 0.005 and found["host"] < found["step"] - 0.004
    assert FakeEvent.synchronize is wait


class FakeWrapper:
    """FlashInfer's, by its documentation: indptr, indices and last page's length; 4-dimensional
    pages.
    """

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert workspace.dtype is torch.uint8 and layout == "NHD" and use_tensor_cores

    def plan(
        self, *lists_and_sizes: Any, q_data_type: Any, kv_data_type: Any, sm_scale: float
    ) -> None:
        self.ends, self.order, self.last, *sizes = lists_and_sizes
        assert all(x.dtype is torch.int32 for x in (self.ends, self.order, self.last)) and sizes[
            1:
        ] == [1, 32, PAGE_SIZE]
        self.scale = sm_scale

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        outputs = []
        for i, q_Hd in enumerate(q):
            order = self.order[self.ends[i] : self.ends[i + 1]].long()
            keys, values = (
                x[order, :, 0].flatten(0, 1)[: (len(order) - 1) * PAGE_SIZE + self.last[i]]
                for x in pages
            )
            outputs.append((q_Hd @ keys.T * self.scale).softmax(-1) @ values)
        return torch.stack(outputs)


def test_flashinfer_is_asked_for_what_ours_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=FakeWrapper)
    )
    monkeypatch.setattr("bench.gpu.attention.backend_name", lambda *_: "reference")
    problem = Problem(4, 32, [70, 64, 1], torch.float32, "cpu")
    torch.testing.assert_close(problem.ours()(0), flashinfer(problem)(0))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("heads", [4, 3])
def test_peers_compute_what_ours_does(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """Over pages in their order, as these peers have them; after ours has written the last keys."""
    monkeypatch.setattr("bench.gpu.attention.backend_name", lambda *_: "reference")
    monkeypatch.setattr(
        "bench.gpu.attention.random",
        SimpleNamespace(Random=lambda _: SimpleNamespace(sample=lambda pages, _: pages)),
    )
    problem = Problem(heads, 16, [128, 128], torch.float32, "cpu")
    expected = problem.ours()(0).view(2, heads, 16)
    for call in (problem.attending(), sdpa(problem), flex(problem)):
        torch.testing.assert_close(call(0).view(2, heads, 16), expected)


def test_a_call_is_timed_over_layers_with_keys_of_their_own() -> None:
    sizes = [
        4 * batch * context * 128
        for batch, context in ((1, 1024), (32, 8192), (256, 2048), (256, 8192))
    ]
    assert list(map(layers_of, sizes)) == [24, 14, 7, 1]


# --- peers


def test_continuous_batching_s_options_by_either_version_s_names(tmp_path: Path) -> None:
    peers = pytest.importorskip("bench.gpu.peers", exc_type=ImportError)
    shared = "num_blocks", "max_batch_tokens", "max_requests_per_batch", "allow_block_sharing"
    old = make_dataclass("Old", [*shared, "block_size"])
    new = make_dataclass("New", [*shared, "page_size", "block_size"])
    part = Part(tmp_path / "gpu.zip", "part", "cuda", False, tmp_path, 10.0)
    expected = {
        "num_blocks": 2304,
        "max_batch_tokens": 4096,
        "max_requests_per_batch": 256,
        "allow_block_sharing": False,
    }
    assert peers.sizes(part, old) == expected | {"block_size": 256}
    assert peers.sizes(part, new) == expected | {"page_size": 256}


class FakeManager:
    """Finishes the first request, and has so many tokens of another when it is cut."""

    def __init__(self, part: Part, told: bool) -> None:
        self._part, self._results = part, [SimpleNamespace(error=None, generated_tokens=[1] * 7)]
        request = SimpleNamespace(generated_len=lambda: 5)
        scheduler = SimpleNamespace(active_requests={"a": request, "b": request})
        self.batch_processor = SimpleNamespace(scheduler=scheduler) if told else None

    def add_request(self, *_: Any, **__: Any) -> None: ...

    def is_running(self) -> bool:
        return True

    def get_result(self, timeout: float) -> Any:
        self._part.seconds = 100.0 if self._results else 0.0
        return self._results.pop() if self._results else None


@pytest.mark.parametrize(
    ("told", "expected"), [(True, (10, 17)), (False, ("could not be counted", 7))]
)
def test_a_cut_counts_the_tokens_of_who_is_not_done(
    tmp_path: Path, told: bool, expected: tuple[Any, int]
) -> None:
    peers = pytest.importorskip("bench.gpu.peers", exc_type=ImportError)
    part = Part(tmp_path / "gpu.zip", "part", "cpu", True, tmp_path, 100.0)

    @contextmanager
    def context(**_: Any) -> Iterator[FakeManager]:
        yield FakeManager(part, told)
        assert part.found["continuous"]["finished"] == 1  # Noted before this ends.

    peers.continuous(part, SimpleNamespace(continuous_batching_context_manager=context))
    found = part.found["continuous"]
    assert (found["unfinished_tokens"], found["output_tokens"]) == expected and found[
        "requests"
    ] == 6


def test_generate_that_is_cut_counts_what_there_is(tmp_path: Path) -> None:
    peers = pytest.importorskip("bench.gpu.peers", exc_type=ImportError)
    part, calls = Part(tmp_path / "gpu.zip", "part", "cpu", True, tmp_path, 100.0), list[int]()

    def generate(ids: torch.Tensor, stopping_criteria: Any, **_: Any) -> torch.Tensor:
        calls.append(0)
        while not bool(stopping_criteria(ids, None).all()):
            ids, calls[-1] = torch.cat([ids, ids[:, :1]], dim=1), calls[-1] + 1
            if len(calls) == 2 and calls[-1] == 11:
                part.seconds = 0.0
        return ids

    peers.static(part, SimpleNamespace(generate=generate))
    found, outputs = part.found["static"], part.workload.outputs
    assert calls == [8, 11] and (found["steps"], found["asked_steps"]) == (11, max(outputs))
    assert (
        found["output_tokens"]
        == sum(min(output, 11) for output in outputs)
        < part.workload.num_tokens
    )


# --- parts


def test_what_fails_is_written_down_and_the_rest_goes_on(tmp_path: Path) -> None:
    part = Part(tmp_path / "gpu.zip", "part", "cpu", True, tmp_path, 10.0)
    for error in (
        RuntimeError("no such kernel"),
        SystemExit("no server"),
        ModuleNotFoundError("No module named 'peer'"),
    ):
        with part.guarded(type(error).__name__):
            raise error
    part.note("a/b", 1.5)
    found = Archive(part.archive).record["parts"]["part"]
    assert found["RuntimeError"] == {"failed": "RuntimeError: no such kernel"} and found[
        "SystemExit"
    ] == {"failed": "SystemExit: no server"}
    assert found["ModuleNotFoundError"] == {"missing": "No module named 'peer'"} and found["a"] == {
        "b": 1.5
    }


def test_a_part_out_of_time_is_ended(tmp_path: Path) -> None:
    options = argparse.Namespace(output=tmp_path, device="cpu", small=True)
    assert "not done after" in child(options, "ceilings", tmp_path, 0.02)["failed"]


def test_what_a_part_that_crashed_leaves_behind_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part whose server goes on."""
    script = tmp_path / "part.py"
    script.write_text(
        "import subprocess, sys\nprint(subprocess.Popen(['sleep', '60']).pid, "
        "flush=True)\nsys.exit('crashed')\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **how: popen([sys.executable, str(script)], **how)
    )
    options = argparse.Namespace(output=tmp_path, device="cuda", small=True)
    assert child(options, "ceilings", tmp_path, 30.0)["failed"] == "status 1: crashed"
    server, end = int((tmp_path / "ceilings.log").read_text().split()[0]), time.monotonic() + 10
    while lives(server):
        assert time.monotonic() < end
        time.sleep(0.01)


def lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_a_picture_that_fails_costs_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(*_: Any) -> None:
        raise ValueError("no axes")

    monkeypatch.setattr(gpu, "draw", draw)
    monkeypatch.setattr(gpu, "find_spec", lambda _: True)
    archive = Archive(tmp_path / "gpu.zip")
    archive.record["parts"] = WHOLE
    archive.write()
    assert gpu.conclude(archive.path, WHOLE, list(WHOLE), judged=True) == 0
    members = read(archive.path)
    assert (
        json.loads(members["gpu.json"])["parts"]["ceilings"] == WHOLE["ceilings"]
        and b"engine: 55% of the floor" in members["report.txt"]
    )
    assert "the picture: ValueError: no axes" in capsys.readouterr().err


WRITER = """
import sys
from pathlib import Path
from bench.gpu.common import Part

folder = Path(sys.argv[1])
part = Part(folder / "gpu.zip", "part", "cpu", True, folder, 100.0)
for number in range(10**6):
    part.note(f"figures/{number}", "x" * 100)
    print(number, flush=True)
"""


def test_an_archive_whose_writer_is_killed_holds_what_was_noted(tmp_path: Path) -> None:
    """SIGKILL at random moments: every figure that the writer has reported as kept is there, and
    every member is whole.
    """
    rng = random.Random(0)
    counts = []
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        command = [sys.executable, "-c", WRITER, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "0\n"
            time.sleep(rng.uniform(0.0, 0.2))
            writer.kill()
            kept = [0, *map(int, writer.stdout.read().split())]
        found = Archive(folder / "gpu.zip").record["parts"]["part"]["figures"]
        assert set(map(str, kept)) <= set(found) and len(found) <= len(kept) + 1
        counts.append(len(found))
    assert max(counts) > 10


def test_an_archive_is_there_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that cannot be written, and a process that ends before the new archive takes the old
    one's place.
    """
    archive = Archive(tmp_path / "gpu.zip")
    archive.record["a"] = 1
    archive.write({"a.log": b"one"})

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    archive.record["a"] = 2
    for owner, name in ((os, "replace"), (zipfile.ZipFile, "writestr")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, killed)
            archive.write({"a.log": b"two"})
        assert Archive(archive.path).record == {"a": 1} and read(archive.path)["a.log"] == b"one"
    archive.write()
    assert Archive(archive.path).record == {"a": 2} and read(archive.path)["a.log"] == b"two"


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "bench.gpu",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "out"),
        *options,
    ]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def test_options_that_cannot_be_are_named(tmp_path: Path) -> None:
    assert "add --small" in run(tmp_path).stderr
    assert "no 'kernel'" in run(tmp_path, "--small", "--only", "kernel").stderr
