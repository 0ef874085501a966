"""How much memory the engine process takes to load a checkpoint, and how long that lasts beside `transformers`.

    python -m bench.load [--shape 1b | 164m | FOLDER] [--dtype float32] [--quantization none] [--repeats 3] [--output FILE.json]

A shape makes a random gpt_bigcode checkpoint of that size in a temporary folder, in float32. The engine is the server's own process
with a cache of one page; its peak is what Linux has as VmHWM when it is ready. Times are of loading alone, each in a fresh process with
the file in the page cache, ours and theirs alternating.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.against_transformers import SHAPES, make
from tests.support.processes import ServerProcess

OURS = """
import sys, time, json
from pathlib import Path
import torch
from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.devices.cpu.device import CpuDevice
folder, cpu = Path(sys.argv[1]), CpuDevice()
products = cpu.products(cpu.dtypes(sys.argv[2]), sys.argv[3], False)
begin = time.perf_counter()
decoder = load_decoder(folder, read_spec(folder), getattr(torch, sys.argv[2]), cpu.torch_device, products)
touched = sum(float(p.sum()) for p in decoder.parameters())
print(json.dumps({"seconds": time.perf_counter() - begin}))
"""
THEIRS = """
import sys, time, json
import torch
from transformers import AutoConfig, AutoModelForCausalLM
AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(sys.argv[1]))]  # Imports the module of this kind of model.
begin = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
touched = sum(float(p.sum()) for p in model.parameters())  # A mapped file is read when it is first touched.
print(json.dumps({"seconds": time.perf_counter() - begin}))
"""


def memory_of(pid: int) -> dict[str, int]:
    """Peak and present resident bytes of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) * 1024 for name, key in (("peak", "VmHWM"), ("resident", "VmRSS"))}


def engine_memory(folder: Path, dtype: str, quantization: str) -> dict[str, Any]:
    """Starts the server with the smallest cache; the engine process's memory when it is ready."""
    options = ("--engine.dtype", dtype, "--engine.quantization", quantization, "--cache.pages", "1", "--engine.max_running", "1")
    begin = time.perf_counter()
    with ServerProcess(folder, *options, stderr=None) as server:
        ready = time.perf_counter() - begin
        memory = memory_of(server.engine_pid)
    return memory | {"ready_s": ready}


def timed(program: str, *arguments: str) -> float:
    """Seconds that a fresh process reports."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def measure(folder: Path, dtype: str, quantization: str, repeats: int) -> dict[str, Any]:
    """Memory once, times alternating."""
    from commands.forms import weight_bytes
    from model.checkpoint.families import read_spec
    from model.decoder import meta_decoder

    weights = weight_bytes(meta_decoder(read_spec(folder)))[dtype if quantization == "none" else quantization]
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(timed(OURS, str(folder), dtype, quantization))
        theirs.append(timed(THEIRS, str(folder), dtype))
    memory = engine_memory(folder, dtype, quantization)
    return {
        "dtype": dtype,
        "quantization": quantization,
        "weight_bytes": weights,
        "engine": memory,
        "bound_bytes": int(1.05 * weights + 500e6),
        "load_s": {"onehead": ours, "transformers": theirs},
        "load_median_s": {"onehead": statistics.median(ours), "transformers": statistics.median(theirs)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.shape)
        if options.shape in SHAPES:
            folder = Path(scratch) / options.shape
            make(options.shape, folder)
            (folder / "SHA256SUMS").unlink()  # Published checkpoints have none; what checking costs is not what is asked here.
        result = measure(folder, options.dtype, options.quantization, options.repeats)
    print(json.dumps(result, indent=2))
    peak, bound = result["engine"]["peak"], result["bound_bytes"]
    print(f"peak {peak / 1e6:.0f} MB, 1.05 x weights + 500 MB = {bound / 1e6:.0f} MB: {'holds' if peak <= bound else 'missed'}")
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
