"""Everything that is measured on a GPU, in one run of ten minutes: figures, requirements met or
missed, one archive.

    python -m bench.gpu [right|fast|all] --output DIR [--only PART,...] [--minutes 9.5]
                        [--device cuda] [--small]

right       does it compute the right numbers, and where does the time of a step go: for the first
            visit to a host
fast        throughput, latencies, attention, other configurations
all         the parts of both, and peers; the default

imports     torch and Triton are imported, which takes a minute on a cold machine
ceilings    bytes per second of a copy and of a read, operations per second of a matrix product; at
            both ends of a run
check       kernels and CUDA graphs beside the reference, on ragged batches of every published shape
draws       tokens drawn at published vocabularies, beside numpy and torch
families    tiny decoders of every family, in chunks, by token, and replayed, beside the reference
numerics    logits of the embedded model beside the CPU's reference; whether requests are
            batch-invariant
profile     a decode step's seconds on the device by kernel, and on the host
step        a step of a model of StarCoderBase-1B's shape, beside its floor; which requests'
            launches wait for the device
serve       the workload of nano-vllm's bench (256 sequences, 133,966 output tokens) on an engine
            here, the host's parts of a step, and the same over HTTP
attention   the decode kernel at four models' heads, beside SDPA, FlashInfer (where it is installed)
            and FlexAttention
peers       transformers on that workload: generate with a static cache, continuous batching

Each part is a process with a share of the time. What it finds is in DIR/gpu.zip at once: gpu.json
with every figure, the log of each part, and at the end report.txt and gpu.png. A run that is killed
keeps what it has found. A part that fails or is out of time is written down as such, and the others
run. Shares and floors need `ceilings`, ratios `serve`. Kernels need torch, Triton, NumPy, msgspec
and safetensors; a part whose packages are missing says so. `--device cpu --small` runs every line
on tiny shapes without a GPU, where speeds are not judged. Exit status 1 where a bar is missed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.archive import Archive
from bench.gpu.bars import bars
from bench.gpu.common import Part, make_checkpoint, versions
from bench.gpu.pictures import draw, table, tables
from commands.bench.figures import circumstances
from server.child_process import end_with_parent
from server.supervision.processors import engine_environment
from tests.support.checks import Found
from tests.support.paths import ROOT

SHARES = {
    "imports": 0.25,
    "ceilings": 0.08,
    "check": 0.3,
    "draws": 0.12,
    "families": 0.2,
    "numerics": 0.1,
    "checkpoint": 0.2,
    "profile": 0.15,
    "step": 0.09,
    "serve": 0.25,
    "attention": 0.23,
    "peers": 0.18,
    "ceilings_after": 0.08,
}
"""Share of the time of each part, in the order in which parts run; what one leaves over goes to
those after it. What is wrong is found before anything is timed.
"""
MEASURED = (
    "check",
    "draws",
    "families",
    "numerics",
    "profile",
    "step",
    "serve",
    "attention",
    "peers",
)
PRESETS = {
    "right": ("check", "draws", "families", "profile", "step"),
    "fast": ("numerics", "serve", "attention"),
    "all": MEASURED,
}
PARTS = ("ceilings", *MEASURED)
"""What --only may name."""
ON_CHECKPOINT = {"step", "serve", "peers", "profile"}
CLOSING_SECONDS = 5.0
"""Kept back for the report."""
INTERPRETED = {"attention", "check", "draws", "families", "numerics"}
"""Parts that call the kernels themselves, on a CPU under Triton's interpreter."""
ARCHIVE = "gpu.zip"


def run_part(part: Part) -> None:
    """What the child does."""
    began = time.perf_counter()
    import torch

    part.note("on", versions(part.device))
    if part.device == "cpu":
        torch.set_num_threads(1)
    if part.name == "imports":
        for name in ("triton", "model.runner.runner", "server.engine.worker"):
            with part.guarded(name):
                import_module(name)
        part.note("seconds", time.perf_counter() - began)
    elif part.name == "checkpoint":
        make_checkpoint(part)
    else:
        with part.guarded("whole"):
            measure = import_module(f"bench.gpu.{part.name.removesuffix('_after')}").measure
            measure(part)


