"""GGUF files made by chance to cost time and memory, to crash, or to be read wrongly: each must be
refused in one line, or read as it is.

    python -m tests.trials.hostile_gguf [--count 1000] [--seed 0] [--folder FOLDER]

A tiny checkpoint is changed at random: counts, lengths, types, names, offsets, dimensions and
values of its header, strings of 2**63 bytes, bits, truncation. Each file is loaded to a decoder in
a process of its own, within 10 s of processor time and 192 MiB of address space more than the
process had before and twice the file. It passes if loading raises a CheckpointError of one line
that names the file, or if every tensor then has the type, shape and bytes that the `gguf` package
finds. Exit status 1 if a file did neither; those are kept in FOLDER.
"""

import argparse
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from rich.console import Console
from rich.table import Table

from model.checkpoint.families import spec_of
from model.checkpoint.gguf.config import config_of
from model.checkpoint.gguf.header import GGUFFile
from model.checkpoint.gguf.types import BLOCK_TYPES
from model.checkpoint.weights import load_decoder
from model.spec import CheckpointError
from tests.support.families import CONFIGS
from tests.support.gguf_files import pair, raw_file, text
from tests.support.gguf_models import make_folder, write_gguf

SECONDS, MEMORY_BYTES, LONGEST_LINE = 10, 192 * 2**20, 600
CRASHED, WRONG, TOO_LONG = 3, 4, 5
EVIL = (
    0,
    1,
    2,
    7,
    31,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64 - 8,
)
TEXTS = (
    "",
    "x",
    "\0",
    "a\nb",
    "é" * 40,
    "x" * 5000,
    "blk.0.attn_q.weight",
    "blk.999999.attn_q.weight",
    "\ufeff",
    "..",
    "%s%s%n",
)


@dataclass
class Parts:
    """What a file is made of: packed metadata pairs, descriptions of tensors (name, dimensions,
    type, offset), and data.
    """

    pairs: list[bytes]
    tensors: list[list[Any]]
    data: bytes
    says: dict[str, int] = field(default_factory=dict)

    def packed(self) -> bytes:
        """The file, with each number cut to the bits of its field."""
        described = [
            text(name)
            + struct.pack(
                f"<I{len(shape)}QIQ",
                len(shape),
                *(n % 2**64 for n in shape),
                kind % 2**32,
                offset % 2**64,
            )
            for name, shape, kind, offset in self.tensors
        ]
        return raw_file(self.pairs, described, self.data, **self.says)


def base(folder: Path, family: str, kind: str) -> Parts:
    """A small checkpoint as llama.cpp's converter writes it."""
    make_folder(folder / "source", CONFIGS[family][0] | {"vocab_size": 40})
    write_gguf(
        folder / "source",
        folder / "base.gguf",
        kind,
        tokens=["a", "bc", ""],
        numbers=[1.5, 2.5],
        flag=True,
    )
    file = GGUFFile.open(folder / "base.gguf")
    number = {found.name: number for number, found in BLOCK_TYPES.items()}
    tensors = [
        [name, [*entry.shape[::-1]], number[entry.dtype], entry.begin - file.header_bytes]
        for name, entry in file.entries.items()
    ]
    pairs = [
        pair(key, value if isinstance(value, bool | int | float | str) else list(value))
        for key, value in file.metadata.items()
    ]
    return Parts(pairs, tensors, (folder / "base.gguf").read_bytes()[file.header_bytes :])


def _counts(parts: Parts, rng: random.Random) -> None:
    parts.says[rng.choice(["says_tensors", "says_keys"])] = rng.choice(EVIL) % 2**64


def _value(parts: Parts, rng: random.Random) -> None:
    """Another value, of the same or another type, for a key that there is."""
    place = rng.randrange(len(parts.pairs))
    (length,) = struct.unpack_from("<Q", parts.pairs[place])
    key = parts.pairs[place][8 : 8 + length]
    values: list[bytes] = [
        pair(key, rng.choice(EVIL), 10),
        pair(key, rng.choice(EVIL) % 2**32, 4),
        pair(key, rng.choice([float("nan"), float("inf"), -1.0, 0.0, 1e38, 1e-45]), 6),
        pair(key, rng.choice(TEXTS)),
        pair(key, [rng.choice(TEXTS) for _ in range(rng.randrange(5))]),
        pair(key, [1, 2, 3]),
        text(key) + struct.pack("<IB", 7, rng.randrange(256)),
    ]
    parts.pairs[place] = rng.choice(values)


