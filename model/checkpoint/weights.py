"""Safetensors or GGUF -> Decoder. Every missing, unexpected or misshapen tensor is an error that
names it, before any weights are read.

It knows files and names, and of families only the table of names. While loading, memory holds the
finished weights and one block more for each thread.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import accumulate, chain
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.compressed import with_compressed
from model.checkpoint.config import short
from model.checkpoint.families import family_of, weight_names
from model.checkpoint.files import (
    KINDS,
    LFS,
    MAX_TENSORS,
    MOST_CONFIG_BYTES,
    Stored,
    TensorFile,
    first_bytes,
    read_text,
)
from model.checkpoint.gguf.header import MAX_LISTED, gguf_in
from model.checkpoint.gguf.repack import kept_in, repack, repacks
from model.checkpoint.gguf.weights import gguf_tensors
from model.checkpoint.identity import INDEX, SINGLE, file_digest, weight_files
from model.checkpoint.mapped import MappedRows
from model.checkpoint.names import Entry, Part
from model.checkpoint.pooling import pooled_files
from model.checkpoint.reader import RawBlocks, Reader
from model.checkpoint.safetensors_file import DTYPES, SafetensorsTensor, named, open_safetensors
from model.decoder import Decoder, meta_decoder
from model.devices.blocks import FORMATS
from model.devices.products import Products
from model.devices.replacement import Held, RowMatrix, StoredTable, parameter
from model.spec import CheckpointError, ModelSpec, Pooling

# Buffers in older checkpoints: causal masks and rotary frequencies, which the decoder computes.
IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# The head of a tied checkpoint is the embedding; some files contain it a second time.
TIED_DUPLICATE = "lm_head.weight"
BARE = "embed_tokens.weight"
"""Tensor of a model that was saved without a head: the names of all lack the prefix `model.`."""
BLOCK_ELEMENTS = 2**17
"""Elements that are read and converted at a time by each thread; they fit a processor's cache."""
MAX_HEADERS_BYTES = 2**26
"""Of all files of a checkpoint together, whose headers are in memory while it is loaded."""
MANIFEST = "SHA256SUMS"
"""What `sha256sum *.safetensors *.gguf` prints. If a folder has it, its files are verified against
it."""


Report = Callable[[str, int, int], None]
"""(phase of loading, bytes done, bytes in total), with 0 bytes for a phase that is not counted."""