def child(options: argparse.Namespace, name: str, scratch: Path, seconds: float) -> Found:
    """One part to its end, or to its time's; what it found, with what became of it."""
    archive, log = options.output / ARCHIVE, scratch / f"{name}.log"
    command = [
        sys.executable,
        "-m",
        "bench.gpu",
        "--output",
        str(options.output),
        "--device",
        options.device,
        "--scratch",
        str(scratch),
    ]
    command += [
        "--part",
        name,
        "--seconds",
        str(seconds),
        "--parent",
        str(os.getpid()),
        *(["--small"] if options.small else []),
    ]
    # The tree itself, also for the processes that a part starts: it need not be installed.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = engine_environment() | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": paths,
    }
    if options.device == "cpu" and name in INTERPRETED and find_spec("triton") is not None:
        environment["TRITON_INTERPRET"] = "1"
    began, failed = time.monotonic(), None
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            status = process.wait(timeout=seconds)
            if status:
                failed = (
                    f"status {status}: "
                    f"{(log.read_text(errors='replace').strip().splitlines() or ['no word'])[-1]}"
                )
        except subprocess.TimeoutExpired:
            failed = f"not done after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(
                    process.pid,
                    9,
                    # With its server and clients: those of a part that has crashed would keep the
                    # GPU.
                )
            process.wait()
    written = Archive(archive)
    found: Found = written.record.setdefault("parts", {}).get(name, {})
    found |= {"took": time.monotonic() - began} | ({"failed": failed} if failed else {})
    written.record["parts"][name] = found
    written.write({log.name: log.read_bytes()})
    return found


def wanted_parts(options: argparse.Namespace) -> list[str]:
    """The parts to run, in their order: those asked for, and those that these need."""
    asked = set(options.only)
    needed = (
        {"imports"}
        | ({"checkpoint"} if ON_CHECKPOINT & asked else set())
        | ({"ceilings_after"} if "ceilings" in asked else set())
    )
    return [name for name in SHARES if name in asked | needed]


def run_all(options: argparse.Namespace) -> int:
    """Every part in turn, then the report."""
    wanted = wanted_parts(options)
    end, found = time.monotonic() + options.minutes * 60 - CLOSING_SECONDS, Found()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / ARCHIVE
    path.unlink(missing_ok=True)
    archive = Archive(path)
    settings = {
        "only": options.only,
        "minutes": options.minutes,
        "device": options.device,
        "small": options.small,
    }
    archive.record |= circumstances({}) | {"settings": settings, "parts": {}}
    archive.write()
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(wanted):
            share = SHARES[name] / sum(SHARES[other] for other in wanted[number:])
            seconds = max(1.0, share * (end - time.monotonic()))
            print(f"== {name}, at most {seconds:.0f} s", flush=True)
            found[name] = child(options, name, Path(scratch), seconds)
            failed = found[name].get("failed")
            print(
                f"   {found[name]['took']:.1f} s{f', FAILED: {failed}' if failed else ''}",
                flush=True,
            )
            if failed and name == "imports":
                print(f"Nothing can be measured here; the log is in {path}", file=sys.stderr)
                return 1
    return conclude(path, found, wanted, judged=options.device == "cuda" and not options.small)


def conclude(path: Path, found: Found, wanted: list[str], judged: bool) -> int:
    """Prints the report and adds it to the archive with a picture. The exit status: 0 where every
    bar holds.
    """
    archive, members, report = Archive(path), dict[str, bytes](), ""
    checks = bars(found, wanted, judged)
    archive.record |= {"server": machine(found), "checks": [asdict(check) for check in checks]}
    with spared("the tables"):
        report = tables(found)
    rows = [(check.what, "holds" if check.holds else "MISSED", check.found) for check in checks]
    report += table(("requirement", "", "found"), rows, right=False)
    print(report)
    members["report.txt"] = report.encode()
    archive.write(members)
    if find_spec("matplotlib") is not None and find_spec("rich") is not None:
        with spared("the picture"):
            archive.write({"gpu.png": draw(found)})
    print(f"\nEverything is in {path}")
    return 0 if all(check.holds for check in checks) else 1


def machine(found: Found) -> Found:
    """The device and the libraries, as the first part that got to say so has them."""
    return next((part["on"] for part in found.values() if "on" in part), {})


@contextmanager
def spared(what: str) -> Iterator[None]:
    """A failure while tables or pictures are drawn is printed, and loses no result."""
    try:
        yield
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "preset",
        nargs="?",
        choices=tuple(PRESETS),
        default="all",
        help="which parts (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of gpu.zip")
    parser.add_argument("--only", help="parts instead of the preset's, separated by commas")
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="of all parts together (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="tiny shapes, to see that everything runs"
    )
    for hidden, kind in (
        ("--part", str),
        ("--scratch", Path),
        ("--seconds", float),
        ("--parent", int),
    ):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = (
        options.only.split(",") if options.only else ["ceilings", *PRESETS[options.preset]]
    )
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only: no {min(unknown)!r}; there are: {', '.join(PARTS)}")
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu: the shapes are a GPU's; add --small")
    return options


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that a killed run ends its part.
    if options.part is None:
        return run_all(options)
    end_with_parent(options.parent)  # Nothing is left on the GPU by a run that is killed.
    run_part(
        Part(
            options.output / ARCHIVE,
            options.part,
            options.device,
            options.small,
            options.scratch,
            options.seconds,
        )
    )
    return 0