def _malformed(parts: Parts, rng: random.Random) -> None:
    """A value that its type cannot have, or with a length beyond the file."""
    evil = struct.pack("<Q", rng.choice(EVIL))
    found = rng.choice(
        [
            struct.pack("<I", 8) + evil,
            struct.pack("<I", 8) + text(b"\xff\xfe\xc3"),
            struct.pack("<II", 9, rng.choice([0, 4, 6, 7, 8, 9, 10, 12, 13])) + evil,
            struct.pack("<IIQ", 9, 8, 2) + evil,
            struct.pack("<IIQIQ", 9, 9, 1, 9, 1) * 50,
            struct.pack("<I", rng.choice([13, 99, 2**32 - 1])),
        ]
    )
    parts.pairs.insert(
        rng.randrange(len(parts.pairs) + 1),
        text(rng.choice(["k", "general.alignment", "", "k" * 300])) + found,
    )


def _key(parts: Parts, rng: random.Random) -> None:
    keys = [
        "general.alignment",
        "split.count",
        "general.type",
        "llama.expert_count",
        "llama.rope.scaling.type",
    ]
    made = pair(rng.choice(keys), rng.choice([rng.choice(EVIL) % 2**32, "yarn", [True]]))
    rng.choice([parts.pairs.append, lambda found: parts.pairs.insert(0, found)])(made)


def _missing(parts: Parts, rng: random.Random) -> None:
    found: list[Any] = rng.choice([parts.pairs, parts.tensors])
    del found[rng.randrange(len(found))]


def _twice(parts: Parts, rng: random.Random) -> None:
    found: list[Any] = rng.choice([parts.pairs, parts.tensors])
    found.insert(rng.randrange(len(found)), rng.choice(found))


def _offset(parts: Parts, rng: random.Random) -> None:
    found = rng.choice(parts.tensors)
    found[3] = rng.choice(
        [
            found[3] + rng.choice([1, 4, -4, 32, -32, 2**40]),
            rng.choice(parts.tensors)[3],
            rng.choice(EVIL),
        ]
    )


def _shape(parts: Parts, rng: random.Random) -> None:
    found = rng.choice(parts.tensors)
    changes: list[Callable[[list[int]], list[int]]] = [
        lambda shape: shape[::-1],
        lambda shape: [*shape, 1],
        lambda shape: [rng.choice(EVIL), *shape[1:]],
        lambda shape: [*shape[:-1], rng.choice(EVIL)],
        lambda shape: [2**32, 2**32, *shape],
        lambda shape: [],
        lambda shape: [1] * rng.choice([4, 5, 1000]),
        lambda shape: [shape[0] * 2, *shape[1:]],
    ]
    found[1] = rng.choice(changes)(found[1])


def _kind(parts: Parts, rng: random.Random) -> None:
    rng.choice(parts.tensors)[2] = rng.choice([*range(45), 2**31, 2**32 - 1])


def _name(parts: Parts, rng: random.Random) -> None:
    rng.choice(parts.tensors)[0] = rng.choice([*TEXTS, rng.choice(parts.tensors)[0]])


def _swap(parts: Parts, rng: random.Random) -> None:
    """Two tensors change places in the header, or names."""
    one, other = rng.sample(range(len(parts.tensors)), 2)
    if rng.random() < 0.5:
        parts.tensors[one], parts.tensors[other] = parts.tensors[other], parts.tensors[one]
    else:
        parts.tensors[one][0], parts.tensors[other][0] = (
            parts.tensors[other][0],
            parts.tensors[one][0],
        )


CHANGES = (
    _counts,
    _value,
    _malformed,
    _key,
    _missing,
    _twice,
    _offset,
    _shape,
    _kind,
    _name,
    _swap,
)


