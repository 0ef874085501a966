"""A tokenizer.json made of older files by `transformers`: a process of its own,
`python -m server.hub.tokenizer_conversion FOLDER FILE`.

Invariant: FILE reads text as FOLDER's own files do, or it is not written and one line of output says why. Nothing is fetched, and no code
that came with the folder is run. It knows nothing of where the result is kept.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from server.child_process import die_with_parent
from server.errors import ConfigurationError

# What transformers 4 took for a folder that names no class; 5 knows of none.
UNNAMED = {"gpt_bigcode": "GPT2Tokenizer"}
FEWEST_TOKENS = 256
ADVICE = 'name the class that does in tokenizer_config.json, as in {"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}'
PROBES = (
    "def add(x, y): return x + 12",
    "def f():\n    return 1\n",
    "a  b   c",
    "\tx",
    "\ufb01ne \uff12 \u2460",  # Other characters in NFKC.
    "é λ 中 😀",
)
"""Text that SentencePiece's own reading is compared on. None begins with a space: there the library is known to have its own way."""
NOT_WRITTEN = 71
"""Exit status where FILE could not be written, for no fault of the folder's."""
CONFIG = ("model_type", "model_name", "tokenizer_class", "transformers_version")
TOKENIZER_CONFIG = (
    *("auto_map", "tokenizer_class"),  # Of which the first is refused below.
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "split_special_tokens", "model_max_length"),
    *("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "extra_ids"),
    *("do_lower_case", "do_basic_tokenize", "strip_accents", "tokenize_chinese_chars", "keep_accents", "remove_space", "trim_offsets"),
    *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "use_default_system_prompt", "errors"),
)
ALLOWED = {"config.json": CONFIG, "tokenizer_config.json": TOKENIZER_CONFIG, "special_tokens_map.json": TOKENIZER_CONFIG}
"""The keys of each file that `transformers` may see. It takes others for arguments, and some of those for paths of files to read."""


def convert(folder: Path) -> Any:
    """A `tokenizers.Tokenizer`. Raises ConfigurationError where it would read text otherwise than meant, and what `transformers` raises."""
    transformers = import_module("transformers")
    described = _read(folder / "tokenizer_config.json")
    code = described.get("auto_map") or {}
    if isinstance(code, list) or "AutoTokenizer" in code:
        raise ConfigurationError("tokenizer_config.json: auto_map names code that comes with the checkpoint, and that is not run")
    # For some types of models AutoTokenizer overrules the class that is named, to read tokenizer.json; without one it then reads the
    # vocabulary of GPT-2 not at all and SentencePiece's otherwise than that does.
    name = described.get("tokenizer_class") or UNNAMED.get(_read(folder / "config.json").get("model_type", ""))
    fast = transformers.PreTrainedTokenizerFast
    named = getattr(transformers, str(name).removesuffix("Fast"), None)
    reader: Any = transformers.AutoTokenizer
    if isinstance(named, type) and issubclass(named, fast) and named is not fast:
        reader = named
        _check_files(folder, named)
    tokenizer = reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(tokenizer, fast):
        raise ConfigurationError(f"{type(tokenizer).__name__} has no form that can be saved as one")
    _check(folder, tokenizer)
    return tokenizer.backend_tokenizer


def is_sentencepiece(path: Path) -> bool:
    """Whether a .model is SentencePiece's, whose first field is that of its pieces; tiktoken's begins with a token in base64."""
    with path.open("rb") as file:
        return file.read(1) == b"\n"


def description(path: Path) -> dict[str, Any] | None:
    """What `transformers` may see of a file that describes; None: all of it. Raises ConfigurationError where it is not a JSON object."""
    if path.name not in ALLOWED:
        return None
    return {key: value for key, value in _read(path).items() if key in ALLOWED[path.name] or key.endswith("_token")}


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path.name}: not a JSON object")
    return value


def _check_files(folder: Path, reader: Any) -> None:
    """Raises ConfigurationError where a class lacks a file: it would read the others, and be a tokenizer of a few tokens."""
    files = (file for key, file in reader.vocab_files_names.items() if key != "tokenizer_file")
    lacking = sorted(file for file in files if not (folder / file).is_file())
    if lacking:
        raise ConfigurationError(f"{reader.__name__} reads {' and '.join(lacking)}, which the folder lacks")


def _check(folder: Path, tokenizer: Any) -> None:
    """Raises ConfigurationError where the vocabulary was not found, which the library does not mind, or is not read as meant."""
    kind = type(tokenizer)
    if tokenizer.vocab_size < FEWEST_TOKENS:
        raise ConfigurationError(f"{kind.__name__} finds {tokenizer.vocab_size} tokens in them")
    for path in folder.glob("*.model"):
        if is_sentencepiece(path):
            processor = import_module("sentencepiece").SentencePieceProcessor(model_file=str(path))
            for probe in PROBES:
                if tokenizer.encode(probe, add_special_tokens=False) != processor.encode(probe):
                    text = json.dumps(probe, ensure_ascii=False)
                    raise ConfigurationError(
                        f"{kind.__name__} does not read {path.name} as SentencePiece does, for one {text}; "
                        f"{ADVICE}; or put a tokenizer.json that does into the folder"
                    )


def main() -> None:
    die_with_parent()
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    made = _converted(folder)
    try:
        file.write_text(made, encoding="utf-8")
    except OSError as error:
        _print_reason(f"{error.strerror}")
        sys.exit(NOT_WRITTEN)


def _converted(folder: Path) -> str:
    """The text of the file. Exits where there can be none."""
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
