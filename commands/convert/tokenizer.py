"""Makes a tokenizer.json of a checkpoint's older tokenizer files with `transformers`.

Invariant: it tokenizes text as the folder's own files do, or it is not made and the error says why.
Nothing is downloaded, no code of the folder is run, and no file outside of it is read.
"""

import json
import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model.checkpoint.files import MOST_LIST_BYTES, MOST_TOKENIZER_BYTES, read_file, read_object
from model.spec import CheckpointError, OptionError
from server.errors import ConfigurationError
from server.hub.tokenizer_file import DESCRIPTIONS, vocabularies_of

NAME = "tokenizer.json"
# Classes that transformers 4 used by model type if the folder names none; transformers 5 has no
# such defaults.
UNNAMED = {"gpt_bigcode": "GPT2Tokenizer"}
FEWEST_TOKENS = 256
ADVICE = (
    'name the right class in tokenizer_config.json, as in {"tokenizer_class": '
    '"LlamaTokenizer", "add_bos_token": true}'
)
PROBES = (
    "def add(x, y): return x + 12",
    "def f():\n    return 1\n",
    "a  b   c",
    "\tx",
    "\ufb01ne \uff12 \u2460",  # Characters that NFKC normalization changes.
    "é λ 中 😀",
)
"""Texts on which a conversion is compared with SentencePiece. None begins with a space, where
transformers is known to differ.
"""
CONFIG = ("model_type", "model_name", "tokenizer_class", "transformers_version")
TOKENIZER_CONFIG = (
    *("auto_map", "tokenizer_class"),  # `auto_map` is refused below.
    *(
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "legacy",
        "split_special_tokens",
        "model_max_length",
    ),
    *("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "extra_ids"),
    *(
        "do_lower_case",
        "do_basic_tokenize",
        "strip_accents",
        "tokenize_chinese_chars",
        "keep_accents",
    ),
    *(
        "remove_space",
        "trim_offsets",
        "clean_up_tokenization_spaces",
        "spaces_between_special_tokens",
    ),
    *("use_default_system_prompt", "errors"),
)
ALLOWED = {
    "config.json": CONFIG,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "special_tokens_map.json": TOKENIZER_CONFIG,
}
"""The keys of each file that are passed to `transformers`: it uses others as arguments, some of
them as paths of files to read.
"""


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json into a folder that has none, whole or not at all. Raises
    CheckpointError or ConfigurationError if it cannot be made, and OptionError if it cannot be
    written.
    """
    path = folder / NAME
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; --model takes a checkpoint folder")
    if path.exists():
        raise CheckpointError(f"{path}: is there already; give --output to convert the weights")
    made = tokenizer_json(folder)
    if made is None:
        words = "a tokenizer.model, or a vocab.json with its merges.txt"
        raise CheckpointError(f"{folder}: expected {words}, to make a tokenizer.json of")
    try:
        with TemporaryDirectory(prefix=f".{NAME}.", dir=folder) as beside:
            written = Path(beside) / NAME
            written.write_text(made, encoding="utf-8")
            os.replace(written, path)
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}") from None
    print(f"{path}: made of {_names(vocabularies_of(folder))}")


def tokenizer_json(folder: Path) -> str | None:
    """The text of a tokenizer.json made of a folder's older files; None where it has none of these.
    Raises CheckpointError or ConfigurationError.
    """
    vocabularies = vocabularies_of(folder)
    if not vocabularies:
        return None
    _check_packages(vocabularies)
    sources = vocabularies + [path for name in DESCRIPTIONS if (path := folder / name).is_file()]
    with TemporaryDirectory() as place:
        seen = Path(place)
        for path in sources:
            (seen / path.name).write_bytes(_visible(path))
        try:
            text: str = convert(seen).to_str(pretty=True)
        except ConfigurationError as error:
            reason = str(error)
        except Exception as error:  # The library raises many kinds.
            text = " ".join(f"{type(error).__name__}: {error}".replace(f"{seen}/", "").split())
            reason = f"transformers does not read them ({text[:300]}); {ADVICE}"
        else:
            return text
    raise ConfigurationError(
        f"{folder}: {_names(sources)} cannot be converted to a tokenizer.json: {reason}"
    )


def convert(folder: Path) -> Any:
    """The converted `tokenizers.Tokenizer`. Raises ConfigurationError if it would tokenize
    differently, and any error of `transformers`.
    """
    transformers = import_module("transformers")
    described = _read(folder / "tokenizer_config.json")
    code = described.get("auto_map") or {}
    if isinstance(code, list) or "AutoTokenizer" in code:
        raise ConfigurationError(
            "tokenizer_config.json: auto_map names code that comes with the checkpoint, which is "
            "not run"
        )
    # For some model types AutoTokenizer ignores the named class and expects a tokenizer.json. Where
    # there is none, it does not find the vocabulary of GPT-2's files, and tokenizes otherwise than
    # SentencePiece with a .model file.
    model_type = _read(folder / "config.json").get("model_type", "")
    name = described.get("tokenizer_class") or UNNAMED.get(model_type)
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


def _is_sentencepiece(path: Path) -> bool:
    """Whether a .model file is SentencePiece's (a protobuf message that begins with its pieces) and
    not tiktoken's (base64 lines).
    """
    with path.open("rb") as file:
        return file.read(1) == b"\n"


def _visible(path: Path) -> bytes:
    """What `transformers` sees of a file: of a JSON file that describes the tokenizer, the allowed
    keys. Raises CheckpointError if it is not a JSON object, or is outside of the folder.
    """
    allowed = ALLOWED.get(path.name)
    if allowed is None:
        return read_file(path, MOST_TOKENIZER_BYTES) or b""
    values = _read(path)
    kept = {key: value for key, value in values.items() if key in allowed or key.endswith("_token")}
    return json.dumps(kept).encode()


def _read(path: Path) -> dict[str, Any]:
    return read_object(path, MOST_LIST_BYTES) or {}


def _names(paths: list[Path]) -> str:
    return " and ".join(path.name for path in paths)


def _check_packages(vocabularies: list[Path]) -> None:
    """Raises ConfigurationError that names missing packages: the library's own messages name only
    the one it tried last.
    """
    needed = ["transformers"]
    for path in vocabularies:
        if path.suffix in (".model", ".tiktoken"):
            needed += ["sentencepiece", "protobuf"] if _is_sentencepiece(path) else ["tiktoken"]
    lacking = [name for name in dict.fromkeys(needed) if not _is_installed(name)]
    if lacking:
        packages = " ".join(lacking)
        raise ConfigurationError(
            f"{vocabularies[0].parent}: converting {_names(vocabularies)} to a tokenizer.json "
            f"needs {packages}: {sys.executable} -m pip install {packages}"
        )


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _check_files(folder: Path, reader: Any) -> None:
    """Raises ConfigurationError if a file of the tokenizer's class is missing: without it the class
    would have only a few tokens.
    """
    files = (file for key, file in reader.vocab_files_names.items() if key != "tokenizer_file")
    lacking = sorted(file for file in files if not (folder / file).is_file())
    if lacking:
        raise ConfigurationError(
            f"{reader.__name__} reads {' and '.join(lacking)}, which the folder lacks"
        )


def _check(folder: Path, tokenizer: Any) -> None:
    """Raises ConfigurationError if the vocabulary was not found, which `transformers` accepts, or
    is read differently by SentencePiece.
    """
    kind = type(tokenizer)
    if tokenizer.vocab_size < FEWEST_TOKENS:
        raise ConfigurationError(
            f"{kind.__name__} reads only {tokenizer.vocab_size} tokens from them"
        )
    for path in folder.glob("*.model"):
        if _is_sentencepiece(path):
            processor = import_module("sentencepiece").SentencePieceProcessor(model_file=str(path))
            for probe in PROBES:
                if tokenizer.encode(probe, add_special_tokens=False) != processor.encode(probe):
                    text = json.dumps(probe, ensure_ascii=False)
                    raise ConfigurationError(
                        f"{kind.__name__} does not read {path.name} as SentencePiece does, for "
                        f"example {text}; {ADVICE}; or put a right tokenizer.json into the folder"
                    )
