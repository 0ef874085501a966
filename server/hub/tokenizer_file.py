"""Finds the tokenizer.json of a checkpoint folder.

A folder with older tokenizer files only is refused with the command that makes a tokenizer.json of
them. It knows nothing of what a tokenizer does.
"""

from pathlib import Path

from server.errors import ConfigurationError

TOKENIZER = "tokenizer.json"
VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
"""Tokenizer files of which `onehead convert` makes a tokenizer.json, with the DESCRIPTIONS beside
them.
"""
DESCRIPTIONS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def tokenizer_path(folder: Path) -> Path:
    """The path of the tokenizer.json. Raises ConfigurationError where there is none."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder}: no such folder; --model takes a checkpoint folder, a GGUF file, or "
            "org/name of the Hugging Face hub"
        )
    path = folder / TOKENIZER
    if path.exists():
        return path
    if vocabularies := vocabularies_of(folder):
        names = " and ".join(file.name for file in vocabularies)
        raise ConfigurationError(
            f"{path}: no such file; `onehead convert --model {folder}` makes it of {names}"
        )
    raise ConfigurationError(
        f"{path}: no such file, nor a tokenizer.model, or a vocab.json with its merges.txt, of "
        "which `onehead convert` makes one"
    )


def vocabularies_of(folder: Path) -> list[Path]:
    """The older vocabulary files of a folder."""
    return sorted(
        path for pattern in VOCABULARIES for path in folder.glob(pattern) if path.is_file()
    )
