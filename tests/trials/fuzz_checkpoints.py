"""Thousands of damaged checkpoint folders: each must be refused with a line a person can act on, or
load as what it says it is.

    python -m tests.trials.fuzz_checkpoints [--count 1000] [--processes 40] [--seed 0] [--output
    FILE.json]

Takes tiny checkpoints of nine families, damages header, weights, index, config or tokenizer at
random, and does with each folder what `onehead serve` does before it listens: in child processes
that are killed after 20 s. A folder that loads in spite of its damage is compared with what
`transformers` makes of it: the same logits, or the damage was read differently. The first
`--processes` that are refused are also started as real servers, which must exit with 78 and the
same line. Exit status 1 for a hang, a crash, a wrong load, or a refusal that says nothing.
"""

import argparse
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import Progress

BASES: tuple[tuple[str, int], ...] = (
    ("santacoder", 0),
    ("llama", 2),
    ("gemma3_text", 1),
    ("deepseek_v3", 0),
    ("falcon", 1),
)
BASES += (("mistral", 3), ("minicpm3", 2), ("deepseek_v2", 2), ("gemma", 3))
SECONDS = 20
LONGEST_LINE = 600
WILD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    10**6,
    2**31,
    2**63,
    10**400,
    0.5,
    -0.0,
    1e300,
)
WILD += ("", "x", "1", "silu", [], [1], {}, {"a": 1})

Random = random.Random

# --- damage: each takes a folder and breaks something in it


def _bytes_of(path: Path, change: Callable[[bytearray], bytearray | bytes]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flip_header(folder: Path, rng: Random) -> None:
    def change(data: bytearray) -> bytearray:
        (length,) = struct.unpack("<Q", data[:8])
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
        return data

    _bytes_of(folder / "model.safetensors", change)


def wild_header_length(folder: Path, rng: Random) -> None:
    length = rng.choice([0, 1, 2, 7, 2**20, 100 * 2**20 + 1, 2**31, 2**63, 2**64 - 1])
    _bytes_of(folder / "model.safetensors", lambda data: struct.pack("<Q", length) + data[8:])


def cut_or_extend(folder: Path, rng: Random) -> None:
    def change(data: bytearray) -> bytes:
        return (
            bytes(data[: rng.randrange(len(data))])
            if rng.random() < 0.7
            else bytes(data) + bytes(rng.randint(1, 999))
        )

    _bytes_of(folder / "model.safetensors", change)


def edit_header(folder: Path, rng: Random) -> None:
    """A change of the header's JSON that leaves it JSON: types, shapes, offsets, names, twice the
    same name.
    """

    def change(data: bytearray) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        name = rng.choice([key for key in header if key != "__metadata__"])
        text = _edited(header, name, rng).encode()
        return struct.pack("<Q", len(text)) + text + bytes(data[8 + length :])

    _bytes_of(folder / "model.safetensors", change)


def _edited(header: dict[str, Any], name: str, rng: Random) -> str:
    entry, kind = header[name], rng.randrange(7)
    if kind == 0:
        entry["dtype"] = rng.choice(["F16", "I32", "F64", "BOOL", "Q4", 7, None])
    elif kind == 1:
        entry["shape"] = rng.choice(
            [
                [],
                [0],
                [-1, 4],
                [2**40, 2**40],
                entry["shape"][::-1],
                [*entry["shape"], 1],
                "x",
                None,
            ]
        )
    elif kind == 2:
        entry["data_offsets"] = rng.choice(
            [[0, 4], [4, 0], [-8, 8], [0, 2**62], [0], "x", [0.5, 1]]
        )
    elif kind == 3:
        header[rng.choice([name + "x", "__metadata__"])] = header.pop(name)
    elif kind == 4:
        header[rng.choice([name, "__metadata__"])] = rng.choice(WILD)
    elif kind == 5:
        entry["more"] = 1
    text = json.dumps(header)
    return text[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}" + "}" if kind == 6 else text


def flip_weights(folder: Path, rng: Random) -> None:
    """Bits of the weights themselves, with the manifest that notices."""
    path = folder / "model.safetensors"
    sums = subprocess.run(
        ["sha256sum", path.name], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    (folder / "SHA256SUMS").write_text(sums)

    def change(data: bytearray) -> bytearray:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data) // 2, len(data))] ^= 1 << rng.randrange(8)
        return data

    _bytes_of(path, change)


