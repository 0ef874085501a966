"""Trains a model of the embedded one's shape and tokenizer for some minutes on a GPU, and writes a
checkpoint folder.

    python -m bench.gpu.embedded_model --data FOLDER --output FOLDER [--minutes 9] [--small]

The corpus is the standard library twice and the *.py files below FOLDER (scripts/embedded_corpus.py
makes one); held-out modules of the standard library are in neither. `onehead train` is the
reproducible way to train. Here the length of the run is time, not steps, and everything serves
speed: tokens are made by processes once and stay on the device, the loss is compiled, and Muon
steps all matrices of one shape together. Invariant: after each evaluation --output holds the
checkpoint and state.json of that moment.
"""

import argparse
import json
import math
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from commands import corpus
from commands.held_out import held_out_rows
from commands.train.loss import Loss
from commands.train.muon import Muon
from commands.train.train import held_out_loss, initialise
from model.checkpoint.families import gpt_bigcode, read_spec
from model.checkpoint.saving import save_decoder
from model.decoder import Decoder
from server.config import EMBEDDED_MODEL

FIM_RATE = 0.3
STANDARD_LIBRARY_TIMES = 2
SHORT, LONG, LONG_SHARE = 1024, 4096, 0.1
"""Tokens of a context, and the share of the time, at the end, in which it is the longer."""
PEAK_RATE, LEAST_RATE, WARMUP_STEPS, WEIGHT_DECAY = 1.5e-3, 0.02, 200, 0.1
"""With a peak of 4e-3 the loss rose again after 3,000 steps. The least rate is a share of the
peak."""
EVALUATE_SECONDS = 45.0
DESCRIPTIONS = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What differs between a run and a small one."""

    batch_tokens: int
    variants: int
    """Orders of the corpus, and choices of what is rearranged for fill-in-the-middle; epochs take
    them in turn."""
    documents: int | None
    compiler: str


WHOLE, SMALL = Sizes(131_072, 4, None, "inductor"), Sizes(8192, 1, 40, "eager")


# --- tokens


def documents(data: Path, most: int | None) -> tuple[list[corpus.Document], list[corpus.Document]]:
    """Documents to train on, and those held out, whose text the first do not hold."""
    standard = corpus.read_documents(None)
    held_out = [document for document in standard if document.held_out]
    texts = {document.text for document in held_out}
    training = [document for document in standard if not document.held_out][
        :most
    ] * STANDARD_LIBRARY_TIMES
    training += [
        document for document in corpus.read_documents(data) if document.text not in texts
    ][:most]
    return training, held_out[:most]


def write_tokens(data: Path, most: int | None, seed: int, path: Path) -> None:
    """Writes one variant of the corpus as token ids, whole or not at all."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    ends = read_spec(EMBEDDED_MODEL).end_token_ids
    stream = corpus.token_stream(documents(data, most)[0], tokenizer, ends, FIM_RATE, seed)
    unfinished = path.with_suffix(".part.npy")
    np.save(unfinished, stream)
    unfinished.rename(path)


class Tokens:
    """Batches of rows of T + 1 ids, on the device. Processes write further variants while the first
    is trained on.
    """

    def __init__(self, data: Path, sizes: Sizes, folder: Path, device: str) -> None:
        self.folder, self.sizes, self.device = folder, sizes, device
        self.epochs = 0
        self._generator = torch.Generator(device=device).manual_seed(7)
        spawn = multiprocessing.get_context("spawn")
        self._writers = [
            spawn.Process(
                target=write_tokens,
                args=(data, sizes.documents, seed, folder / f"{seed}.npy"),
                daemon=True,
            )
            for seed in range(sizes.variants)
        ]
        for writer in self._writers:
            writer.start()

    def wait(self) -> None:
        """Waits for the first variant. Raises RuntimeError where there will be none."""
        while not list(self.folder.glob("?.npy")):
            if not any(writer.is_alive() for writer in self._writers):
                raise RuntimeError("no process could write tokens; see its error above")
            time.sleep(0.2)

    def batches(self, length: int) -> Iterator[Tensor]:
        """Batches without end, each epoch over another variant where one is ready."""
        batch = self.sizes.batch_tokens // length
        while True:
            ready = sorted(self.folder.glob("?.npy"))
            stream = torch.from_numpy(np.load(ready[self.epochs % len(ready)])).to(self.device)
            offset = int(torch.randint(length, (1,), device=self.device, generator=self._generator))
            order = torch.randperm(
                (len(stream) - offset - 1) // length, device=self.device, generator=self._generator
            )
            if len(order) < batch:
                raise RuntimeError(
                    f"the corpus has {len(stream)} tokens, fewer than a batch of {batch} x {length}"
                )
            within = offset + torch.arange(length + 1, device=self.device)
            self.epochs += 1
            for at in range(0, len(order) - batch + 1, batch):
                yield stream[order[at : at + batch, None] * length + within].long()

    def close(self) -> None:
        for writer in self._writers:
            writer.terminate()


