"""A checkpoint in one GGUF file, or in the files that llama.cpp's gguf-split makes of one: NAME-00001-of-00003.gguf and so on.

Invariant: the parts belong together, which is checked by their names, their split.* keys and their tensors. It imports no torch.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.config import Config, short
from model.checkpoint.files import first_bytes
from model.checkpoint.gguf.header import MAGIC, MAX_HEADER_BYTES, MAX_TENSORS, GGUFFile
from model.checkpoint.gguf.metadata import Value
from model.spec import CheckpointError

SUFFIX = ".gguf"
MAX_FILES = 999
MAX_LISTED = 20
"""The most names of files in a message."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_paths(path: Path) -> list[Path]:
    """The paths of all parts of the checkpoint to which a file belongs, by its name, in order; [path] if it is no part."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= MAX_FILES:
        raise CheckpointError(f"{path}: by its name part {match[2]} of {match[3]}; expected one of at most {MAX_FILES} parts")
    return [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def gguf_in(folder: Path) -> Path | None:
    """The file, or the first part, of the one GGUF checkpoint in a folder, by the names or, where none is a GGUF file's, by the first bytes
    of files; None if the folder has none, or safetensors files, which come first. Raises CheckpointError if it has several.
    """
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    found = sorted({part_paths(folder / name)[0] for name in names if name.endswith(SUFFIX)})
    found = found or [folder / name for name in names if first_bytes(folder / name).startswith(MAGIC)]
    if not found:
        return None
    if len(found) > 1:
        names = [path.name for path in found[:MAX_LISTED]]
        raise CheckpointError(f"{folder}: has {len(found)} GGUF checkpoints; expected one, or the name of the file: {', '.join(names)}")
    return found[0]


@dataclass(frozen=True, slots=True)
class GGUF:
    """A GGUF checkpoint whose headers have been checked. `files`: its parts in order; `tensors`: the file of each tensor, by the name it
    has there, so that `tensors[name].entries[name]` is its entry.
    """

    files: tuple[GGUFFile, ...]
    tensors: dict[str, GGUFFile]

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
        """Opens the checkpoint to which a file belongs, whichever part that is. Raises CheckpointError naming the file that is wrong."""
        paths, files, header_bytes = part_paths(path), [], 0
        tensors: dict[str, GGUFFile] = {}
        for number, part in enumerate(paths):
            if not part.exists():
                raise CheckpointError(f"{part}: no such file" + (f"; {path.name} is one of {len(paths)} parts" if len(paths) > 1 else ""))
            file = GGUFFile.open(part)
            _check_part(file, number, len(paths))
            header_bytes += file.header_bytes
            if header_bytes > MAX_HEADER_BYTES or len(tensors) + len(file.entries) > MAX_TENSORS:
                bounds = f"{MAX_TENSORS} tensors and {MAX_HEADER_BYTES} bytes of headers"
                raise CheckpointError(f"{part}: with the files before it, it has more than the {bounds} that are read of a checkpoint")
            for name in file.entries:
                if name in tensors:
                    raise CheckpointError(f"{part}: tensor {name} occurs in {tensors[name].path.name} too")
                tensors[name] = file
            files.append(file)
        count = files[0].metadata.get("split.tensors.count")
        if len(files) > 1 and count != len(tensors):
            raise CheckpointError(f"{files[0].path}: split.tensors.count is {short(count)}, the {len(files)} files have {len(tensors)}")
        return cls(tuple(files), tensors)


def _check_part(file: GGUFFile, number: int, count: int) -> None:
    """Raises CheckpointError unless a file's keys say that it is this part, counted from 0, of so many."""
    metadata = Config(file.metadata, str(file.path))
    for key, expected in (("split.no", number), ("split.count", count)):
        found = metadata.integer(key, 0 if key == "split.no" else 1, least=0)
        if found != expected and not (key == "split.count" and found == 0 and count == 1):
            name = f"{file.path.name} is part {number + 1} of {count} by its name"
            raise CheckpointError(f"{file.path}: {key} is {found}, expected {expected}: {name}; files of a split checkpoint keep theirs")
