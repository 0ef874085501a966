"""What the parts share: their record in the archive, their clock, the checkpoint of random weights,
and an engine over it.

Invariant: the archive holds every figure a part has found so far, and what went wrong; if the
process is killed, no more is lost. Kernels, steps and engines need torch, Triton, NumPy, msgspec
and safetensors; what else a part needs it imports where it needs it. torch is imported where it is
needed: the clients of the service's part do without.
"""

import json
import os
import shutil
import statistics
import subprocess
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.archive import Archive
from bench.gpu.floor import Shape, Workload, nano_vllm
from cache.layout import CacheLayout, pages_for
from model.checkpoint.families import read_spec
from tests.support.checks import Found
from tests.support.paths import EMBEDDED, MODELS

if TYPE_CHECKING:
    import torch

    from server import protocol
    from server.engine.core import EngineCore

FLUSH_BYTES = 2**29
"""Read before each timed call. Many times an L2, and long enough for the host to have launched what
follows."""
WARMING_SECONDS = 0.05
"""Of flushes before a timing: a device that was idle raises its clocks only when it works."""
ROUNDS = 5
"""Rounds of a timing: their median is the figure, their least and most its spread."""
SPECS = [
    read_spec(MODELS / name) for name in ("starcoderbase-1b", "starcoder", "falcon-7b", "gemma-2b")
]
HEADS = tuple((spec.num_query_heads, spec.head_dim) for spec in SPECS)
"""Query heads, and columns of each."""
CASES = ((1, 1024), (1, 8192), (32, 2048), (32, 8192), (32, 32768), (256, 2048), (256, 8192))
"""Of the decode kernel: sequences, and keys of each."""
VERSIONS = "torch", "triton", "numpy", "transformers", "flashinfer-python"
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu,memory.total",
    "--format=csv",
)
SIZES: dict[bool, dict[str, Any]] = {
    False: json.loads((MODELS / "starcoderbase-1b" / "config.json").read_text(encoding="utf-8")),
    True: {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 128,
        "vocab_size": 12288,
        "n_positions": 512,
    },
}
"""StarCoderBase-1B's, and of the small form."""
WORKLOADS = {False: (256, 100, 1024), True: (6, 8, 40)}
"""Requests, and the least and the most tokens of a prompt and of an output."""


@dataclass
class Part:
    """What a part is told, and its record."""

    archive: Path
    name: str
    device: str
    small: bool
    scratch: Path
    """A folder of the run's own, with the checkpoint, and the log of this part."""
    seconds: float
    """After which it is killed."""
    began: float = field(default_factory=time.perf_counter)
    found: Found = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._archive = Archive(self.archive)
        self._archive.record.setdefault("parts", {})[self.name] = self.found

    @property
    def log(self) -> Path:
        """What the part prints."""
        return self.scratch / f"{self.name}.log"

    def note(self, name: str, value: Any) -> None:
        """Keeps a figure; `name` may lead through several levels: "onehead/16x128/1x1024"."""
        *outer, last = name.split("/")
        place = self.found
        for step in outer:
            place = place.setdefault(step, {})
        place[last] = value
        self._archive.write({self.log.name: self.log.read_bytes()} if self.log.exists() else {})

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """What fails within, or is not installed, is written down, and the rest goes on."""
        try:
            yield
        except ModuleNotFoundError as error:
            self.note(name, {"missing": str(error)})
        except (Exception, SystemExit) as error:
            words = f"{type(error).__name__}: {error}"
            self.note(
                name, {"failed": words if len(words) < 500 else f"{words[:200]} ... {words[-300:]}"}
            )

    @property
    def left(self) -> float:
        """Seconds until it is killed, less some to write and end."""
        return self.began + self.seconds - time.perf_counter() - 5.0

    @property
    def checkpoint(self) -> Path:
        return self.scratch / "checkpoint"

    @property
    def workload(self) -> Workload:
        return nano_vllm(*WORKLOADS[self.small])

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        return torch.float32 if self.device == "cpu" else torch.bfloat16


def versions(device: str) -> Found:
    """The device and the libraries."""
    import torch

    found: Found = {"device": device, "threads": torch.get_num_threads()}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name,
            "memory": properties.total_memory,
            "cuda": torch.version.cuda,
        }
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                NVIDIA_SMI, check=True, capture_output=True, text=True, timeout=20
            )
            found["nvidia-smi"] = done.stdout.strip().splitlines()
    return found


# --- time


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph: what it costs without the host."""
    import torch

    current, side, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        current.wait_stream(side)
        with torch.cuda.graph(graph, stream=side):
            call()
    finally:
        # A capture that fails may leave us on its stream.
        torch.cuda.set_stream(current)
        current.wait_stream(side)
    return graph.replay


def warm_up(flush: "torch.Tensor", seconds: float) -> None:
    """Keeps a GPU at work for so long."""
    import torch

    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        flush.sum()
        torch.cuda.synchronize()


def timed(
    call: Callable[[], object], part: Part, warming: float = WARMING_SECONDS, layers: int = 1
) -> Found:
    """Seconds of a call, or of each of its `layers`: the median of ROUNDS rounds, and the spread of
    these.
    """
    rounds = [
        median_seconds(call, part.device, 1 if part.small else 6, warming) / layers
        for _ in range(ROUNDS)
    ]
    return {"seconds": statistics.median(rounds), "spread": [min(rounds), max(rounds)]}


def median_seconds(
    call: Callable[[], object], device: str, repeats: int, warming: float = WARMING_SECONDS
) -> float:
    """Of a call after a flush of the L2: on a GPU between two events, else by the clock.

    The flush reads: lines that it wrote would be written back within the call's time.
    """
    import torch

    for _ in range(3 if device == "cuda" else 1):
        call()
    if device != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    warm_up(flush, warming)
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for begin, end in pairs:
        flush.sum()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in pairs)) / 1e3


LISTED = 24
"""Kernels of a breakdown."""


def by_kernel(call: Callable[[], object], count: int) -> Found:
    """Of `count` calls under a profiler: the device's seconds of one, and of each kernel and copy,
    the longest first, with their launches. 0 without a GPU. A profiler slows the host down for the
    rest of the process: what is timed comes before.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU]
    ) as profiler:
        for _ in range(count):
            call()
    events = [event for event in profiler.key_averages() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: -event.self_device_time_total)
    seconds = sum(float(event.self_device_time_total) for event in events) / 1e6 / count
    kernels: Found = {
        event.key[:90]: {
            "seconds": event.self_device_time_total / 1e6 / count,
            "calls": event.count / count,
        }
        for event in events[:LISTED]
    }
    return {
        "seconds": seconds,
        "calls": sum(event.count for event in events) / count,
        "kernels": kernels,
    }


