"""Everything that is measured on a GPU, in one run of ten minutes: figures, requirements met or missed, a picture.

    python -m bench.gpu --output DIR [--only ceilings,attention,step,serve,numerics,peers] [--minutes 10] [--device cuda] [--small]

ceilings   bytes per second of a copy and of a read, operations per second of a matrix product
attention  the decode kernel at four models' heads, beside SDPA, FlashInfer (where it is installed) and FlexAttention
step       a step of a model of StarCoderBase-1B's shape, beside its floor; which requests' launches wait for the device
serve      the workload of nano-vllm's bench (256 sequences, 133,966 output tokens) on an engine here, and over HTTP
numerics   logits and greedy tokens beside the CPU's reference; the same bits alone and in company
peers      transformers on that workload: generate with a static cache, continuous batching

Only where --only names them:

check      kernels and CUDA graphs beside the reference, on ragged batches of every published shape: for the first visit
profile    a decode step's seconds on the device by kernel, and on the host
sweep      other configurations of the attention kernel

Each part is a process with a share of the time, and what it finds is written as it goes: DIR/PART.json and, after every part, gpu.json
and gpu.png. A part that fails or is out of time is written down as such, and the others run. Shares and floors need `ceilings`,
ratios `serve`.
`--device cpu --small` runs every line on tiny shapes without a GPU, where speeds are not judged. Exit status 1 where a bar is missed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.bars import bars
from bench.gpu.common import Part, make_checkpoint, versions, write_json
from bench.gpu.pictures import draw, tables
from commands.bench.bench import circumstances
from tests.support.report import Found, conclude, progress

SHARES = {
    "ceilings": 0.04,
    "check": 0.3,
    "checkpoint": 0.2,
    "attention": 0.23,
    "step": 0.09,
    "profile": 0.15,
    "serve": 0.16,
    "numerics": 0.1,
    "peers": 0.18,
    "sweep": 0.25,
}
"""Share of the time of each part, in the order in which parts run; what one leaves over goes to those after it."""
PARTS = tuple(name for name in SHARES if name != "checkpoint")
DEFAULT_PARTS = tuple(name for name in PARTS if name not in ("check", "profile", "sweep"))
ON_CHECKPOINT = {"step", "serve", "peers", "profile"}
CLOSING_SECONDS = 5.0
"""Kept back for the report."""
INTERPRETED = {"attention", "check", "numerics", "sweep"}
"""Parts that call the kernels themselves, on a CPU under Triton's interpreter."""


def run_part(part: Part, name: str) -> None:
    """What the child does."""
    import torch

    part.note("on", versions(part.device))
    if part.device == "cpu":
        torch.set_num_threads(1)
    if name == "checkpoint":
        make_checkpoint(part)
    else:
        import_module(f"bench.gpu.{name}").measure(part)


def child(options: argparse.Namespace, name: str, scratch: Path, seconds: float) -> Found:
    """One part to its end, or to its time's; what it found, with what became of it."""
    path, log = options.output / f"{name}.json", options.output / f"{name}.log"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu", "--output", str(options.output), "--device", options.device, "--scratch", str(scratch)]
    command += ["--part", name, "--seconds", str(seconds), *(["--small"] if options.small else [])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.device == "cpu" and name in INTERPRETED and find_spec("triton") is not None:
        environment["TRITON_INTERPRET"] = "1"
    began, failed = time.monotonic(), None
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            status = process.wait(timeout=seconds)
            if status:
                failed = f"status {status}: {(log.read_text(errors='replace').strip().splitlines() or ['no word'])[-1]}"
        except subprocess.TimeoutExpired:
            failed = f"not done after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # With its server and clients: those of a part that has crashed would keep the GPU.
            process.wait()
    found: Found = json.loads(path.read_text()) if path.exists() else {}
    return found | {"took": time.monotonic() - began} | ({"failed": failed} if failed else {})


def run_all(options: argparse.Namespace) -> int:
    """Every part in turn; gpu.json and gpu.png after each."""
    wanted = [name for name in SHARES if name in options.only or (name == "checkpoint" and ON_CHECKPOINT & set(options.only))]
    end, found = time.monotonic() + options.minutes * 60 - CLOSING_SECONDS, Found()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, progress() as bar:
        task = bar.add_task("gpu", total=len(wanted))
        for number, name in enumerate(wanted):
            bar.update(task, description=name)
            share = SHARES[name] / sum(SHARES[other] for other in wanted[number:])
            found[name] = child(options, name, Path(scratch), max(1.0, share * (end - time.monotonic())))
            write(options, found)
            bar.advance(task)
    with spared("the tables"):
        tables(found)
    judged = options.device == "cuda" and not options.small
    return conclude("gpu", options.output, machine(found), told(options, found), bars(found, wanted, judged))


def machine(found: Found) -> Found:
    """The device and the libraries, as the first part that got to say so has them."""
    return next((part["on"] for part in found.values() if "on" in part), {})


def told(options: argparse.Namespace, found: Found) -> Found:
    settings = {"only": options.only, "minutes": options.minutes, "device": options.device, "small": options.small}
    return {"settings": settings, "parts": found}


def write(options: argparse.Namespace, found: Found) -> None:
    """Writes the results so far, so that they are kept if this process is killed."""
    write_json(options.output / "gpu.json", circumstances(machine(found)) | told(options, found))
    if find_spec("matplotlib") is not None:
        with spared("the picture"):
            draw(found, options.output / "gpu.png")


@contextmanager
def spared(what: str) -> Iterator[None]:
    """A failure while tables or pictures are drawn is printed, and loses no result."""
    try:
        yield
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    parser.add_argument("--only", default=",".join(DEFAULT_PARTS), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all parts together (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that everything runs")
    for hidden, kind in (("--part", str), ("--scratch", Path), ("--seconds", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = options.only.split(",")
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
    path = options.output / f"{options.part}.json"
    run_part(Part(path, options.device, options.small, options.scratch, options.seconds), options.part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
