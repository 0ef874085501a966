"""How well a checkpoint predicts the held-out modules of the standard library, in bits per byte, beside xz and a byte 5-gram.

    python -m bench.bits_per_byte --model FOLDER [--data DIR] [--context TOKENS] [--forms float32,fp8,...] [--documents N]
        [--output bits-per-byte.json]

The model scores every document by itself, from an end-of-text token on, as it was trained; longer documents than its context in
windows that overlap by half, each token once. It does so in each form: what weights and activations are held in (float32, bfloat16, or
int8, int4 or fp8 weights beside float32); with +kv8, keys and values are rounded to float8 first, as a float8 cache returns them. xz sees
the held-out bytes alone. The 5-gram is counted on the training split, as the model was trained on it, and each document starts from four
zero bytes; of its smoothings the one that does best here is kept, which favours it. Prints a Markdown table.
"""

import argparse
import json
import lzma
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer
from torch import Tensor

from cache.pool import in_float8
from commands import corpus
from commands.causal_attention import CausalAttention
from model.attention import Attend
from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.decoder import Decoder
from model.devices.cpu.device import CpuDevice
from model.devices.products import Products
from model.layers import Rotation

LOGIT_ROWS = 512
"""Rows of logits made at a time: they are the largest tensor of all."""
KV8 = "+kv8"
FORMS = {"float32": (torch.float32, "none"), "bfloat16": (torch.bfloat16, "none")}
FORMS |= {kind: (torch.float32, kind) for kind in CpuDevice.quantizations}
CPU = CpuDevice()

# --- the model