def _bytes(data: bytearray, rng: random.Random) -> bytearray:
    """Damage to the finished file."""
    header = len(data) // 3
    place = rng.randrange(max(1, rng.choice([24, header, len(data)])))
    how = rng.randrange(6)
    if how == 0:
        return data[:place]
    if how == 1:
        data[place : place + 8] = struct.pack("<Q", rng.choice(EVIL))
    elif how == 2:
        data[place : place + 4] = struct.pack("<I", rng.choice(EVIL) % 2**32)
    elif how == 3:
        del data[place : place + rng.choice([1, 4, 8, 32])]
    elif how == 4:
        data[place:place] = rng.randbytes(rng.choice([1, 4, 8, 32, 4096]))
    else:
        for _ in range(rng.choice([1, 2, 8, 64])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def mutant(bases: list[Parts], seed: int) -> tuple[str, bytes]:
    """(what was changed, the file)."""
    rng = random.Random(seed)
    found = rng.choice(bases)
    parts = Parts(list(found.pairs), [list(item) for item in found.tensors], found.data)
    changes = rng.sample(CHANGES, rng.choice([0, 1, 1, 1, 2, 3]))
    for change in changes:
        if parts.pairs and len(parts.tensors) > 1:
            change(parts, rng)
    data = parts.packed()
    damaged = not changes or rng.random() < 0.15
    return "+".join([change.__name__[1:] for change in changes] + ["bytes"] * damaged), bytes(
        _bytes(bytearray(data), rng)
    ) if damaged else data


def bombs(bases: list[Parts]) -> Iterator[tuple[str, bytes]]:
    """(name, file) of large files: what takes the most memory and time for its bytes."""
    llama = bases[0]
    for count, item in ((4_190_000, text("")), (3_300_000, text("é")), (200_000, text("é"))):
        strings = text("k") + struct.pack("<IIQ", 9, 8, count) + item * count
        yield f"{count} strings", Parts([*llama.pairs, strings], llama.tensors, llama.data).packed()
    yield (
        "33 million booleans",
        raw_file([text("k") + struct.pack("<IIQ", 9, 7, 33_000_000) + b"\1" * 33_000_000], []),
    )
    yield "a string of 40 MB", raw_file([pair("k", "x" * 40_000_000)], [])
    yield "65,536 keys", raw_file([pair(f"{number}", 1) for number in range(2**16)], [])
    many = [[f"{number:x}", [1], 0, 32 * number] for number in range(2**17)]
    yield "131,072 tensors", Parts(llama.pairs, many, bytes(32 * 2**17)).packed()


def load(path: Path) -> str:
    """Loads a file to a decoder. Returns the line of its refusal, "" if it was loaded. Raises
    AssertionError if the `gguf` package reads another one.
    """
    try:
        found = GGUFFile.open(path)
        config = config_of(found)
        (path.parent / "config.json").write_text(json.dumps(config))
        load_decoder(
            path.parent,
            spec_of(path.parent, config, warn=False),
            torch.float32,
            torch.device("cpu"),
        )
    except CheckpointError as error:
        return str(error)
    # The package takes seconds and gigabytes for a million strings.
    signal.setitimer(signal.ITIMER_PROF, 0)
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
    data = path.read_bytes()
    for item in GGUFReader(path).tensors:
        entry = found.entries[item.name]
        assert (entry.dtype, entry.shape) == (
            item.tensor_type.name,
            tuple(item.shape.tolist()[::-1]),
        ), item.name
        assert data[entry.begin : entry.begin + entry.num_bytes] == item.data.tobytes(), item.name
    return ""


def isolated(path: Path) -> tuple[int, str]:
    """`load` in a process of its own, within limits: (0 or what went wrong, its line)."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = CRASHED
        try:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            most = used + MEMORY_BYTES + 2 * path.stat().st_size
            resource.setrlimit(
                resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1])
            )
            line = load(path)
            os.write(writing, line.encode()[:4096])
            status = (
                TOO_LONG
                if len(line) > LONGEST_LINE
                or "\n" in line
                or (line and str(path.parent) not in line)
                else 0
            )
        except AssertionError as error:
            os.write(writing, f"read otherwise than gguf does: {error}".encode()[:4096])
            status = WRONG
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode()[:4096])
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as lines:
        line = lines.read().decode(errors="replace")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), line


def bases(folder: Path) -> list[Parts]:
    """The checkpoints that are changed."""
    made = []
    for family, kind in (
        ("llama", "Q8_0"),
        ("falcon", "F32"),
        ("gemma3_text", "Q4_0"),
        ("gemma4_text", "Q8_0"),
        ("santacoder", "F16"),
    ):
        (folder / family).mkdir()
        made.append(base(folder / family, family, kind))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("hostile-gguf"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # A forked process has none of the others.
    outcomes: Counter[str] = Counter()
    problems = Table("seed", "change", "status", "line", box=None)
    with tempfile.TemporaryDirectory() as scratch:
        found, path = bases(Path(scratch)), Path(scratch) / "model" / "m.gguf"
        path.parent.mkdir()
        seeds = range(options.seed, options.seed + options.count)
        for seed, (change, data) in chain(
            zip(seeds, (mutant(found, seed) for seed in seeds), strict=True),
            enumerate(bombs(found)),
        ):
            path.write_bytes(data)
            status, line = isolated(path)
            outcomes["problem" if status else "refused" if line else "loaded"] += 1
            if status:
                problems.add_row(str(seed), change, str(status), line)
                options.folder.mkdir(exist_ok=True)
                (options.folder / f"{seed}.gguf").write_bytes(data)
    console = Console(width=200)
    console.print(problems if problems.rows else "no problems")
    console.print(dict(outcomes))
    sys.exit(bool(problems.rows))


if __name__ == "__main__":
    main()
