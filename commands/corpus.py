"""Files of text to training sequences: the split, the tokenizer, fill-in-the-middle, packing.

Everything here is a pure function of the files and a seed, so a resumed run sees the data it would
have seen. It knows nothing of models; a sequence is a row of token ids.
"""

import hashlib
import json
import random
import sys
import sysconfig
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import numpy as np
from rich.filesize import decimal
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model.spec import CheckpointError, OptionError
from server.hub.tokenizer_file import tokenizer_path

END = "<|endoftext|>"
FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX = "<fim_prefix>", "<fim_middle>", "<fim_suffix>"
SPECIAL_TOKENS = (END, FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX, "<fim_pad>")
HELD_OUT_PERCENT = 5
LEAST_HELD_OUT, MOST_HELD_OUT = 0.01, 0.5
"""Shares of the text within which a choice of documents by name is kept."""
LICENCE_FILES = ("LICEN[CS]E*", "COPYING*", "NOTICE*")
NOT_DATA = (*LICENCE_FILES, "_sysconfigdata*")
# A fill-in-the-middle piece must fit into one training sequence: about 700 tokens of source.
FIM_PIECE_CHARS = 2200
ENCODED_TOGETHER = 1024
"""Texts that are tokenized at once, by all processors. The library's results take many times the
memory of their ids."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its name: a module's as an import statement would spell it, else the path of the
    file below its folder, with the line for one of several in a file.
    """

    name: str
    text: str
    is_end: bool | None = None
    """Of a document that `split` has cut: whether it is the end, which is held out."""
    prompt: str = ""
    """What stands before the text, and is read but not learnt."""

    @property
    def held_out(self) -> bool:
        """Whether a document is kept from training, a whole one by a hash of its name alone."""
        digest = hashlib.sha256(self.name.encode(errors="replace")).digest()
        by_name = int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT
        return by_name if self.is_end is None else self.is_end


def read_documents(place: Path | None) -> list[Document]:
    """The documents of every file of text below a folder, or of one file (None: of the standard
    library's modules), sorted by path. Says on standard error how much was read. Raises OptionError
    where there is no text.

    Left out of a folder: hidden files and folders, licences, installed packages, and files that the
    interpreter's own build wrote (they hold the paths of a machine).
    """
    root = place or Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise OptionError(f"data {root}: no such folder or file")
    documents: list[Document] = []
    empty: list[str] = []
    num_files = 0
    for path in [root] if root.is_file() else sorted(root.rglob("*" if place else "*.py")):
        relative = Path(path.name) if path == root else path.relative_to(root)
        if path.is_file() and (path == root or not _is_left_out(relative)):
            found = list(_documents(path, relative))
            documents += (with_text := [document for document in found if document.text])
            empty += [document.name for document in found if not document.text]
            num_files += bool(with_text)
    others = f"; {len(empty):,} left out as no text, such as {empty[0]}" if empty else ""
    if not documents:
        wanted = "files of text in UTF-8, of any name, and JSON lines with a `text`"
        raise OptionError(f"data {root}: holds no text; looked for {wanted}{others}")
    size = decimal(sum(len(document.text.encode()) for document in documents))
    print(
        f"read {num_files:,} file{'s' * (num_files > 1)}, {size} of text from {root}{others}",
        file=sys.stderr,
    )
    return documents


def _is_left_out(relative: Path) -> bool:
    parts = relative.parts
    hidden = "site-packages" in parts or any(part.startswith(".") for part in parts)
    return hidden or any(fnmatch(relative.name, pattern) for pattern in NOT_DATA)


def _documents(path: Path, relative: Path) -> Iterator[Document]:
    """The documents of a file: its text, empty for a binary one, or one for each of JSON lines, by
    which such a file is known, or by its name.
    """
    name, text = relative.as_posix(), _read(path)
    if text is None:
        yield Document(name, "")
    if not text or text.isspace():
        return
    lines = text.split("\n")
    if path.suffix in (".jsonl", ".ndjson") or _line(name, lines[0]).text:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _line(f"{name}:{number}", line)
        return
    if path.suffix == ".py":
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
    yield Document(name, text)


