"""Tiny random checkpoints written by `transformers`, which is also the oracle for what is read from
them.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.paths import EMBEDDED


@dataclass(frozen=True)
class Shape:
    """Dimensions of a random gpt_bigcode checkpoint."""

    n_head: int
    head_dim: int
    n_layer: int
    vocab_size: int
    n_inner: int | None
    activation: str
    tied: bool = True
    seed: int = 0


SHAPES = (
    Shape(
        n_head=4,
        head_dim=16,
        n_layer=3,
        vocab_size=300,
        n_inner=None,
        activation="gelu_pytorch_tanh",
    ),
    Shape(
        n_head=1, head_dim=128, n_layer=2, vocab_size=257, n_inner=200, activation="gelu", seed=1
    ),
    Shape(
        n_head=12,
        head_dim=32,
        n_layer=2,
        vocab_size=1009,
        n_inner=None,
        activation="gelu_pytorch_tanh",
        seed=2,
    ),
    Shape(
        n_head=7,
        head_dim=24,
        n_layer=4,
        vocab_size=511,
        n_inner=100,
        activation="relu",
        tied=False,
        seed=3,
    ),
    Shape(
        n_head=3,
        head_dim=64,
        n_layer=2,
        vocab_size=333,
        n_inner=None,
        activation="gelu_pytorch_tanh",
        seed=4,
    ),
)
N_POSITIONS = 512


def known_ids() -> list[int]:
    """A text that the embedded model was trained to continue: how it goes on after ids at random is
    left to rounding.
    """
    tokenizer: Tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    return tokenizer.encode("The capital of France is Paris. The opposite of").ids


@dataclass(frozen=True)
class TinyCheckpoint:
    """A folder, and the model that `transformers` loads from it."""

    folder: Path
    shape: Shape

    @cached_property
    def oracle(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            self.folder, attn_implementation="eager", dtype=torch.float32
        ).eval()


def make_checkpoint(shape: Shape, folder: Path, positions: int = N_POSITIONS) -> TinyCheckpoint:
    """Writes config, weights and tokenizer of a random model, its logits spread enough that greedy
    choices are not ties.
    """
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    torch.manual_seed(shape.seed)
    width = shape.n_head * shape.head_dim
    config = GPTBigCodeConfig(
        vocab_size=shape.vocab_size,
        n_positions=positions,
        n_embd=width,
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_inner=shape.n_inner,
        activation_function=shape.activation,
        tie_word_embeddings=shape.tied,
        initializer_range=1.2 * width**-0.5,
        multi_query=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPTBigCodeForCausalLM(config)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # Biases and norms too, so that none can be forgotten unnoticed.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return TinyCheckpoint(folder, shape)


def store_as(folder: Path, dtype: torch.dtype) -> Path:
    """Rounds the weights of a folder to `dtype`, in which they are then stored. -> the folder"""
    tensors = {
        name: value.to(dtype) for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")})
    )
    return folder


def make_tokenizer(marks: tuple[str, ...] = (), vocab_size: int = 257) -> Tokenizer:
    """A byte-level BPE of 257 tokens, the smallest vocabulary of SHAPES; id 0 ends a text. `marks`
    are further special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", *marks],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def f(x):\n    return x\n"] * 4, trainer)
    return tokenizer