def poison_weights(folder: Path, rng: Random) -> None:
    """A NaN or an infinity somewhere, without a manifest."""

    def change(data: bytearray) -> bytearray:
        begin = 8 + struct.unpack("<Q", data[:8])[0]
        place = begin + 4 * rng.randrange((len(data) - begin) // 4)
        data[place : place + 4] = struct.pack(
            "<f", rng.choice([float("nan"), float("inf"), -float("inf")])
        )
        return data

    _bytes_of(folder / "model.safetensors", change)


def wild_config(folder: Path, rng: Random) -> None:
    path = folder / rng.choice(
        ["config.json"] * 6 + ["generation_config.json", "tokenizer_config.json"]
    )
    if not path.exists():
        path.write_text("{}")
    whole = json.loads(path.read_text())
    for _ in range(rng.randint(1, 2)):
        inner = [value for value in whole.values() if isinstance(value, dict) and value]
        values = rng.choice(inner) if inner and rng.random() < 0.4 else whole
        keys = [
            *values,
            "eos_token_id",
            "rope_scaling",
            "chat_template",
            "quantization_config",
            "num_key_value_heads",
            "auto_map",
        ]
        key = rng.choice(keys)
        if rng.random() < 0.3:
            values.pop(key, None)
        else:
            values[key] = rng.choice(WILD)
    path.write_text(json.dumps(whole))


def garbage_json(folder: Path, rng: Random) -> None:
    path = folder / rng.choice(
        [
            "config.json",
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
        ]
    )
    noise = bytes(rng.randrange(256) for _ in range(99))
    path.write_bytes(
        rng.choice(
            [
                b"",
                b"{",
                b"[]",
                b"null",
                b"\xff\xfe\x00",
                b"[" * 100_000,
                b'{"a":' * 5000,
                b"NaN",
                b"\0" * 100,
                noise,
            ]
        )
    )


def flip_text(folder: Path, rng: Random) -> None:
    """Bytes of a JSON file."""

    def change(data: bytearray) -> bytearray:
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(len(data))] = rng.choice(b'0123456789"{}[]:,-.etfnul \x00\xff')
        return data

    _bytes_of(
        folder
        / rng.choice(["config.json", "tokenizer.json", "tokenizer.json", "tokenizer_config.json"]),
        change,
    )


def edit_tokenizer(folder: Path, rng: Random) -> None:
    """A change of tokenizer.json that leaves it JSON."""
    path = folder / "tokenizer.json"
    value = json.loads(path.read_text())
    node = value
    while isinstance(node, dict) and node:
        key = rng.choice(list(node))
        if not isinstance(node[key], dict) or not node[key] or rng.random() < 0.4:
            node[key] = rng.choice(WILD)
            break
        node = node[key]
    path.write_text(json.dumps(value))


def wild_index(folder: Path, rng: Random) -> None:
    weight_map = rng.choice(
        [
            {},
            [],
            {"x": "../model.safetensors"},
            {"x": "nowhere.safetensors"},
            {"x": 7},
            {"x": "model.bin"},
            "x",
        ]
    )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(rng.choice([{"weight_map": weight_map}, weight_map, {"other": 1}]))
    )


def take_away(folder: Path, rng: Random) -> None:
    path = folder / rng.choice(["config.json", "model.safetensors", "tokenizer.json"])
    path.unlink()
    kind = rng.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(folder / "nowhere")
    elif kind == 2:
        (folder / "pytorch_model.bin").write_bytes(b"PK")


DAMAGES = (
    flip_header,
    wild_header_length,
    cut_or_extend,
    edit_header,
    flip_weights,
    poison_weights,
    wild_config,
    wild_config,
    wild_config,
    garbage_json,
    flip_text,
    edit_tokenizer,
    wild_index,
    take_away,
)

# --- the child: does with each folder what serving does


def try_folder(folder: Path) -> dict[str, Any]:
    """Loads as `onehead serve` does; the refusal, or how far its logits are from those of
    `transformers`.
    """
    from model.checkpoint.families import read_spec
    from model.spec import CheckpointError, OptionError
    from server.config import ServerSection
    from server.engine.worker import load
    from server.errors import OneheadError
    from server.service import read_texts, start_message

    try:
        read_texts(folder, ServerSection())
        core, _ = load(start_message(_settings(folder), ServerSection()), lambda *_: None)
    except (CheckpointError, OptionError, OneheadError) as error:
        return {"refused": str(error)}
    return {"loaded": _distance(folder, core.runner, read_spec(folder))}


def _settings(folder: Path) -> Any:
    from server.config import EngineSettings, load

    return load(
        EngineSettings,
        ["--model", str(folder), "--cache.pages", "40", "--engine.threads", "1"],
        "fuzz",
    )