class Checkpoint:
    """The tensors of a folder, by name, with every header checked, those of linear layers after
    `pooling` too. Raises CheckpointError.
    """

    def __init__(self, folder: Path, pooling: Pooling | None = None) -> None:
        self.folder = folder
        self.tensors: Mapping[str, Reader]
        self.gguf = gguf_in(folder)
        if self.gguf is not None:
            self.tensors = gguf_tensors(self.gguf, folder)
            return
        names, index = weight_files(folder)
        found = _united(_opened(folder, name) for name in names)
        for name, file_name in index.items():
            if name not in found or found[name].path.name != file_name:
                raise CheckpointError(
                    f"{folder / INDEX}: tensor {short(name)} should be in {file_name}, and is not"
                )
        if BARE in found:
            found = {f"model.{name}": stored for name, stored in found.items()}
        for file_name in pooled_files(pooling):
            module, entries = Path(file_name).parent, _opened(folder, file_name).entries
            found |= {f"{module}.{name}": stored for name, stored in entries.items()}
        self.tensors = with_compressed(
            folder, {name: SafetensorsTensor(stored) for name, stored in found.items()}
        )

    def dtype(self, parts: tuple[Part, ...]) -> torch.dtype:
        """The dtype that holds the numbers of all of these."""
        entries = (self.tensors[part.name].entry for part in parts)
        return reduce(torch.promote_types, (DTYPES[entry.dtype] for entry in entries))

    def read(self, part: Part) -> Tensor:
        """A whole part in the decoder's layout and the checkpoint's dtype. Raises CheckpointError,
        also for NaN and infinity.
        """
        reader = self.tensors[part.name]
        tensor = torch.empty(reader.entry.shape, dtype=DTYPES[reader.entry.dtype])
        reader.read(tensor)
        return tensor.T if part.transposed else tensor

    def blocks(self, part: Part) -> Iterator[Tensor]:
        """The same in blocks of rows. A block is overwritten by the next."""
        if part.transposed:  # No block of rows is contiguous in the file.
            yield self.read(part)
            return
        reader = self.tensors[part.name]
        entry = reader.entry
        num_rows, columns = entry.shape[0], prod(entry.shape[1:])
        scratch = torch.empty(
            max(1, min(num_rows, BLOCK_ELEMENTS // max(1, columns))),
            *entry.shape[1:],
            dtype=DTYPES[entry.dtype],
        )
        for first in range(0, num_rows, len(scratch)):
            block = scratch[: num_rows - first]
            reader.read(block, first * columns)
            yield block

    def raw_blocks(self, part: Part) -> RawBlocks | None:
        """The rows of a part as GGUF's quantization blocks; see Reader.raw_blocks."""
        return None if part.transposed else self.tensors[part.name].raw_blocks()

    def stored(self, part: Part) -> Stored:
        """Where a part lies as it is in one file. Raises CheckpointError where it does not."""
        reader = self.tensors[part.name]
        if reader.stored is None:
            raise CheckpointError(
                f"{reader.paths[0]}: {part.name} is packed; a CPU reads its rows where "
                "they lie, so that table must be one tensor of floats"
            )
        return reader.stored

    def held_as(self, part: Part) -> Held:
        """The format that holds the blocks of a GGUF file's matrix, else the dtype."""
        raw = self.raw_blocks(part) if self.gguf else None
        return self.dtype((part,)) if raw is None else FORMATS[kept_in(raw[0])]

    def verify(self) -> None:
        """Verifies the files against the folder's manifest, if it has one. Raises CheckpointError
        naming a file that differs.
        """
        manifest = self.folder / MANIFEST
        if (text := read_text(manifest, MOST_CONFIG_BYTES)) is None:
            return
        lines = (line.strip().partition(" ") for line in text.splitlines())
        sums = {name.strip().lstrip("*"): digest for digest, _, name in lines}
        for path in sorted({path for reader in self.tensors.values() for path in reader.paths}):
            nested = path.parent.parent == self.folder
            name = f"{path.parent.name}/{path.name}" if nested else path.name
            if name not in sums:
                raise CheckpointError(
                    f"{manifest}: says nothing of {name}; remove it, or write it anew with "
                    "sha256sum"
                )
            if file_digest(path) != sums[name].lower():
                raise CheckpointError(
                    f"{path}: its contents are not what {MANIFEST} says; fetch the file again"
                )


def _opened(folder: Path, name: str) -> TensorFile:
    if not (folder / name).is_file():
        raise CheckpointError(f"{folder / name}: no such file{_hint(folder)}")
    return open_safetensors(folder / name)


def _united(files: Iterable[TensorFile]) -> dict[str, Stored]:
    """The tensors of the files of one checkpoint, which are opened one after the other. Raises
    CheckpointError for a name that occurs twice, and for more than MAX_TENSORS tensors or
    MAX_HEADERS_BYTES of headers.
    """
    tensors: dict[str, Stored] = {}
    header_bytes = 0
    for file in files:
        header_bytes += file.header_bytes
        if header_bytes > MAX_HEADERS_BYTES or len(tensors) + len(file.entries) > MAX_TENSORS:
            raise CheckpointError(
                f"{file.path}: with the files before it, it has more than the {MAX_TENSORS} "
                f"tensors and {MAX_HEADERS_BYTES} bytes of headers that are read of a checkpoint"
            )
        for name, tensor in file.entries.items():
            if (other := tensors.setdefault(name, tensor)) is not tensor:
                raise CheckpointError(f"{file.path}: tensor {name} occurs in {other.path.name} too")
    return tensors


def load_decoder(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    products: Products | None = None,
    report: Report = lambda *_: None,
) -> Decoder:
    """The decoder of a checkpoint folder with its weights on `device`, in `dtype` or as `products`
    (torch's, not quantized, by default) stores them. Raises CheckpointError.
    """
    products = products or Products()
    checkpoint = Checkpoint(folder, spec.pooling)
    decoder = meta_decoder(spec)
    names = weight_names(spec)
    entries = {name: reader.entry for name, reader in checkpoint.tensors.items()}
    check_tensors(folder, decoder, entries)
    sizes = [sum(entries[part.name].num_bytes for part in parts) for parts in names.values()]
    # Before the digests of the manifest, which take as long as reading.
    report("loading weights", 0, total := sum(sizes))
    checkpoint.verify()
    check_tied(checkpoint, spec, names["token_embedding.weight"][0])
    products.replace(decoder, dtype)
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads if device.type == "cpu" else 1)
    try:
        torch.set_num_threads(
            1
            # Operations on blocks that fit a cache gain nothing from more; parameters are read
            # beside one another.
        )
        keeps = products.keeps_blocks
        loaded = pool.map(
            lambda ours: _put(decoder, ours, checkpoint, names[ours], dtype, device, keeps), names
        )
        for done, forms in zip(accumulate(sizes), loaded, strict=True):
            decoder.block_forms.update(forms if keeps else ())
            report("loading weights", done, total)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
    products.finish(decoder)
    return decoder.requires_grad_(False).eval()


def _put(
    decoder: Decoder,
    name: str,
    checkpoint: Checkpoint,
    parts: tuple[Part, ...],
    dtype: torch.dtype,
    device: torch.device,
    keeps_blocks: bool,
) -> list[str]:
    """Reads the values of one parameter, quantized if its module is. Memory holds them and one
    block more. -> the names of the formats that its parts are in, where these are in blocks
    """
    module_name, _, leaf = name.rpartition(".")
    module = decoder.get_submodule(module_name)
    if isinstance(module, StoredTable):
        module.rows = MappedRows(checkpoint.stored(parts[0]))
        return []
    if isinstance(module, RowMatrix) and leaf == "weight":
        stored = checkpoint.dtype(parts)
        held = [checkpoint.held_as(part) if keeps_blocks else stored for part in parts]
        matrices = module.divided(
            [(part.rows or 0, kind) for part, kind in zip(parts, held, strict=True)]
        )
        shares = [parts] if len(matrices) == 1 else [(part,) for part in parts]
        for matrix, kind, share in zip(matrices, held, shares, strict=False):
            matrix.allocate(device, kind)
            _put_rows(matrix, checkpoint, share)
        return [
            matrix.form.name
            for matrix, share in zip(matrices, shares, strict=True)
            if matrix.form
            for _ in share
        ]
    value = torch.empty(getattr(module, leaf).shape, dtype=dtype, device=device)
    setattr(module, leaf, parameter(value))
    first = 0
    for block in _blocks(checkpoint, parts, dtype):
        value[first : first + len(block)] = block
        first += len(block)
    return []


def _put_rows(matrix: RowMatrix, checkpoint: Checkpoint, parts: tuple[Part, ...]) -> None:
    """Reads a matrix: the checkpoint's blocks where its format can hold them, else floats."""
    first = 0
    for part in parts:
        raw = checkpoint.raw_blocks(part)
        if matrix.form is None:
            put, blocks = matrix.set_rows, _blocks(checkpoint, (part,), matrix.weight.dtype)
        elif raw is not None and repacks(raw[0], matrix.form.name):
            path = checkpoint.tensors[part.name].paths[0]
            put, blocks = matrix.set_blocks, _repacked(path, part.name, raw, matrix.form.name)
        else:
            put, blocks = matrix.set_rows, checkpoint.blocks(part)
        for rows in blocks:
            put(first, rows)
            first += len(rows)


def _repacked(path: Path, name: str, raw: RawBlocks, form: str) -> Iterator[Tensor]:
    kind, blocks = raw
    for rows in blocks:
        with named(path, name):
            rows = repack(kind, form, rows)
        yield rows


def _blocks(
    checkpoint: Checkpoint, parts: tuple[Part, ...], dtype: torch.dtype
) -> Iterator[Tensor]:
    """The rows of parts, as they are stored. Raises CheckpointError for numbers that `dtype` cannot
    hold.
    """
    for block in chain.from_iterable(map(checkpoint.blocks, parts)):
        if dtype is not block.dtype and not block.to(dtype).isfinite().all():
            raise CheckpointError(
                f"{checkpoint.folder}: {parts[0].name} is beyond the range of {dtype}; take "
                "another engine.dtype"
            )
        yield block


def check_tensors(where: Path, decoder: Decoder, found: Mapping[str, Entry]) -> None:
    """Raises CheckpointError unless a checkpoint has exactly this decoder's tensors, in their
    shapes.
    """
    spec, parameters, expected = decoder.spec, dict(decoder.named_parameters()), {}
    for ours, parts in weight_names(spec).items():
        for part in parts:
            rows, *columns = parameters[ours].shape
            shape = (part.rows or rows, *columns)
            expected[part.name] = shape[::-1] if part.transposed else shape
    for name, entry in found.items():
        if name not in expected:
            if not is_ignored(name, spec):
                raise CheckpointError(
                    f"{where}: unexpected tensor {name}; a {spec.model_type} of this config has "
                    "none of that name"
                )
            continue
        if entry.shape != expected[name]:
            raise CheckpointError(
                f"{where}: {name} has shape {list(entry.shape)}, expected {list(expected[name])} "
                "by config.json"
            )
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{where}: {name} has dtype {entry.dtype}, expected one of {', '.join(DTYPES)}"
            )
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{where}: missing tensor {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )


