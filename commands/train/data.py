"""What `onehead train` learns from: weighted folders of text, the token streams made of them, and
the batch of each step.

Invariant: a batch is a pure function of the options, the files and the model's spec. Knows nothing
of optimizers.

Shape letters: B sequences, U = T + 1 tokens of a row.
"""

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from commands import corpus
from commands.corpus import LICENCE_FILES
from commands.options import TrainOptions, data_folder
from model.spec import ModelSpec, OptionError

ARRANGEMENTS = 4
"""Token streams of a run: epochs take them in turn, so that each is made once. They differ in which
documents are rearranged, and where."""


@dataclass(frozen=True, slots=True)
class Source:
    """The documents of one folder to train on, and how often an epoch holds each."""

    folder: Path | None
    weight: float
    documents: list[corpus.Document]


class Corpus:
    """The documents of `options.data`: those to train on by source, and those held out, whose text
    is in no source, unless as an answer to a prompt.

    `documents` stand in for those of options.data where they are read already. Raises OptionError
    where either kind is missing.
    """

    def __init__(
        self, options: TrainOptions, documents: list[corpus.Document] | None = None
    ) -> None:
        folders = (
            [(None, 1.0)] if options.data is None else [data_folder(text) for text in options.data]
        )
        found = corpus.split([documents or corpus.read_documents(folder) for folder, _ in folders])
        self.held_out = [d for each in found for d in each if d.held_out]
        # Answers to prompts repeat.
        texts = {document.text for document in self.held_out}
        rest = (
            [d for d in each if not d.held_out and (d.prompt or d.text not in texts)]
            for each in found
        )
        self.sources = [Source(*folder, each) for folder, each in zip(folders, rest, strict=True)]
        if not self.training or not self.held_out:
            where = ", ".join(options.data or ["the standard library"])
            counts = f"{len(self.training)} documents to train on and {len(self.held_out)} held out"
            raise OptionError(f"{where}: {counts}; at least one of each is needed")

    @property
    def training(self) -> list[corpus.Document]:
        """Every document to train on, once."""
        return [document for source in self.sources for document in source.documents]

    def epoch(self, seed: int) -> list[corpus.Document]:
        """The documents of one epoch: of weight 2.5, each twice and a random half once more."""
        rng = random.Random(seed)
        drawn = []
        for source in self.sources:
            times = int(source.weight)
            drawn += source.documents * times
            drawn += rng.sample(
                source.documents, round((source.weight - times) * len(source.documents))
            )
        return drawn

    def write_table(self, output: Path, before: Path | None = None) -> None:
        """Writes output/DATA.md: folders, sizes and licences, after the table of `before`, the
        checkpoint that training went on from.
        """
        lines = ["| data | weight | documents | bytes | licence |", "|---|---:|---:|---:|---|"]
        for source in self.sources:
            num_bytes = sum(len(document.text.encode()) for document in source.documents)
            name = "Python's standard library" if source.folder is None else source.folder.name
            sizes = f"{source.weight:g} | {len(source.documents):,} | {num_bytes:,}"
            lines += [f"| {name} | {sizes} | {_licence(source.folder)} |"]
        earlier = before / "DATA.md" if before is not None else None
        text = (
            earlier.read_text(encoding="utf-8") + "\nTrained further on\n\n"
            if earlier is not None and earlier.is_file()
            else ""
        )
        (output / "DATA.md").write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


def _licence(folder: Path | None) -> str:
    """The entry of DATA.md for a licence: a known one, or the names of a folder's licence files."""
    if folder is None:
        return "PSF-2.0"
    files = sorted(
        {
            path.relative_to(folder).as_posix()
            for pattern in LICENCE_FILES
            for path in folder.glob(pattern)
        }
    )
    return ", ".join(files) or "not stated: no licence file at the top of the folder"


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step reads: rows_BU of T + 1 ids and the position of each row's first
    token.
    """

    rows_BU: np.ndarray
    first_position_B: np.ndarray


class Data:
    """Step number -> Step. Holds the rows of the current epoch; token streams are kept in files
    below options.work.
    """

    def __init__(
        self, options: TrainOptions, spec: ModelSpec, documents: Corpus, tokenizer: Tokenizer
    ) -> None:
        self.options = options
        self.spec = spec
        self.corpus = documents
        self.tokenizer = tokenizer
        self.fim_rate = corpus.fim_rate(options.fim_rate, tokenizer)
        # With --init the long phase has at most 4 x sequence tokens: the checkpoint has been
        # trained at its full length before.
        self.longest = (
            spec.max_positions
            if options.init is None
            else min(spec.max_positions, 4 * options.sequence)
        )
        self.first_long_step = (
            round(options.steps * (1 - options.long_share))
            if self.longest > options.sequence
            else options.steps
        )

    def steps(self, first: int) -> Iterator[Step]:
        """The steps from number `first` to the last. Each length of context has its own epochs."""
        for begin, end, length in (
            (0, self.first_long_step, self.options.sequence),
            (self.first_long_step, self.options.steps, self.longest),
        ):
            batch = max(1, self.options.batch_tokens // length)
            rows, epoch, used = None, -1, 0
            for number in range(begin, end):
                while rows is None or used + batch > len(rows):
                    epoch, used = epoch + 1, 0
                    stream = self.stream(epoch % ARRANGEMENTS)
                    rows = corpus.sequences(
                        stream,
                        length,
                        self._seed(epoch) + 500 * (length > self.options.sequence),
                        *self.spec.end_token_ids[:1],
                    )
                    if len(rows) < batch:
                        raise OptionError(
                            f"the corpus has {len(stream)} tokens, fewer than one batch of "
                            f"{batch} x {length}"
                        )
                if number >= first:
                    yield Step(
                        rows[used : used + batch].astype(np.int64),
                        self._first_positions(number, batch, length),
                    )
                used += batch

    def stream(self, arrangement: int) -> np.ndarray:
        """One arrangement of the corpus as token ids, read from a file that is made the first time.
        The file's name is a digest of the documents, the tokenizer and what else decides the ids.
        """
        seed, end_ids = self._seed(arrangement), self.spec.end_token_ids
        documents = self.corpus.epoch(seed)
        digest = hashlib.sha256(
            repr((self.tokenizer.to_str(), end_ids, self.fim_rate, seed)).encode()
        )
        for document in documents:
            digest.update(hashlib.sha256(repr((document.prompt, document.text)).encode()).digest())
        path = self.options.work / f"tokens-{digest.hexdigest()[:32]}.npy"
        if not path.exists():
            partial = path.with_suffix(".partial.npy")
            np.save(
                partial,
                corpus.token_stream(documents, self.tokenizer, end_ids, self.fim_rate, seed),
            )
            os.replace(partial, path)
        stream: np.ndarray = np.load(path, mmap_mode="r")
        return stream

    def _seed(self, epoch: int) -> int:
        return self.options.seed * 1000 + epoch

    def _first_positions(self, number: int, batch: int, length: int) -> np.ndarray:
        """Half the rows start at 0, half anywhere they fit, so that every learned position is
        trained from the first epoch on.
        """
        rng = np.random.default_rng((self.options.seed, number))
        anywhere = rng.integers(0, self.spec.max_positions - length + 1, batch)
        return np.where(rng.random(batch) < 0.5, 0, anywhere)
