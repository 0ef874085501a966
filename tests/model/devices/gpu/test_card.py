"""A GPU's life where there is none: torch.cuda is replaced at its boundary. Refusals, words for
people, and errors that end an engine.
"""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.devices import find_device
from model.devices.gpu import card
from model.devices.gpu.device import GpuDevice
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import OptionError
from model.step import Row, Sample, Sampling, StepPlan
from tests.model.runner.test_overlapped import MAX_CONTEXT, PAGE, Launched
from tests.model.test_decoder import CPU, finish, make_core, make_pool
from tests.support.checkpoints import SHAPES, make_checkpoint
from tests.support.listed_backend import ListedReference
from tests.support.recording_stream import RecordingStream
from tests.support.submitting import submit

GIB = 2**30
ECC = "CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA`"
DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC "
    "version:  gcc version 12.2.0\n"
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A machine with NVIDIA's driver and a build of torch for CUDA, which finds `fake.count`
    cards.
    """
    fake = SimpleNamespace(
        count=0, error="No CUDA GPUs are available", memory=(GIB, 80 * GIB), reserved=20 * GIB
    )

    def init() -> None:
        if not fake.count:
            raise RuntimeError(fake.error)

    driver = tmp_path / "version"
    driver.write_text(DRIVER)
    monkeypatch.setattr(card, "DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    for name, replacement in (
        ("is_available", lambda: fake.count > 0),
        ("init", init),
        ("mem_get_info", lambda device: fake.memory),
        ("memory_reserved", lambda device: fake.reserved),
        ("get_device_properties", lambda device: properties),
    ):
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.delenv(card.VISIBLE, raising=False)
    return fake


@pytest.mark.parametrize(
    ("visible", "words"),
    [
        ("", "CUDA_VISIBLE_DEVICES is '', which hides every GPU; leave it out, or name a card"),
        ("-1", "CUDA_VISIBLE_DEVICES is '-1', which hides every GPU"),
        (
            "7",
            r"CUDA_VISIBLE_DEVICES is '7', and no such card is there \(No CUDA GPUs are "
            r"available\); `nvidia-smi -L` lists",
        ),
        (None, "no GPU can be used: No CUDA GPUs are available; for the CPU, --engine.device cpu"),
    ],
)
def test_a_gpu_that_cannot_be_seen_is_refused_with_the_reason(
    fake: Any, visible: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv(card.VISIBLE, visible)
    with pytest.raises(OptionError, match=words):
        find_device("cuda")
    if visible in ("7", None):  # A mistake or an old driver, which a slow server would hide.
        with pytest.raises(OptionError, match=r"engine\.device is auto, and no GPU can be used"):
            find_device("auto")
    else:
        assert find_device("auto").name == "cpu"
    fake.count = 1
    assert find_device("auto").name == find_device("cuda").name == "cuda"


def test_the_reason_is_that_of_the_build_or_of_the_driver(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(card.VISIBLE, "0")
    monkeypatch.setattr(card, "DRIVER", Path("/nowhere"))
    fake.error = "Found no NVIDIA driver on your system.\nPlease check"
    with pytest.raises(
        OptionError,
        match=r"no GPU can be used: Found no NVIDIA driver on your system\.; for the CPU",
    ):
        find_device("cuda")
    assert find_device("auto").name == "cpu", (
        "a machine without a driver has no card that was meant"
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(OptionError, match="is built for CPUs; install its build for CUDA"):
        find_device("cuda")


def test_a_card_or_machine_without_what_kernels_need_is_refused(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.count = 1
    monkeypatch.setattr("model.devices.gpu.device.find_spec", lambda _: True)
    monkeypatch.setattr("sysconfig.get_paths", lambda _: {"include": str(tmp_path)})
    monkeypatch.setattr(card, "which", lambda name: name if name == "gcc" else None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(OptionError, match=r"Python's headers \(.*Python\.h\) cannot be found"):
        find_device("auto")
    (tmp_path / "Python.h").write_text("")
    assert find_device("auto").name == "cuda"
    monkeypatch.setattr(card, "which", lambda _: None)
    with pytest.raises(OptionError, match="a C compiler cannot be found; install gcc"):
        find_device("cuda")
    old = SimpleNamespace(name="Tesla T4", major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: old)
    with pytest.raises(OptionError, match=r"Tesla T4 has compute capability 7\.5, expected 8\.0"):
        find_device("auto")


@pytest.mark.usefixtures("fake")
def test_a_card_by_name_and_whose_its_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = GpuDevice()
    assert (
        device.description()
        == "NVIDIA H100 80GB HBM3 (compute capability 9.0, driver 580.95.05, CUDA 13.0)"
    )
    assert device.memory_in_words() == (
        "of the GPU's memory 1.00 GiB of 80.00 GiB are free; this process has taken 20.00 GiB, "
        "other processes and CUDA itself 59.00 GiB"
    )
    monkeypatch.setattr(card, "DRIVER", Path("/nowhere"))
    assert device.description() == "NVIDIA H100 80GB HBM3 (compute capability 9.0, CUDA 13.0)"


def test_a_cache_that_does_not_fit_says_who_has_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(SHAPES[1], tmp_path)
    decoder = load_decoder(tmp_path, read_spec(tmp_path), torch.float32, CPU)
    device = find_device("cpu")
    monkeypatch.setattr(device, "memory_in_words", lambda: "another process has it")
    options = EngineOptions("cpu", "float32", 1, PAGE, None, 1.0, MAX_CONTEXT, 4, 64)
    with pytest.raises(
        MemoryError, match=r"cache\.memory allows 0 pages; .* bytes; another process has it"
    ):
        ModelRunner.over(
            decoder,
            device,
            EngineOptions("cpu", "float32", 1, PAGE, None, 1000.0, MAX_CONTEXT, 4, 64),
        )
    monkeypatch.setattr(
        "model.runner.runner._backend",
        lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")),
    )
    with pytest.raises(
        MemoryError, match=r"cannot be had; another process has it; lower cache\.pages"
    ):
        ModelRunner.over(decoder, device, options)


# --- a device that breaks


class Broken:
    """torch.cuda's current stream on a card with an error, if there is `error`."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def query(self) -> bool:
        if self.error:
            raise torch.AcceleratorError(self.error)
        return True


