"""Perplexity of a checkpoint on a text, in every form that its weights can be held in on this
machine.

The runner is the one that `onehead serve` uses, so what is measured is what is served: kernels,
quantization and KV cache. The text's tokens are cut into windows that are computed one after the
other; each token is scored once, given the tokens before it in its window. Invariant: all forms are
measured on the same windows. It knows nothing of requests, schedules and HTTP.
"""

import math
import sysconfig
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.progress import Progress

from cache.layout import pages_for
from model.kv_layout import layout_of
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import CheckpointError, ModelSpec, OptionError
from model.step import Row, Scoring, StepPlan
from server.text.codec import TextCodec

WINDOW = 1024
"""Tokens of a window, where the model has as many positions."""
STEP_TOKENS = 256
"""Tokens of a window that are computed together."""
PAGE_SIZE = 64
CODE = "pprint.py", "socket.py", "lzma.py", "ipaddress.py"
"""Modules of the standard library, of which the embedded model was trained on none."""
PROSE = "pydoc_data.topics"
CHARACTERS = 2400
"""Taken of each of these modules, and four times as many of the prose."""

BUILT_IN = "documentation and modules of this Python"


@dataclass(frozen=True, slots=True)
class Measured:
    """Perplexities by form, and what they were measured on."""

    text: str
    """A file's path, or BUILT_IN."""
    tokens: int
    """Scored."""
    perplexity: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Why there is none of a form, by form."""

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "forms": self.perplexity,
            "refused": self.refused,
        }


def measure(
    folder: Path,
    spec: ModelSpec,
    device: str,
    forms: Mapping[str, tuple[str, str]],
    text: Path | None,
    progress: Progress,
) -> Measured:
    """The perplexity of each form, given as (dtype, quantization), on a file or the built-in text.
    Raises CheckpointError and ConfigurationError for the checkpoint, OptionError for the text.
    """
    length = min(WINDOW, spec.max_positions)
    windows = windows_of(
        read_codec(folder, spec), built_in_text() if text is None else read_text(text), length
    )
    measured = Measured(BUILT_IN if text is None else str(text), sum(map(num_scored, windows)))
    task = progress.add_task("perplexity", total=len(forms) * sum(map(len, windows)))
    for form, (dtype, quantization) in forms.items():
        progress.update(task, description=f"perplexity in {form}")
        try:
            runner = load(folder, spec, device, dtype, quantization, length)
            measured.perplexity[form] = perplexity(runner, windows, partial(progress.advance, task))
        except (OptionError, MemoryError) as error:
            measured.refused[form] = str(error)
    return measured


def built_in_text() -> str:
    """Two texts in one, of about the same length: the language reference of this Python, and
    modules of its standard library.
    """
    code = [text[:CHARACTERS] for text in modules(CODE)]
    return "\n".join([language_reference()[: CHARACTERS * len(CODE)], *code])


def language_reference() -> str:
    """The topics of `help()`; empty where this Python comes without them."""
    try:
        topics: dict[str, str] = import_module(PROSE).topics
    except ImportError:  # Some distributions package it separately.
        return ""
    return "\n".join(topics[name] for name in sorted(topics))


def modules(names: Sequence[str]) -> list[str]:
    """The source of modules of the standard library, of those that are there."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [
        path.read_text(encoding="utf-8")
        for path in (folder / name for name in names)
        if path.is_file()
    ]


def read_text(path: Path) -> str:
    """A user's text. Raises OptionError."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise OptionError(f"text {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"text {path}: expected UTF-8") from None


def read_codec(folder: Path, spec: ModelSpec) -> TextCodec:
    """The tokenizer of a checkpoint. Raises ConfigurationError where it cannot be loaded,
    CheckpointError where it has too many tokens.
    """
    codec = TextCodec(folder)
    if codec.largest_id >= spec.vocab_size:
        raise CheckpointError(
            f"{codec.path}: has ids up to {codec.largest_id}, expected less than the vocab_size "
            f"{spec.vocab_size}"
        )
    return codec


def windows_of(
    codec: TextCodec, text: str, length: int, most: int | None = None
) -> list[list[int]]:
    """The text's tokens, or the first `most` of them, in windows of up to `length`, each opened as
    the tokenizer opens a prompt. Raises OptionError for a text without two tokens.
    """
    ids, opening = codec.encode_bare(text)[:most], codec.opening
    step = length - len(opening)
    windows = [opening + ids[first : first + step] for first in range(0, len(ids), step)]
    if sum(map(num_scored, windows)) < 1:
        raise OptionError(f"the text has {len(ids)} tokens, expected at least 2")
    return windows


def num_scored(window: Sequence[int]) -> int:
    """Tokens of a window that have one before them."""
    return len(window) - 1


def load(
    folder: Path, spec: ModelSpec, device: str, dtype: str, quantization: str, length: int
) -> ModelRunner:
    """A runner for windows of `length` tokens. Raises CheckpointError, MemoryError, and OptionError
    where this device has no such form.
    """
    pages = layout_of(spec, PAGE_SIZE).pages_per_block * pages_for(length, PAGE_SIZE)
    limits = 0, PAGE_SIZE, pages, None, length, 1, STEP_TOKENS
    return ModelRunner.load(folder, spec, EngineOptions(device, dtype, *limits, quantization))


def perplexity(
    runner: ModelRunner, windows: Sequence[Sequence[int]], advance: Callable[[int], object]
) -> float:
    """exp of the mean negative log-likelihood of a token, in nats. `advance` is called with the
    number of tokens of each step.
    """
    nats = [cost for window in windows for cost in _costs(runner, window, advance)]
    return math.exp(math.fsum(nats) / len(nats))


def _costs(
    runner: ModelRunner, window: Sequence[int], advance: Callable[[int], object]
) -> list[float]:
    """-log p of each token of a window but the first, in nats."""
    costs: list[float] = []
    pages, used = [], 0
    for group in runner.pool.layout.groups:
        count = group.num_stacks * pages_for(len(window), runner.pool.layout.page_size)
        pages.append(array("q", range(used, used + count)))
        used += count
    for start in range(0, len(window), STEP_TOKENS):
        tokens = window[start : start + STEP_TOKENS]
        targets = window[start + 1 : start + 1 + STEP_TOKENS]
        result = runner.run(StepPlan((Row(0, tokens, start, pages, None, Scoring(0, targets, 0)),)))
        costs += [-score.logprob for score in result.scored.get(0, ())]
        advance(len(tokens))
    return costs