def is_ignored(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor is known to occur in checkpoints without being a parameter of the
    decoder.
    """
    if name.endswith(IGNORED_SUFFIXES) or (name == TIED_DUPLICATE and spec.tied_embeddings):
        return True
    family = family_of(spec.model_type)
    if hasattr(family, "is_ignored") and family.is_ignored(name, spec):
        return True
    layer = re.match(r"model\.layers\.(\d{1,5})\.", name)
    return layer is not None and 0 <= int(layer[1]) - spec.num_layers < spec.num_unread_layers


def check_tied(checkpoint: Checkpoint, spec: ModelSpec, embedding: Part) -> None:
    """Raises CheckpointError if a head is stored that differs from the embedding to which it is
    tied.
    """
    if not spec.tied_embeddings or TIED_DUPLICATE not in checkpoint.tensors:
        return
    head = Part(TIED_DUPLICATE)
    entries = [checkpoint.tensors[part.name].entry for part in (head, embedding)]
    kinds = {(entry.dtype, entry.shape) for entry in entries}
    rows = zip(checkpoint.blocks(head), checkpoint.blocks(embedding), strict=True)
    if len(kinds) > 1 or not all(torch.equal(a, b) for a, b in rows):
        raise CheckpointError(
            f"{checkpoint.folder}: {head.name} differs from {embedding.name}, to which "
            "config.json ties it; expected the same values, or tie_word_embeddings false"
        )


def _hint(folder: Path) -> str:
    """What to do if the folder has weights under other names or in another format."""
    if names := sorted(path.name for path in folder.glob("*.safetensors")):
        return (
            f"; the folder has {', '.join(names[:MAX_LISTED])}: expected {SINGLE}, every shard "
            f"of one checkpoint, or {INDEX}"
        )
    if others := [p for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")]:
        found = next((path for path in others if path.name.startswith("pytorch_model")), others[0])
        if first_bytes(found).startswith(LFS):
            return f"; found {found.name}, {KINDS[LFS]}"
        renamed = "" if found.name.startswith("pytorch_model") else "named pytorch_model.bin, "
        way_out = (
            f"{renamed}`onehead convert --model {folder} --output NEW` makes safetensors of it"
        )
        return f"; found {found.name}, which may run code when it is read: {way_out}"
    return ""