def rate_at(done: float, step: int) -> float:
    """The share of the peak rate: a linear warm-up by steps, and a cosine over the share of the
    time that has passed.
    """
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


# --- the run


@dataclass
class State:
    """How far a run is."""

    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """Steps, and nats a token of the held-out modules."""


class Training:
    """One run."""

    def __init__(self, options: argparse.Namespace, tokens: Tokens) -> None:
        self.options, self.tokens, self.device = options, tokens, tokens.device
        self.spec = read_spec(EMBEDDED_MODEL)
        self.decoder = Decoder(self.spec)
        initialise(self.decoder, seed=1)
        self.decoder.to(self.device)
        self.loss = Loss(self.decoder, self.device, tokens.sizes.compiler)
        parameters = dict(self.decoder.named_parameters())
        matrices = [
            p for name, p in parameters.items() if p.ndim == 2 and name.startswith("blocks.")
        ]
        embeddings = [
            p for name, p in parameters.items() if p.ndim == 2 and not name.startswith("blocks.")
        ]
        groups = [{"params": embeddings, "weight_decay": WEIGHT_DECAY}]
        groups += [{"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0}]
        self.muon, self.adam = (
            Muon(matrices, PEAK_RATE, WEIGHT_DECAY),
            torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=self.device == "cuda"),
        )
        tokenizer: Tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
        held_out = documents(options.data, tokens.sizes.documents)[1]
        self.held_out_rows = held_out_rows(held_out, tokenizer, self.spec.end_token_ids, SHORT)
        self.state = State()
        self._pending: list[Tensor] = []

    def run(self, end: float) -> None:
        """Trains until that time of time.monotonic."""
        began = evaluated = time.monotonic()
        for length, until in ((SHORT, began + (end - began) * (1 - LONG_SHARE)), (LONG, end)):
            batches = self.tokens.batches(length)
            while (now := time.monotonic()) < until:
                self.step(next(batches), rate_at((now - began) / (end - began), self.state.step))
                if now - evaluated > EVALUATE_SECONDS:
                    self.evaluate()
                    evaluated = now
        self.evaluate()

    def step(self, rows_BU: Tensor, share: float) -> None:
        count, length = len(rows_BU), rows_BU.shape[1] - 1
        # Half the rows begin anywhere they fit, so that every position is trained from the first
        # step on.
        anywhere = torch.randint(
            self.spec.max_positions - length + 1, (count, 1), device=self.device
        )
        first = torch.where(torch.rand(count, 1, device=self.device) < 0.5, 0, anywhere)
        positions = (first + torch.arange(length, device=self.device)).flatten()
        loss = self.loss(rows_BU[:, :-1].flatten(), rows_BU[:, 1:].flatten(), positions, length)
        loss.backward()
        nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        for stepper in (self.muon, self.adam):
            for group in stepper.param_groups:
                group["lr"] = PEAK_RATE * share
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        # Read at the next evaluation: reading waits for the device.
        self._pending.append(loss.detach())
        self.state.step += 1
        self.state.tokens += count * length

    def evaluate(self) -> None:
        """Measures the held-out loss, and writes the checkpoint and state.json."""
        state, output = self.state, self.options.output
        state.losses += [loss.item() for loss in self._pending]
        self._pending.clear()
        state.held_out.append(
            (state.step, held_out_loss(self.decoder, self.held_out_rows, self.device))
        )
        save_decoder(
            output,
            self.decoder,
            torch.bfloat16,
            gpt_bigcode.config_from_spec(self.spec) | {"multi_query": True},
        )
        for name in DESCRIPTIONS:
            shutil.copyfile(EMBEDDED_MODEL / name, output / name)
        told: dict[str, Any] = {
            "step": state.step,
            "tokens": state.tokens,
            "losses": state.losses,
            "held_out": state.held_out,
        }
        (output / "state.json").write_text(json.dumps(told) + "\n", encoding="utf-8")
        loss = sum(state.losses[-20:]) / max(1, len(state.losses[-20:]))
        print(
            f"step {state.step}, {state.tokens / 1e6:.0f} M tokens: loss {loss:.3f}, held out "
            f"{state.held_out[-1][1]:.4f}",
            flush=True,
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.gpu.embedded_model", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of *.py files")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of the whole run (default: %(default)s)"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="a few documents, to see that everything runs; also on a CPU",
    )
    options = parser.parse_args(argv)
    end = time.monotonic() + 60 * options.minutes
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Tokens(options.data, SMALL if options.small else WHOLE, Path(scratch), device)
        try:
            training = Training(options, tokens)
            tokens.wait()
            training.run(end)
        finally:
            tokens.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