def _distance(folder: Path, runner: Any, spec: Any) -> float | str:
    """The largest difference of any logit of a short text; why there is none where `transformers`
    does not read the folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from model.step import Row, StepPlan

    if (folder / "oracle").is_dir():
        return "transformers: does not know this layout"
    ids = [i % min(spec.vocab_size, 250) for i in (5, 77, 130, 9, 201, 44)][: spec.max_positions]
    states = []
    forward = runner.forward
    runner.forward = lambda *given: states.append(forward(*given).clone()) or states[-1]
    runner.run(
        StepPlan((Row(0, ids, 0, [array("q", range(40))] * len(runner.pool.layout.groups), None),))
    )
    try:
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        oracle = AutoModelForCausalLM.from_pretrained(folder, **eager, dtype=torch.float32)
        with torch.inference_mode():
            expected = oracle.eval()(torch.tensor([ids])).logits[0]
            return float((runner.decoder.logits(states[-1]) - expected).abs().max())
    except Exception as error:
        return f"transformers: {type(error).__name__}"


def child() -> None:
    """Reads a folder a line, answers a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(try_folder(Path(line.strip()))), file=answers, flush=True)


# --- the parent


class Child:
    """A child process that is replaced when it hangs or dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (no pipe: nobody would empty it)

    def ask(self, folder: Path) -> dict[str, Any]:
        import select

        if self.process is None:
            command = [sys.executable, "-m", "tests.trials.fuzz_checkpoints", "--child"]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], SECONDS)[0]:
            self.process.kill()
            self.process = None
            return {"hang": SECONDS}
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            died = {"crash": self.process.returncode, "error": self.errors.read()[-800:]}
            self.process = None
            return died
        answer: dict[str, Any] = json.loads(line)
        return answer


def damaged(bases: dict[tuple[str, int], Path], folder: Path, seed: int) -> list[str]:
    """Makes folder number `seed`; what was done to it."""
    rng = Random(seed)
    shutil.copytree(bases[rng.choice(BASES)], folder, symlinks=True)
    done = []
    for damage in rng.sample(DAMAGES, 1 if rng.random() < 0.8 else 2):
        try:
            damage(folder, rng)
            done.append(damage.__name__)
        except (OSError, LookupError, ValueError, TypeError, RecursionError, struct.error):
            pass  # The first damage left the second nothing to work on.
    return done


def verdict(answer: dict[str, Any]) -> str | None:
    """What is wrong with an answer; None where nothing is."""
    if "refused" in answer:
        line = answer["refused"]
        named = any(
            word in line
            for word in (".json", ".safetensors", "folder", "tensor", "expected", "SHA256SUMS")
        )
        says = named and "\n" not in line and len(line) <= LONGEST_LINE and "Traceback" not in line
        return None if says else "a refusal that says nothing"
    if "loaded" in answer:
        distance = answer["loaded"]
        return "a wrong load" if isinstance(distance, float) and not distance < 1e-3 else None
    return "a hang" if "hang" in answer else "a crash"


def serve_too(folder: Path) -> str | None:
    """Starts a real server on the folder; what is wrong with how it ends."""
    command = [
        sys.executable,
        "-m",
        "commands.cli",
        "serve",
        "--model",
        str(folder),
        "--port",
        "0",
        "--cache.pages",
        "40",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "a server that hangs"
    lines = [line for line in done.stderr.splitlines() if line.startswith("onehead serve: ")]
    return (
        None
        if done.returncode == 78 and len(lines) == 1
        else f"a server that exits with {done.returncode}: {done.stderr[-500:]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        return child()
    from tests.support.families import make_family_checkpoint

    seen: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    unread: list[str] = []
    worker = Child()
    with tempfile.TemporaryDirectory() as scratch, Progress() as progress:
        bases = {
            base: make_family_checkpoint(
                *base, _made(Path(scratch) / f"{base[0]}-{base[1]}")
            ).folder
            for base in BASES
        }
        task = progress.add_task("folders", total=options.count)
        for seed in range(options.seed, options.seed + options.count):
            folder = Path(scratch) / str(seed)
            done = damaged(bases, folder, seed)
            answer = worker.ask(folder)
            problem = verdict(answer)
            if "refused" in answer and problem is None and seen["served"] < options.processes:
                seen["served"] += 1
                problem = serve_too(folder)
            seen[
                "refused" if "refused" in answer else "loaded" if "loaded" in answer else "died"
            ] += 1
            if isinstance(answer.get("loaded"), str):
                unread.append(f"{seed} {done}: {answer['loaded']}")
            if problem:
                wrong.append({"seed": seed, "damage": done, "problem": problem, "answer": answer})
                progress.console.print(wrong[-1])
            shutil.rmtree(folder)
            progress.advance(task)
    result = {
        "count": options.count,
        "seed": options.seed,
        "seen": dict(seen),
        "wrong": wrong,
        "loaded_but_not_by_transformers": unread,
    }
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if wrong else 0)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