# --- many checks at once


MOST_AT_ONCE = 12


def at_once(part: Part, checks: Sequence[Callable[[Part], object]]) -> None:
    """Runs checks and merges what they note. On a GPU several at once, each in a process, as most
    of their time is the compiler's; never what is timed.
    """
    if part.device == "cpu":
        for check in checks:
            check(part)
        return
    settings = part.device, part.small, part.scratch, part.seconds
    workers = max(1, min(MOST_AT_ONCE, (os.cpu_count() or 1) - 2))
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [
            pool.submit(_apart, check, number, *settings) for number, check in enumerate(checks)
        ]
        for future in as_completed(futures):
            with part.guarded(f"process {futures.index(future)}"):
                for name, value in _leaves(future.result()):
                    part.note(name, value)


def _apart(
    check: Callable[[Part], object], number: int, device: str, small: bool, scratch: Path,
    seconds: float,
) -> Found:  # fmt: skip
    part = Part(scratch / f"check-{number}.zip", "check", device, small, scratch, seconds)
    check(part)
    return part.found


def _leaves(found: Found) -> Iterator[tuple[str, Any]]:
    """What a check noted, by the names it used: a level of names holds dictionaries alone."""
    for name, value in found.items():
        if value and isinstance(value, dict) and all(isinstance(v, dict) for v in value.values()):
            for rest, leaf in _leaves(value):
                yield f"{name}/{rest}", leaf
        else:
            yield name, value


# --- the checkpoint and an engine over it


def make_checkpoint(part: Part) -> None:
    """A gpt_bigcode folder of random weights, made on the device: the embedded model's with other
    sizes. Its shape is noted.
    """
    import torch

    from commands.saving import save_decoder
    from model.checkpoint.families import read_spec
    from model.decoder import meta_decoder

    shutil.copytree(
        EMBEDDED, part.checkpoint, ignore=shutil.ignore_patterns("*.safetensors", "SHA256SUMS")
    )
    config = json.loads((part.checkpoint / "config.json").read_text()) | SIZES[part.small]
    (part.checkpoint / "config.json").write_text(json.dumps(config))
    spec = read_spec(part.checkpoint)
    add_tokens(part.checkpoint, spec.vocab_size)
    torch.manual_seed(0)
    decoder = meta_decoder(spec).to_empty(device=part.device)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    save_decoder(part.checkpoint, decoder, part.dtype, config)
    streamed = (
        sum(parameter.numel() for parameter in decoder.parameters())
        - spec.max_positions * spec.hidden_size
    )
    part.note(
        "shape",
        asdict(
            Shape(
                streamed, spec.num_layers, spec.num_query_heads, spec.head_dim, part.dtype.itemsize
            )
        ),
    )
    part.note("workload", WORKLOADS[part.small])


def add_tokens(folder: Path, vocab_size: int) -> None:
    """Gives every token that may be drawn a text. Only a server needs that: without its packages
    nothing is done.
    """
    if find_spec("tokenizers") is None:
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f" token{id}" for id in range(tokenizer.get_vocab_size(), vocab_size)])
    tokenizer.save(str(folder / "tokenizer.json"))


def pages_of(
    layout: CacheLayout, num_tokens: int, sequence: int = 0, longest: int = 0
) -> "list[array[int]]":
    """The pages of a sequence by group of layers, its own among sequences of at most `longest`
    tokens.
    """
    count = pages_for(num_tokens, layout.page_size)
    first, pages = sequence * layout.pages_per_block * pages_for(longest, layout.page_size), []
    for group in layout.groups:
        pages.append(array("q", range(first, first + count * group.num_stacks)))
        first += max(count, pages_for(longest, layout.page_size)) * group.num_stacks
    return pages


def engine(part: Part, model: Path, **options: Any) -> "tuple[EngineCore, protocol.Ready]":
    """An engine in this process, as an engine process loads it. `options`: fields of EngineOptions
    other than its defaults for this device.
    """
    from model.options import EngineOptions
    from server import protocol
    from server.engine.worker import load

    # On a CPU one thread: the small form has nothing to share, and others may be at work.
    on_gpu = part.device == "cuda"
    sizes = (
        {"max_running": 256, "step_tokens": 4096}
        if on_gpu
        else {"max_running": 64, "step_tokens": 512}
    )
    places = {
        "device": part.device,
        "dtype": "auto",
        "threads": 0 if on_gpu else 1,
        "page_size": 64,
        "pages": None,
        "memory": None,
    }
    chosen = EngineOptions(**{**places, **sizes, "max_context": 0, **options})
    start = protocol.Start(
        protocol.VERSION, str(model), str(model / "tokenizer.json"), chosen, 2.5, "warning", "text"
    )
    return load(start, lambda *_: None)
