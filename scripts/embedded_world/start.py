"""The checkpoint that training on the world starts from: random weights, and a tokenizer with marks
of turns and calls.
"""

import json
import shutil
from itertools import chain
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer

from commands import corpus
from commands.options import TrainOptions
from commands.saving import config_from_spec, save_decoder
from commands.train.train import build_spec, initialise
from model.decoder import Decoder
from scripts.embedded_world import mix

MARKS = (
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
)
TOKENIZER_DOCUMENTS = 20_000


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of the world's documents and the standard library's, with MARKS last."""
    library = (document.text for document in corpus.read_documents(None) if not document.held_out)
    world = map("".join, mix.documents(TOKENIZER_DOCUMENTS, seed=0))
    texts = chain(world, library)
    tokenizer = corpus.train_tokenizer(texts, vocab_size - len(MARKS))
    tokenizer.add_special_tokens(
        [AddedToken(mark, normalized=False, special=True) for mark in MARKS]
    )
    return tokenizer


def write(folder: Path, tokenizer_path: Path | None) -> None:
    """Writes the checkpoint folder to train, of the sizes of a new model of `onehead train`."""
    options = TrainOptions(output=folder)
    tokenizer: Tokenizer = (
        train_tokenizer(options.vocab_size)
        if tokenizer_path is None
        else Tokenizer.from_file(str(tokenizer_path))
    )
    decoder = Decoder(build_spec(options, tokenizer))
    initialise(decoder, seed=0)
    ends = [corpus.token_id(tokenizer, mark) for mark in (corpus.END, "<|end|>")]
    config = config_from_spec(decoder.spec) | {"eos_token_id": ends}
    folder.mkdir(parents=True, exist_ok=True)
    save_decoder(folder, decoder, torch.bfloat16, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.END,
        "eos_token": corpus.END,
        "unk_token": corpus.END,
        "additional_special_tokens": [*corpus.SPECIAL_TOKENS[1:], *MARKS],
        "model_max_length": options.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    for name, value in (
        ("tokenizer_config.json", settings),
        ("generation_config.json", {"bos_token_id": ends[0], "eos_token_id": ends}),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    shutil.copy(mix.TEMPLATE, folder / "chat_template.jinja")