def _read(path: Path) -> str | None:
    """The text of a file; None for one that cannot be read, or holds something else."""
    try:
        data = path.read_bytes()
        is_wide = data.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
        text = data.decode("utf-16" if is_wide else "utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\0" in text else text


def _line(name: str, line: str) -> Document:
    """The document of a JSON object: its `text`, or its `completion` of a `prompt`. Empty where
    there is neither.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    prompt, text = "", None
    if isinstance(value, dict):
        prompt, text = value.get("prompt", ""), value.get("completion", value.get("text"))
    if not (isinstance(prompt, str) and isinstance(text, str) and text.strip()):
        return Document(name, "")
    # Half of a surrogate pair could not be tokenized.
    prompt, text = (part.encode(errors="replace").decode() for part in (prompt, text))
    return Document(name, text, prompt=prompt)


def split(parts: list[list[Document]]) -> list[list[Document]]:
    """The documents of each part, some of them held out: by their names or, where these give too
    small or too large a share of the text, the end of each document.
    """
    total = sum(len(document.text) for document in chain(*parts))
    held_out = sum(len(document.text) for document in chain(*parts) if document.held_out)
    if LEAST_HELD_OUT * total <= held_out <= MOST_HELD_OUT * total:
        return parts
    return [[*chain(*map(_cut, part))] for part in parts]


def _cut(document: Document) -> list[Document]:
    """A document without its end, and the end, which begins with a line where there is one near."""
    name, text = document.name, document.text
    cut = len(text) * (100 - HELD_OUT_PERCENT) // 100
    cut = text.rfind("\n", cut * 9 // 10, cut) + 1 or cut
    begin = Document(name, text[:cut], False, document.prompt)
    parts = begin, Document(f"{name}, its end", text[cut:], True)
    return [part for part in parts if part.text.strip()]


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with StarCoder's special tokens; digits stand alone, nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token. Raises OptionError where the tokenizer has none."""
    id: int | None = tokenizer.token_to_id(token)
    if id is None:
        raise OptionError(f"the tokenizer has no token {token}")
    return id


def fim_rate(asked: float | None, tokenizer: Tokenizer) -> float:
    """The share of documents to rearrange: as asked, else 0.3 where the tokenizer has the marks.
    Raises OptionError where it must not.
    """
    has_marks = all(
        tokenizer.token_to_id(mark) is not None for mark in (FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX)
    )
    if asked and not has_marks:
        raise OptionError(
            f"fim_rate {asked} needs the tokens {FIM_PREFIX}, {FIM_MIDDLE} and {FIM_SUFFIX}, "
            "which the tokenizer lacks"
        )
    return (0.3 if has_marks else 0.0) if asked is None else asked


def fim_pieces(text: str, rng: random.Random) -> Iterator[str]:
    """`text` cut into pieces at line ends, each as prefix-suffix-middle (Bavarian et al. 2022): the
    middle comes last.
    """
    start = 0
    while start < len(text):
        end = text.rfind("\n", start + 1, start + FIM_PIECE_CHARS) + 1 or start + FIM_PIECE_CHARS
        piece = text[start:] if start + FIM_PIECE_CHARS >= len(text) else text[start:end]
        start += len(piece)
        a, b = sorted(rng.randrange(len(piece) + 1) for _ in range(2))
        yield f"{FIM_PREFIX}{piece[:a]}{FIM_SUFFIX}{piece[b:]}{FIM_MIDDLE}{piece[a:b]}"


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises CheckpointError, and ConfigurationError if there
    is none.
    """
    path = tokenizer_path(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
        added = tokenizer.encode("").ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # The library raises Exception itself, and BaseException.
        raise CheckpointError(
            f"{path}: expected a tokenizer that this version can read ({error})"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # The post-processor adds ids that need not be in the vocabulary.
    if (
        largest := max([*added, *tokenizer.get_vocab(with_added_tokens=True).values()])
    ) >= vocab_size:
        raise CheckpointError(
            f"{path}: has ids up to {largest}, expected less than the vocab_size {vocab_size} of "
            "config.json"
        )
    return tokenizer


def token_stream(
    documents: list[Document],
    tokenizer: Tokenizer,
    end_ids: tuple[int, ...],
    fim_rate: float,
    seed: int,
) -> np.ndarray:
    """The documents in an order drawn from `seed`, laid end to end as token ids, each opened as the
    tokenizer opens a text and closed by the first of `end_ids`. dtype int32; ~id of a token that is
    read but not learnt, as the opening and a prompt are.
    """
    rng = random.Random(seed)
    texts: list[tuple[str, str]] = []
    for document in rng.sample(documents, len(documents)):
        is_cut = rng.random() < fim_rate and not document.prompt
        pieces = fim_pieces(document.text, rng) if is_cut else [document.text]
        texts.extend((document.prompt, piece) for piece in pieces)
    end, parts = np.asarray(end_ids[:1], dtype=np.int32), []
    for first in range(0, len(texts), ENCODED_TOGETHER):
        together = texts[first : first + ENCODED_TOGETHER]
        openings = tokenizer.encode_batch_fast([prompt for prompt, _ in together])
        bodies = tokenizer.encode_batch_fast(
            [text for _, text in together], add_special_tokens=False
        )
        for opening, body in zip(openings, bodies, strict=True):
            parts += [~np.asarray(opening.ids, np.int32), np.asarray(body.ids, np.int32), end]
    return np.concatenate([*parts, end[:0]])


def sequences(stream: np.ndarray, length: int, seed: int, end_id: int | None = None) -> np.ndarray:
    """Rows of `length + 1` ids (inputs and shifted targets overlap), cut at an offset and shuffled
    by `seed`. With an `end_id`, a row begins with a document that begins in its first quarter, and
    overlaps the next one by what it left out before: a model that is served reads texts from their
    beginning, never from their middle. Another seed leaves out other ends.
    """
    rng = np.random.default_rng(seed)
    offset = int(rng.integers(0, min(length, max(1, len(stream) - length - 1))))
    count = (len(stream) - offset - 1) // length
    starts = offset + length * rng.permutation(count)
    begins = np.flatnonzero(stream[: -length - 1] == end_id) + 1
    nearby = np.append(begins, len(stream))[np.searchsorted(begins, starts)]
    starts = np.where(nearby - starts < length // 4, nearby, starts)
    rows: np.ndarray = stream[starts[:, None] + np.arange(length + 1)[None, :]]
    return rows
