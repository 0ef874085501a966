"""The embedded model is an ordinary checkpoint: small, complete, and the same greedy tokens here
and in `transformers`.
"""

import json

import pytest
import torch

from cache.layout import CacheLayout
from model.checkpoint.families import read_spec
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.step import SampledToken, Sampling
from server.config import EMBEDDED_MODEL
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.text.codec import TextCodec

PROMPTS = (
    "def quicksort(",
    "import os\n",
    "<fim_prefix>def add(a, b):\n    return <fim_suffix>\n\nprint(add(1, 2))\n<fim_middle>",
)


def test_its_size_and_parts() -> None:
    assert (EMBEDDED_MODEL / "model.safetensors").stat().st_size <= 16 * 10**6
    spec = read_spec(EMBEDDED_MODEL)
    assert spec.max_positions >= 4096 and spec.end_token_ids == (0,)
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    assert (
        config["model_type"] == "gpt_bigcode"
        and config["multi_query"] is True
        and config["dtype"] == "bfloat16"
    )
    card = (EMBEDDED_MODEL / "README.md").read_text()
    assert "PSF" in card and "bits per byte" in card and "loss.svg" in card


def test_its_special_tokens() -> None:
    codec = TextCodec(EMBEDDED_MODEL)
    ids = [
        codec.tokenizer.token_to_id(token)
        for token in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|endoftext|>")
    ]
    assert None not in ids and set(ids) <= codec.special_ids and codec.end_token_ids == (0,)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_same_greedy_tokens_as_transformers(prompt: str) -> None:
    from transformers import AutoModelForCausalLM

    ids = TextCodec(EMBEDDED_MODEL).encode(prompt)
    options = EngineOptions("cpu", "float32", 1, 64, 20, None, 1280, 1, 64)
    core = EngineCore(
        Scheduler(Limits(20, CacheLayout.of(8, (), 64), 1000, 1, 64)),
        ModelRunner.load(EMBEDDED_MODEL, read_spec(EMBEDDED_MODEL), options),
    )
    core.scheduler.submit(0, ids, 60, Sampling(temperature=0.0))
    ours = []
    while core.scheduler.has_work:
        ours += [
            advance.drawn.token
            for advance in core.step()
            if isinstance(advance.drawn, SampledToken)
        ]
    oracle = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    theirs = oracle.generate(
        torch.tensor([ids]),
        max_new_tokens=60,
        min_new_tokens=60,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(ids) :].tolist()
    # min_new_tokens is the only way to keep generate() going; with no end token it changes nothing
    # else.
    assert ours == theirs
