"""Converts a checkpoint's older tokenizer files to a tokenizer.json with `transformers`, in a process of its own, which
server/child_process.py starts with two arguments, FOLDER and FILE.

Invariant: FILE tokenizes text as FOLDER's own files do, or it is not written and one line of output gives the reason. Nothing is
downloaded, and no code of the folder is run. It knows nothing of where the result is cached.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from model.checkpoint.files import MOST_LIST_BYTES, read_object
from server.errors import ConfigurationError, ResourceError

# Classes that transformers 4 used by model type if the folder names none; transformers 5 has no such defaults.
UNNAMED = {"gpt_bigcode": "GPT2Tokenizer"}
FEWEST_TOKENS = 256
ADVICE = 'name the right class in tokenizer_config.json, as in {"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}'
PROBES = (
    "def add(x, y): return x + 12",
    "def f():\n    return 1\n",
    "a  b   c",
    "\tx",
    "\ufb01ne \uff12 \u2460",  # Characters that NFKC normalization changes.
    "é λ 中 😀",
)
"""Texts on which a conversion is compared with SentencePiece. None begins with a space, where transformers is known to differ."""
CONFIG = ("model_type", "model_name", "tokenizer_class", "transformers_version")
TOKENIZER_CONFIG = (
    *("auto_map", "tokenizer_class"),  # `auto_map` is refused below.
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens", "model_max_length"),
    *("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "extra_ids"),
    *("do_lower_case", "do_basic_tokenize", "strip_accents", "tokenize_chinese_chars", "keep_accents", "remove_space", "trim_offsets"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "use_default_system_prompt", "errors"),
)
ALLOWED = {"config.json": CONFIG, "tokenizer_config.json": TOKENIZER_CONFIG, "special_tokens_map.json": TOKENIZER_CONFIG}
"""The keys of each file that are passed to `transformers`: it uses others as arguments, some of them as paths of files to read."""


def convert(folder: Path) -> Any:
    """The converted `tokenizers.Tokenizer`. Raises ConfigurationError if it would tokenize differently, and any error of `transformers`."""
    transformers = import_module("transformers")
    described = _read(folder / "tokenizer_config.json")
    code = described.get("auto_map") or {}
    if isinstance(code, list) or "AutoTokenizer" in code:
        raise ConfigurationError("tokenizer_config.json: auto_map names code that comes with the checkpoint, which is not run")
    # For some model types AutoTokenizer ignores the named class and expects a tokenizer.json. Where there is none, it does not find the
    # vocabulary of GPT-2's files, and tokenizes otherwise than SentencePiece with a .model file.
    name = described.get("tokenizer_class") or UNNAMED.get(_read(folder / "config.json").get("model_type", ""))
    fast = transformers.PreTrainedTokenizerFast
    named = getattr(transformers, str(name).removesuffix("Fast"), None)
    reader: Any = transformers.AutoTokenizer
    if isinstance(named, type) and issubclass(named, fast) and named is not fast:
        reader = named
        _check_files(folder, named)
    tokenizer = reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(tokenizer, fast):
        raise ConfigurationError(f"{type(tokenizer).__name__} cannot be saved as a tokenizer.json")
    _check(folder, tokenizer)
    return tokenizer.backend_tokenizer


def is_sentencepiece(path: Path) -> bool:
    """Whether a .model file is SentencePiece's (a protobuf message that begins with its pieces) and not tiktoken's (base64 lines)."""
    with path.open("rb") as file:
        return file.read(1) == b"\n"


def description(path: Path) -> dict[str, Any] | None:
    """The allowed keys of a JSON file; None for a file that is passed unchanged. Raises ConfigurationError if it is not a JSON object."""
    if path.name not in ALLOWED:
        return None
    return {key: value for key, value in _read(path).items() if key in ALLOWED[path.name] or key.endswith("_token")}


def _read(path: Path) -> dict[str, Any]:
    return read_object(path, MOST_LIST_BYTES) or {}


def _check_files(folder: Path, reader: Any) -> None:
    """Raises ConfigurationError if a file of the tokenizer's class is missing: without it the class would have only a few tokens."""
    files = (file for key, file in reader.vocab_files_names.items() if key != "tokenizer_file")
    lacking = sorted(file for file in files if not (folder / file).is_file())
    if lacking:
        raise ConfigurationError(f"{reader.__name__} reads {' and '.join(lacking)}, which the folder lacks")


def _check(folder: Path, tokenizer: Any) -> None:
    """Raises ConfigurationError if the vocabulary was not found, which `transformers` accepts, or is read differently by SentencePiece."""
    kind = type(tokenizer)
    if tokenizer.vocab_size < FEWEST_TOKENS:
        raise ConfigurationError(f"{kind.__name__} reads only {tokenizer.vocab_size} tokens from them")
    for path in folder.glob("*.model"):
        if is_sentencepiece(path):
            processor = import_module("sentencepiece").SentencePieceProcessor(model_file=str(path))
            for probe in PROBES:
                if tokenizer.encode(probe, add_special_tokens=False) != processor.encode(probe):
                    text = json.dumps(probe, ensure_ascii=False)
                    raise ConfigurationError(
                        f"{kind.__name__} does not read {path.name} as SentencePiece does, for example {text}; "
                        f"{ADVICE}; or put a right tokenizer.json into the folder"
                    )


def main() -> None:
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    made = _converted(folder)
    try:
        file.write_text(made, encoding="utf-8")
    except OSError as error:
        _print_reason(f"{file.parent.parent}: {error.strerror}")
        sys.exit(ResourceError.exit_code)


def _converted(folder: Path) -> str:
    """The text of the tokenizer.json. Exits with a printed reason if it cannot be made."""
    try:
        text: str = convert(folder).to_str(pretty=True)
        return text
    except ConfigurationError as error:
        sys.exit(_print_reason(str(error)))
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".replace(f"{folder}/", "").split())
        sys.exit(_print_reason(f"transformers does not read them ({text[:300]}); {ADVICE}"))


def _print_reason(reason: str) -> int:
    print(reason)
    return 1


if __name__ == "__main__":
    main()
