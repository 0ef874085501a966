"""Checkpoint folders made to cost time and memory, or to fail late: every command must refuse each
in one line, and soon.

    python -m tests.trials.hostile_checkpoints [--commands serve plan] [--cases NAME ...] [--output
    FILE.json]

Each case is a copy of the embedded model with one change. A command passes if it exits with status
78 and one line that names a file within 10 s, and its processes together hold at most 1 GiB more
than those that serve the embedded model. Cases that a command does not read, such as a chat
template for `plan`, may succeed, within the same limits. Exit status 1 if a command did neither.
"""

import argparse
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.support.paths import EMBEDDED
from tests.support.processes import children, served_port

SECONDS, MEMORY_MB = 10, 1024
LONGEST_SECONDS, LONGEST_LINE = 60, 600
BASE_MB = 450
"""Resident memory of the processes that serve the embedded model."""
FILES: tuple[str, ...] = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
)
FILES += ("SHA256SUMS", "model.safetensors", "model.safetensors.index.json")
COMMANDS: dict[str, list[str]] = {
    "serve": ["--port", "0"],
    "generate": ["hello", "--max_new_tokens", "1"],
    "plan": [],
    "convert": ["--output", "{scratch}/converted"],
    "train": ["--output", "{scratch}/trained", "--steps", "1"],
}

Change = Callable[[Path], object]


