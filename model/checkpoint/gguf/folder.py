"""Writes the small files that a checkpoint folder has beside its weights, from the header of a GGUF
file.

It imports no torch.
"""

import json
from pathlib import Path

from model.checkpoint.config import Config
from model.checkpoint.families import spec_of
from model.checkpoint.gguf.config import config_of
from model.checkpoint.gguf.header import GGUFFile
from model.checkpoint.gguf.tokenizer import (
    Vocabulary,
    generation_config,
    tokenizer_config,
    tokenizer_json,
)
from model.spec import CheckpointError

TOKENIZER = {
    "generation_config.json": generation_config,
    "tokenizer_config.json": tokenizer_config,
    "tokenizer.json": tokenizer_json,
}


def write(file: Path, folder: Path) -> None:
    """Writes config.json and what is made of the tokenizer's metadata. Raises CheckpointError
    naming the GGUF file and the key, or OSError.
    """
    gguf = GGUFFile.open(file)
    contents = {"config.json": config_of(gguf)}
    try:
        spec_of(file, contents["config.json"], warn=False)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None  # Of the family, which knows no file.
    vocabulary = Vocabulary(Config(gguf.metadata, str(file)))
    contents |= {name: make(vocabulary) for name, make in TOKENIZER.items()}
    for name, content in contents.items():
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        (folder / name).write_text(text, encoding="utf-8")
