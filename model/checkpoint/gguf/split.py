"""A checkpoint in one GGUF file, or in the files that llama.cpp's gguf-split makes of one:
NAME-00001-of-00003.gguf and so on.

Invariant: the parts belong together, which is checked by their names, the key split.count and the
names of their tensors. It imports no torch.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.config import short
from model.checkpoint.files import Stored, first_bytes, united
from model.checkpoint.gguf.header import MAGIC, MAX_HEADER_BYTES, GGUFFile
from model.checkpoint.gguf.metadata import Value
from model.spec import CheckpointError

SUFFIX = ".gguf"
MAX_FILES = 999
MAX_LISTED = 20
"""The most names of files in a message."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """The paths of all parts of the checkpoint to which a file belongs, by its name, in order;
    [path] if it is no part. Raises CheckpointError.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= MAX_FILES:
        expected = f"expected one of at most {MAX_FILES} parts"
        raise CheckpointError(f"{path}: by its name part {match[2]} of {match[3]}; {expected}")
    names = (f"{match[1]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))
    return [path.with_name(name) for name in names]


def gguf_in(folder: Path) -> Path | None:
    """The file, or the first part, of the one GGUF checkpoint in a folder, by the names or, where
    none is a GGUF file's, by the first bytes of files; None if the folder has none, or safetensors
    files, which come first. Raises CheckpointError if it has several.
    """
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    found = sorted({part_paths(folder / name)[0] for name in names if name.endswith(SUFFIX)})
    found = found or [folder / n for n in names if first_bytes(folder / n).startswith(MAGIC)]
    if len(found) > 1:
        names = [path.name for path in found[:MAX_LISTED]]
        expected = f"expected one, or the name of the file: {', '.join(names)}"
        raise CheckpointError(f"{folder}: has {len(found)} GGUF checkpoints; {expected}")
    return found[0] if found else None


@dataclass(frozen=True, slots=True)
class GGUF:
    """A GGUF checkpoint whose headers have been checked. `files`: its parts in order; `tensors`:
    its tensors by the name they have there.
    """

    files: list[GGUFFile]
    tensors: dict[str, Stored]

    @property
    def path(self) -> Path:
        """The first file."""
        return self.files[0].path

    @property
    def metadata(self) -> dict[str, Value]:
        """The metadata, which the first file has."""
        return self.files[0].metadata

    @classmethod
    def open(cls, path: Path) -> "GGUF":
        """Opens the checkpoint to which a file belongs, whichever part that is. Raises
        CheckpointError naming the file that is wrong.
        """
        paths = part_paths(path)
        return cls(*united((_part(path, part, len(paths)) for part in paths), MAX_HEADER_BYTES))


def _part(path: Path, part: Path, count: int) -> GGUFFile:
    """Opens one of the `count` parts to which the file at `path` belongs."""
    if not part.exists():
        one_of = f"; {path.name} is one of {count} parts" if count > 1 else ""
        raise CheckpointError(f"{part}: no such file{one_of}")
    file = GGUFFile.open(part)
    if (found := file.metadata.get("split.count") or 1) != count:
        expected = f"expected {count} by its name; parts of a split file keep theirs"
        raise CheckpointError(f"{part}: split.count is {short(found)}, {expected}")
    return file
