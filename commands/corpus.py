"""Source files to training sequences: the split, the tokenizer, fill-in-the-middle, packing.

Everything here is a pure function of the files and a seed, so a resumed run sees the data it would have seen. It knows nothing of
models; a sequence is a row of token ids.
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model.spec import CheckpointError, OptionError
from server.hub.checkpoint_trial import try_checkpoint
from server.hub.tokenizer_file import tokenizer_path

END = "<|endoftext|>"
FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX = "<fim_prefix>", "<fim_middle>", "<fim_suffix>"
SPECIAL_TOKENS = (END, FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX, "<fim_pad>")
HELD_OUT_PERCENT = 5
# A fill-in-the-middle piece must fit into one training sequence: about 700 tokens of source.
FIM_PIECE_CHARS = 2200
ENCODED_TOGETHER = 1024
"""Texts that are tokenized at once, by all processors. The library's results take many times the memory of their ids."""


@dataclass(frozen=True, slots=True)
class Document:
    """One source file: its module name, as an import statement would spell it, and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the module is kept from training, decided by a hash of its name alone."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def read_documents(folder: Path | None) -> list[Document]:
    """Every UTF-8 *.py file below `folder` (the standard library where None), sorted by module name. Raises OptionError where there is no
    such folder.

    Left out: installed packages, and files that the interpreter's own build wrote (they hold the paths of a machine).
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise OptionError(f"data {root}: no such folder")
    documents = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts or path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            documents.append(Document(name, text.replace("\r\n", "\n")))
    return documents


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with StarCoder's special tokens; digits stand alone, nothing is unknown."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
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
    """The share of documents to rearrange: as asked, else 0.3 where the tokenizer has the marks. Raises OptionError where it must not."""
    has_marks = all(tokenizer.token_to_id(mark) is not None for mark in (FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX))
    if asked and not has_marks:
        raise OptionError(f"fim_rate {asked} needs the tokens {FIM_PREFIX}, {FIM_MIDDLE} and {FIM_SUFFIX}, which the tokenizer lacks")
    return (0.3 if has_marks else 0.0) if asked is None else asked


def fim_pieces(text: str, rng: random.Random) -> Iterator[str]:
    """`text` cut into pieces at line ends, each as prefix-suffix-middle (Bavarian et al. 2022): the middle comes last."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start + 1, start + FIM_PIECE_CHARS) + 1 or start + FIM_PIECE_CHARS
        piece = text[start:] if start + FIM_PIECE_CHARS >= len(text) else text[start:end]
        start += len(piece)
        a, b = sorted(rng.randrange(len(piece) + 1) for _ in range(2))
        yield f"{FIM_PREFIX}{piece[:a]}{FIM_SUFFIX}{piece[b:]}{FIM_MIDDLE}{piece[a:b]}"


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint folder. Raises CheckpointError, ConfigurationError if there is none or loading it takes too much time
    or memory, and ResourceError if a conversion cannot be cached.
    """
    path = tokenizer_path(folder)
    try_checkpoint(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises bare Exception.
        raise CheckpointError(f"{path}: expected a tokenizer that this version can read ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # The post-processor adds ids that need not be in the vocabulary.
    if (largest := max([*tokenizer.encode("").ids, *tokenizer.get_vocab(with_added_tokens=True).values()])) >= vocab_size:
        raise CheckpointError(f"{path}: has ids up to {largest}, expected less than the vocab_size {vocab_size} of config.json")
    return tokenizer


def token_stream(documents: list[Document], tokenizer: Tokenizer, end_ids: tuple[int, ...], fim_rate: float, seed: int) -> np.ndarray:
    """The documents in an order drawn from `seed`, laid end to end as token ids, each opened as the tokenizer opens a text and closed
    by the first of `end_ids`. dtype int32.
    """
    rng = random.Random(seed)
    texts: list[str] = []
    for document in rng.sample(documents, len(documents)):
        texts.extend(fim_pieces(document.text, rng) if rng.random() < fim_rate else [document.text])
    end, parts = np.asarray(end_ids[:1], dtype=np.int32), []
    for first in range(0, len(texts), ENCODED_TOGETHER):
        for encoding in tokenizer.encode_batch_fast(texts[first : first + ENCODED_TOGETHER]):
            parts += [np.asarray(encoding.ids, dtype=np.int32), end]
    return np.concatenate([*parts, end[:0]])


def sequences(stream: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Rows of `length + 1` ids (inputs and shifted targets overlap), cut at an offset and shuffled by `seed`."""
    rng = np.random.default_rng(seed)
    offset = int(rng.integers(0, min(length, max(1, len(stream) - length - 1))))
    count = (len(stream) - offset - 1) // length
    starts = offset + length * rng.permutation(count)
    rows: np.ndarray = stream[starts[:, None] + np.arange(length + 1)[None, :]]
    return rows
