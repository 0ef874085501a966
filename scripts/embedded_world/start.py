"""The checkpoint that training on the world starts from: a base model's weights under a tokenizer
of the world's own.

Tokens that both tokenizers know keep their embedding; a new token begins as the mean of the
embeddings of what the base's tokenizer makes of its text. Marks of turns and calls begin as the
mean of all, which training moves apart.
"""

import json
import shutil
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from commands import corpus
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
EMBEDDING = "transformer.wte.weight"
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


def transferred(embedding_VC: torch.Tensor, old: Tokenizer, new: Tokenizer) -> torch.Tensor:
    """Rows for the new tokenizer's ids, of the old one's."""
    known, rows_VC = old.get_vocab(), embedding_VC.mean(0).expand_as(embedding_VC).clone()
    for token, id in new.get_vocab().items():
        if token in known:
            rows_VC[id] = embedding_VC[known[token]]
        elif token not in MARKS:
            rows_VC[id] = embedding_VC[old.encode(new.decode([id])).ids].mean(0)
    return rows_VC


def write(base: Path, folder: Path) -> None:
    """Writes the checkpoint folder to train."""
    config = json.loads((base / "config.json").read_text())
    old = Tokenizer.from_file(str(base / "tokenizer.json"))
    new = train_tokenizer(config["vocab_size"])
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    rows_VC = transferred(weights[EMBEDDING].float(), old, new)
    rows_VC += 0.1 * rows_VC.std() * torch.randn(rows_VC.shape, generator=generator)
    weights[EMBEDDING] = rows_VC.to(weights[EMBEDDING].dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    ends = [new.token_to_id(corpus.END), new.token_to_id("<|end|>")]
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"] = [*corpus.SPECIAL_TOKENS[1:], *MARKS]
    new.save(str(folder / "tokenizer.json"))
    for name, value in (
        ("config.json", config | {"eos_token_id": ends}),
        ("tokenizer_config.json", settings),
        ("generation_config.json", {"bos_token_id": ends[0], "eos_token_id": ends}),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    shutil.copy(mix.TEMPLATE, folder / "chat_template.jinja")