def values(name: str, **changes: Any) -> Change:
    """Changes keys of a JSON file."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def content(name: str, data: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(data)

    return change


def template(source: object) -> Change:
    return values("tokenizer_config.json", chat_template=source)


def pattern(text: str) -> Change:
    split = {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
    return values("tokenizer.json", pre_tokenizer=split)


def prepended(length: int) -> Change:
    return values("tokenizer.json", normalizer={"type": "Prepend", "prepend": "x" * length})


def index(weight_map: object) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        content("model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())(
            folder
        )

    return change


def header(num_tensors: int) -> Change:
    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(f'"{number:x}":{entry}' for number in range(num_tensors)) + "}").encode()
    return content("model.safetensors", struct.pack("<Q", len(text)) + text)


def special(kind: str, name: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()

    return change


def post_processor(id: int) -> Change:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": "B", "type_id": 0}}, sequence]
    tokens = {"B": {"id": "B", "ids": [id], "tokens": ["B"]}}
    found = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [sequence, sequence],
        "special_tokens": tokens,
    }
    return values("tokenizer.json", post_processor=found)


def added_tokens(count: int) -> Change:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return values(
        "tokenizer.json",
        added_tokens=[
            {"id": i, "content": f"<{i}>", "special": True} | flags for i in range(count)
        ],
    )


def long_merge(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    values("tokenizer.json", model=model | {"merges": ["x" * 2**24 + " y"]})(folder)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def cases() -> Iterator[tuple[str, Change]]:
    """(name, change) of every case; a change is made when its folder is."""
    yield "index: name of 5,000 characters", index({"a": "x" * 5000 + ".safetensors"})
    yield "index: name with a lone surrogate", index({"a": "\ud800.safetensors"})
    yield (
        "index: tensor with a long name",
        content(
            "model.safetensors.index.json",
            b'{"weight_map": {"' + b"t" * 9999 + b'": "model.safetensors"}}',
        ),
    )
    yield (
        "template: 20,000 parentheses",
        template("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"),
    )
    yield "template: 30 nested for", template("{% for i in [1] %}" * 30 + "{% endfor %}" * 30)
    yield "template: 200 nested if", template("{% if 1 %}" * 200 + "{% endif %}" * 200)
    yield "template: 50,000 minus signs", template("{{ " + "-" * 50_000 + "1 }}")
    yield (
        "template: name is an object",
        template([{"name": {"a": 1}, "template": "x"}, {"name": "default", "template": "{{"}]),
    )
    yield "template: a constant of 1 GB", template("{{ 'a'*10**9 }}x")
    yield "template: centered in 1 GB", template("{{ 'a'|center(1000000000) }}")
    yield "template: a huge power", template("{{ 10**(10**8) }}")
    yield "template: not UTF-8", content("chat_template.jinja", b"\xff")
    yield (
        "tokenizer_config: 500 MB",
        content("tokenizer_config.json", b'{"a":"' + b"x" * (500 * 2**20) + b'"}'),
    )
    yield "header: 1.5 million tensors", lambda folder: header(1_500_000)(folder)
    yield "header: 200,000 tensors", lambda folder: header(200_000)(folder)
    yield "normalizer: prepends 30 MB", prepended(30 * 2**20)
    yield "normalizer: prepends 100 kB", prepended(100_000)
    yield "temperature 1e308", values("generation_config.json", temperature=1e308)
    yield "top_k 1.5", values("generation_config.json", top_k=1.5)
    yield "top_p 0", values("generation_config.json", top_p=0)
    yield "post-processor: id outside the vocabulary", post_processor(99_999)
    yield "1 million added tokens", lambda folder: added_tokens(10**6)(folder)
    yield "a merge of 16 MB", long_merge
    yield "a pattern of 100,000 parentheses", pattern("(" * 10**5 + ")" * 10**5)
    yield "a pattern of nested repetitions", pattern("((((a{1,1000}){1,1000}){1,1000}){1,1000})")
    yield "config: a list of 900 levels", values("config.json", model_type=nested(900))
    yield "config: an integer of 4,000 digits", values("config.json", vocab_size=10**4000)
    yield (
        "config: an integer of 5,000 digits",
        content("config.json", b'{"vocab_size": ' + b"1" * 5000 + b"}"),
    )
    yield (
        "config: 1024 layers of 2**30 columns",
        values("config.json", n_layer=1024, n_embd=2**30, n_positions=2**31 - 1),
    )
    for kind in ("fifo", "device", "folder"):
        for name in FILES:
            yield f"{kind}: {name}", special(kind, name)


def memory_mb(pid: int) -> int:
    """Resident memory of a process and its descendants."""
    own = 0
    with contextlib.suppress(OSError, IndexError):  # It has ended.
        own = (
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            >> 20
        )
    return own + sum(map(memory_mb, children(pid)))


def run(command: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """Runs a command on a folder until it ends, or serves."""
    option = "--init" if command == "train" else "--model"
    words = [
        command,
        option,
        str(folder),
        *(word.format(scratch=scratch) for word in COMMANDS[command]),
    ]
    began, peak = time.monotonic(), 0
    with (scratch / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "commands.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            while process.poll() is None and time.monotonic() - began < LONGEST_SECONDS:
                peak = max(peak, memory_mb(process.pid))
                if any(
                    served_port(line)
                    for line in (scratch / "output").read_text(errors="replace").splitlines()
                ):
                    break
                time.sleep(0.05)
            seconds, status = time.monotonic() - began, process.poll()
        finally:
            process.terminate() if process.poll() is None else None
            process.wait()
        lines = (scratch / "output").read_text(errors="replace").splitlines()
    refusal = lines[-1] if lines and status else ""
    return {
        "seconds": round(seconds, 1),
        "mb": peak,
        "status": status,
        "line": refusal,
        "traceback": any("Traceback" in x for x in lines),
    }


def problem(result: dict[str, Any]) -> str:
    """What is wrong with a result; empty if nothing is."""
    if result["seconds"] > SECONDS or result["mb"] > BASE_MB + MEMORY_MB:
        return "too much"
    if result["status"] not in (0, None, 78):
        return "wrong status"
    named = any(name in result["line"] for name in (*FILES, "config.json", "FOLDER: transformer"))
    return (
        "no line"
        if result["status"] == 78
        and (result["traceback"] or not named or len(result["line"]) > LONGEST_LINE)
        else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=["serve"])
    parser.add_argument("--cases", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results, console = [], Console(width=200)
    table = Table("command", "case", "status", "s", "MB", "problem", "line", box=None)
    for name, change in cases():
        if not name.startswith(tuple(options.cases)):
            continue
        for command in options.commands:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(shutil.copytree(EMBEDDED, Path(scratch) / "model"))
                change(folder)
                # A model that has several heads to convert.
                if command == "convert" and not name.endswith(": config.json"):
                    with contextlib.suppress(OSError, ValueError):
                        values("config.json", multi_query=False)(folder)
                result = {"command": command, "case": name} | run(command, folder, Path(scratch))
            result["line"] = result["line"].replace(str(folder), "FOLDER")
            result["problem"] = problem(result)
            results.append(result)
            table.add_row(
                *(
                    str(result[key])
                    for key in ("command", "case", "status", "seconds", "mb", "problem", "line")
                )
            )
    console.print(table)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    sys.exit(any(result["problem"] for result in results))


if __name__ == "__main__":
    main()