def windows(count: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first, end): read tokens begin .. end - 1, score first .. end - 1. Every token is scored once; after the first window
    each has at least half a window before it.
    """
    end = min(size, count)
    yield 0, 0, end
    while end < count:
        first, end = end, min(end + max(1, size // 2), count)
        yield end - size, first, end


def through_float8(attend: Attend) -> Attend:
    """`attend` to keys and values that were stored in float8: keys as a cache holds them, rotated."""

    def stored(layer: int, q_THd: Tensor, k_Td: Tensor, v_Td: Tensor, rotation: Rotation | None) -> Tensor:
        if rotation is not None:
            q_THd, k_Td = rotation.both(q_THd, k_Td)
        return attend(layer, q_THd, in_float8(k_Td).to(k_Td.dtype), in_float8(v_Td).to(v_Td.dtype), None)

    return stored


@torch.inference_mode()
def token_nats(decoder: Decoder, ids: list[int], start_id: int, context: int, float8_cache: bool = False) -> Tensor:
    """What each token of a document costs, given `start_id` and those before it, in windows of `context`."""
    inputs_N = torch.tensor([start_id, *ids[:-1]])
    targets_N = torch.tensor(ids)
    nats_N = torch.full((len(ids),), math.nan)
    for begin, first, end in windows(len(ids), context):
        attend: Attend = CausalAttention(end - begin, decoder.spec)
        if float8_cache:
            attend = through_float8(attend)
        x_TD = decoder(inputs_N[begin:end], torch.arange(end - begin), attend)
        for row in range(first, end, LOGIT_ROWS):
            rows = slice(row, min(row + LOGIT_ROWS, end))
            logits_SV = decoder.logits(x_TD[rows.start - begin : rows.stop - begin])
            nats_N[rows] = F.cross_entropy(logits_SV.float(), targets_N[rows], reduction="none")
    return nats_N


def score_model(
    folder: Path, documents: list[corpus.Document], context: int | None, progress: Progress, form: str = "float32"
) -> dict[str, Any]:
    """The checkpoint's bits over all documents, and what it is."""
    dtype, quantization = FORMS[form.removesuffix(KV8)]
    products = CPU.products(CPU.dtypes("float32"), quantization, False) if quantization != "none" else Products()
    decoder = load_decoder(folder, read_spec(folder), dtype, CPU.torch_device, products)
    context = context or decoder.spec.max_positions
    if not 1 < context <= decoder.spec.max_positions:
        raise ValueError(f"--context {context} is not within the model's {decoder.spec.max_positions} positions")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start_id = corpus.token_id(tokenizer, corpus.END)
    nats, num_tokens = 0.0, 0
    task = progress.add_task(form, total=sum(len(document.text.encode()) for document in documents))
    for document in documents:
        ids = tokenizer.encode(document.text, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != document.text:
            raise ValueError(f"the tokenizer loses something of {document.name}, so its tokens' cost would not be the text's")
        nats += token_nats(decoder, ids, start_id, context, form.endswith(KV8)).double().sum().item()
        num_tokens += len(ids)
        progress.update(task, advance=len(document.text.encode()))
    return {
        "bits": nats / math.log(2),
        "tokens": num_tokens,
        "nats_per_token": nats / num_tokens,
        "parameters": decoder.num_parameters,
        "context": context,
        "file_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    }


# --- the n-gram

CONTEXT = 4
COUNTS = ("all", "distinct")
DISCOUNTS = ("witten-bell", "kneser-ney")


def packed(texts: list[bytes]) -> np.ndarray:
    """For every byte of every text, it and the CONTEXT bytes before it as one number. Each text follows zero bytes."""
    padded = np.frombuffer(b"".join(bytes(CONTEXT) + text for text in texts), dtype=np.uint8)
    keys = np.zeros(len(padded) - CONTEXT, dtype=np.uint64)
    for offset in range(CONTEXT + 1):
        keys <<= np.uint64(8)
        keys |= padded[offset : len(keys) + offset]
    inside = np.ones(len(padded), dtype=bool)
    starts = np.cumsum([0, *(len(text) + CONTEXT for text in texts[:-1])])
    inside[(starts[:, None] + np.arange(CONTEXT)).ravel()] = False
    return keys[inside[CONTEXT:]]


def count(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different keys, sorted, and how often each occurs. Sorts `keys` in place: they are many."""
    keys.sort()
    firsts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    return keys[firsts], np.diff(np.r_[firsts, len(keys)])


@dataclass(frozen=True, slots=True)
class Level:
    """All grams of one length. p(byte | context) = direct[context + byte] + escape[context] * p(byte | context but its first byte)."""

    grams: np.ndarray
    direct: np.ndarray
    contexts: np.ndarray
    escape: np.ndarray

    def probabilities(self, keys: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """For keys of this level's length, given the next shorter level's probabilities."""
        escape = _look_up(self.contexts, self.escape, keys >> np.uint64(8), absent=1.0)
        found: np.ndarray = _look_up(self.grams, self.direct, keys, absent=0.0) + escape * lower
        return found


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, absent: float) -> np.ndarray:
    index = np.searchsorted(keys, wanted)
    index[index == len(keys)] = 0
    found: np.ndarray = np.where(keys[index] == wanted, values[index], absent)
    return found


def make_level(grams: np.ndarray, counts: np.ndarray, discount: str) -> Level:
    """Takes from every count what unseen bytes get: a share by Witten and Bell (PPM's method C), or Kneser and Ney's three constants
    in Chen and Goodman's estimate.
    """
    contexts = grams >> np.uint64(8)
    firsts = np.flatnonzero(np.r_[True, contexts[1:] != contexts[:-1]])
    num_different = np.diff(np.r_[firsts, len(grams)])
    totals = np.add.reduceat(counts, firsts).astype(np.float64)
    if discount == "witten-bell":
        totals += num_different
        escape = num_different / totals
        kept = counts.astype(np.float64)
    else:
        taken = chen_goodman(counts)[np.minimum(counts, 3) - 1]
        escape = np.add.reduceat(taken, firsts) / totals
        kept = counts - taken
    return Level(grams, kept / np.repeat(totals, num_different), contexts[firsts], escape)


def chen_goodman(counts: np.ndarray) -> np.ndarray:
    """What to take from counts of 1, of 2, and of 3 and more, from how many grams there are of each count up to 4."""
    n1, n2, n3, n4 = np.bincount(np.minimum(counts, 5), minlength=5)[1:5].astype(float)
    if not (n1 and n2 and n3):
        return np.full(3, 0.75)
    y = n1 / (n1 + 2 * n2)
    taken: np.ndarray = np.clip([1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3], 0.01, [1, 2, 3])
    return taken


class NGram:
    """A byte's probability given the CONTEXT before it, from counts that do not change. Below the single bytes: 1/256 each."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray, discount: str, lower_counts: str) -> None:
        """`lower_counts` of a shorter gram: all its occurrences, or the number of distinct bytes before it (Kneser and Ney)."""
        self.levels: list[Level] = []
        for length in range(CONTEXT + 1, 0, -1):
            self.levels.insert(0, make_level(grams, counts, discount))
            shorter = grams & np.uint64(2 ** (8 * (length - 1)) - 1)
            order = np.argsort(shorter, kind="stable")
            weights = counts[order] if lower_counts == "all" else np.ones(len(counts), dtype=np.int64)
            firsts = np.flatnonzero(np.r_[True, np.diff(shorter[order]) != 0])
            grams, counts = shorter[order][firsts], np.add.reduceat(weights, firsts)

    @property
    def num_grams(self) -> int:
        return sum(len(level.grams) for level in self.levels)

    def probabilities(self, keys: np.ndarray) -> np.ndarray:
        """Of each key's last byte, given the others."""
        p = np.full(len(keys), 1 / 256)
        for length, level in enumerate(self.levels, start=1):
            p = level.probabilities(keys & np.uint64(2 ** (8 * length) - 1), p)
        return p

    def check(self, contexts: np.ndarray) -> None:
        """Raises ValueError where the 256 bytes that may follow a context have not probability 1 together."""
        keys = (contexts[:, None] << np.uint64(8)) | np.arange(256, dtype=np.uint64)
        p = self.probabilities(keys.ravel()).reshape(-1, 256)
        if p.min() <= 0 or np.abs(p.sum(axis=1) - 1).max() > 1e-9:
            raise ValueError("the n-gram's probabilities do not sum to 1")


def score_ngrams(training: list[bytes], held_out: list[bytes], progress: Progress) -> dict[str, dict[str, Any]]:
    """Each smoothing's bits over the held-out texts."""
    task = progress.add_task("5-gram", total=1 + len(COUNTS) * len(DISCOUNTS))
    grams, counts = count(packed(training))
    progress.update(task, advance=1)
    keys = packed(held_out)
    rng = np.random.default_rng(0)
    contexts = np.r_[rng.integers(0, 2**32, 200, dtype=np.uint64), rng.choice(keys, 200) >> np.uint64(8), np.uint64(0)]
    results = {}
    for discount in DISCOUNTS:
        for lower_counts in COUNTS:
            ngram = NGram(grams, counts, discount, lower_counts)
            ngram.check(contexts)
            bits = -float(np.log2(ngram.probabilities(keys)).sum())
            results[f"{discount}, {lower_counts} occurrences"] = {"bits": bits, "grams": ngram.num_grams}
            progress.update(task, advance=1)
    return results


# --- the report


def measure(model: Path, data: Path | None, context: int | None, forms: list[str], most: int | None, progress: Progress) -> dict[str, Any]:
    """Every figure of the report."""
    documents = sorted(corpus.read_documents(data), key=lambda document: document.name)
    held_out = [document for document in documents if document.held_out]
    if not held_out or len(held_out) == len(documents):
        raise ValueError(f"{len(documents)} documents give no split into training and held-out ones")
    held_out = held_out[:: max(1, len(held_out) // (most or len(held_out)))][:most]
    training_bytes = [document.text.encode() for document in documents if not document.held_out]
    held_out_bytes = [document.text.encode() for document in held_out]
    size = sum(map(len, held_out_bytes))
    packed_size = len(lzma.compress(b"".join(held_out_bytes), lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME))
    all_scored = {form: score_model(model, held_out, context, progress, form) for form in forms}
    scored = all_scored[forms[0]]
    ngrams = score_ngrams(training_bytes, held_out_bytes, progress)
    best = min(ngrams, key=lambda name: ngrams[name]["bits"])
    return {
        "bits_per_byte": {"model": scored["bits"] / size, "ngram": ngrams[best]["bits"] / size, "xz": 8 * packed_size / size},
        "forms": {form: each["bits"] / size for form, each in all_scored.items()},
        "held_out": {"documents": len(held_out), "bytes": size, "xz_bytes": packed_size},
        "training": {"documents": len(training_bytes), "bytes": sum(map(len, training_bytes))},
        "model": {"name": model.resolve().name, **scored},
        "ngram": {"smoothing": best, "grams": ngrams[best]["grams"], "all": {name: n["bits"] / size for name, n in ngrams.items()}},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def table(figures: dict[str, Any]) -> str:
    """The report as Markdown."""
    model, ngram, held_out, training = (figures[key] for key in ("model", "ngram", "held_out", "training"))
    bits = figures["bits_per_byte"]
    python = figures["versions"]["python"]
    name = f"{model['name']}: {model['parameters'] / 1e6:.1f}M parameters, context {model['context']}"
    rows = [
        *((f"{name}, {form}", value) for form, value in figures["forms"].items()),
        (f"byte 5-gram ({ngram['smoothing']}): {ngram['grams'] / 1e6:.1f}M grams", bits["ngram"]),
        ("xz -9e of the held-out bytes alone", bits["xz"]),
    ]
    lines = ["| predictor | bits per byte |", "|---|---:|", *(f"| {name} | {value:.4f} |" for name, value in rows), ""]
    lines.append(
        f"Held out: {held_out['documents']} modules of Python {python}, {held_out['bytes']:,} bytes, {model['tokens']:,} tokens "
        f"({held_out['bytes'] / model['tokens']:.2f} bytes and {model['nats_per_token']:.3f} nats each). "
        f"Training split: {training['documents']} modules, {training['bytes']:,} bytes. "
        f"Weights: {model['file_bytes']:,} bytes on disk."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--data", type=Path, help="folder of *.py files, as it was trained on; default: this Python's standard library")
    parser.add_argument("--context", type=int, help="tokens of a window; default: all positions that the model has")
    parser.add_argument("--forms", default="float32", help=f"of {', '.join(FORMS)}, each with {KV8} or without; separated by commas")
    parser.add_argument("--documents", type=int, help="held-out documents, taken evenly by name; default: all")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's own choice")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    forms = arguments.forms.split(",")
    if unknown := [form for form in forms if form.removesuffix(KV8) not in FORMS]:
        parser.error(f"--forms {unknown[0]} must be one of {', '.join(FORMS)}, each with {KV8} or without")
    with Progress(console=Console(stderr=True)) as progress:
        figures = measure(arguments.model, arguments.data, arguments.context, forms, arguments.documents, progress)
    print(table(figures))
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