def test_a_broken_card_is_told_whatever_error_a_library_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, broken = GpuDevice(), Broken(ECC)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: broken)
    expected = (
        "the GPU can compute no more in this process (CUDA error: uncorrectable ECC error "
        "encountered); lines with Xid"
    )
    for error in (
        torch.AcceleratorError(ECC),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"),
        ValueError("no tokens"),
    ):
        assert device.failure(error).startswith(expected)
    broken.error = ""
    assert (
        device.failure(ValueError("no tokens"))
        == device.failure(RuntimeError("a kernel of ours"))
        == ""
    )
    assert device.failure(torch.AcceleratorError(ECC)).startswith(expected)


def raising(error: Exception) -> None:
    raise error


def test_lack_of_memory_on_a_broken_card_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that cannot allocate says so, and in halves of halves every request would fail. The
    card's own error ends the engine.
    """
    runner: Any = make_core(make_checkpoint(SHAPES[1], tmp_path)).runner
    monkeypatch.setattr(
        runner, "_launch", lambda plan: raising(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    )
    plan = StepPlan((Row(0, [5], 0, [], Sample(Sampling(), (), ())),))
    with pytest.raises(MemoryError):
        runner.launch(plan)
    monkeypatch.setattr(
        runner.device, "raise_if_broken", lambda: raising(torch.AcceleratorError(ECC))
    )
    with pytest.raises(torch.AcceleratorError):
        runner.launch(plan)


class Refusing(RecordingStream):
    """Some captures fail with this error: the first ones, or the first after `num_taken`."""

    def __init__(self, error: Exception, num_refused: int, num_taken: int = 0) -> None:
        super().__init__()
        self.error, self.num_refused, self.num_taken = error, num_refused, num_taken

    def capture(self, work: Any) -> Any:
        if self.num_taken:
            self.num_taken -= 1
        elif self.num_refused:
            self.num_refused -= 1
            raise self.error
        return super().capture(work)


def make_launched(folder: Path, stream: Refusing) -> Launched:
    """A runner of a new checkpoint whose steps this stream captures."""
    make_checkpoint(SHAPES[1], folder)
    decoder = load_decoder(folder, read_spec(folder), torch.float32, CPU)
    pool = make_pool(decoder, 61, PAGE)
    backend = ListedReference(pool, decoder.spec.attention_scale, decoder.spec.num_query_heads)
    return Launched(decoder, pool, backend, find_device("cpu"), stream, 64, 64)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("operation not permitted when stream is capturing"),
        ValueError("not to be captured"),
    ],
)
def test_steps_that_cannot_be_captured_are_served(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The largest ones are captured first: here steps of 64 and 48 rows."""
    outputs = []
    for num_refused, num_graphs in ((0, 9), (2, 7), (99, 0)):
        runner = make_launched(tmp_path / str(num_refused), stream := Refusing(error, num_refused))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "onehead.engine"):
            assert runner.capture(PAGE) == runner.num_graphs == num_graphs
        core = make_core_of(runner)
        submit(core.scheduler, 0, [5, 6, 7], 12, Sampling(temperature=0.0))
        outputs.append(finish(core))
        assert bool(stream.num_replays) is bool(num_graphs)
        warnings = [record.getMessage() for record in caplog.records]
        missing = min(num_refused, 9)
        assert (
            not missing
            or warnings[-1]
            == f"{missing} CUDA graphs are missing; steps that fit no other are launched kernel by "
            "kernel, which is slower"
        )
        assert len(warnings) == (2 if missing else 0) and (not missing or str(error) in caplog.text)
    assert outputs[0] == outputs[1] == outputs[2]


def make_core_of(runner: ModelRunner) -> Any:
    from server.engine.core import EngineCore
    from server.engine.scheduler import Limits, Scheduler

    return EngineCore(Scheduler(Limits(60, runner.pool.layout, MAX_CONTEXT, 8, 64)), runner)


def test_a_device_that_breaks_in_a_capture_ends_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_launched(tmp_path, Refusing(RuntimeError("CUDA error: unknown error"), 1))
    broken = partial(raising, torch.AcceleratorError(ECC))
    monkeypatch.setattr(runner.device, "raise_if_broken", broken)
    with pytest.raises(torch.AcceleratorError, match="ECC"):
        runner.capture(PAGE)


def test_memory_that_is_short_in_a_capture_leaves_the_graphs_there_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the largest steps, which serve smaller ones."""
    stream = Refusing(torch.OutOfMemoryError("CUDA out of memory"), 1, 2)
    runner = make_launched(tmp_path, stream)
    with caplog.at_level(logging.WARNING, "onehead.engine"):
        assert runner.capture(PAGE) == 2
    assert "memory is short: 2 CUDA graphs" in caplog.text
    core = make_core_of(runner)
    submit(core.scheduler, 0, [5, 6, 7], 12, Sampling(temperature=0.0))
    finish(core)
    assert stream.num_replays == 12
