"""One safetensors file: its header is checked in full before any weights are read, its tensors are
read directly into place.

The format forbids duplicate names and gaps, and loaders disagree about files that have them; here
such a file is refused. Invariant: a file that passes `open_safetensors` holds every byte that
its header describes. It knows nothing of models.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.checkpoint.files import SAFETENSORS, Stored, TensorFile, first_bytes, other_kind
from model.spec import CheckpointError

MAX_HEADER_BYTES = 2**24
"""The format allows 100 MB, which would take half a minute and 1.5 GB to check."""
LENGTH_BYTES = 8
"""Of the number that a file begins with: the bytes of its header."""
METADATA = "__metadata__"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes that weights can have."""


def open_safetensors(path: Path) -> TensorFile:
    """Reads and checks the header. Raises CheckpointError naming the file and what is wrong with
    it.
    """
    try:
        header, begin = _header(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except CheckpointError as error:
        found = other_kind(first_bytes(path))
        raise CheckpointError(
            f"{path}: {error if found in (None, SAFETENSORS) else f'is {found}'}"
        ) from None
    entries = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        entries[name] = Stored(entry["dtype"], shape, end - first, begin + first, path, name)
    return TensorFile(path, entries, begin)


class SafetensorsTensor:
    """The Reader of a tensor in a safetensors file."""

    def __init__(self, stored: Stored) -> None:
        self.entry = self.stored = stored
        self.paths = [stored.path]

    def read(self, into: Tensor, first: int = 0) -> None:
        """Reads elements into place; see Reader."""
        self.stored.read(bytes_of(into), first * into.itemsize)
        with named(self.stored.path, self.stored.name):
            check_finite(into)

    def raw_blocks(self) -> None:
        """None: nothing is stored in GGUF's blocks."""


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors that a file describes, and where their data begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"its header says it is {length} bytes long; at most {MAX_HEADER_BYTES} are read. "
                "Is this a safetensors file?"
            )
        try:
            # Refuses gaps, overlaps, sizes that do not fit, and data that do not end the file.
            with safe_open(path, "np"):
                header = json.loads(file.read(length), object_pairs_hook=_no_duplicates)
        except (SafetensorError, ValueError) as error:
            size = os.fstat(file.fileno()).st_size
            raise CheckpointError(
                f"{error}; its {size} bytes are truncated or damaged, or not a safetensors file"
            ) from None
        header.pop(METADATA, None)
        return header, file.tell()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise CheckpointError(f"{name[:80]!r} occurs twice in the header")
        values[name] = value
    return values


@contextmanager
def named(path: Path, name: str) -> Iterator[None]:
    """Puts the names of the file and the tensor before an error about its values."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {name} {error}") from None


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(cast(Any, tensor.view(-1).view(torch.uint8).numpy()))


def check_finite(tensor: Tensor) -> None:
    """Raises CheckpointError for NaN and infinity."""
    # aminmax makes no copy, and returns NaN for both if there is one.
    if tensor.numel() and not all(bound.isfinite() for bound in torch.aminmax(tensor)):
        raise CheckpointError("holds NaN or infinity; the file is damaged")
