"""The tokenizer of a GGUF file: its metadata `tokenizer.*` -> tokenizer.json, tokenizer_config.json and generation_config.json.

Invariant: the tokenizer.json gives the ids that llama.cpp gives with the same metadata, or the metadata is refused by key. Only pieces of
text are merged: no text becomes a control token by merging. It knows neither the file nor the library that reads a tokenizer.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.checkpoint.config import short
from model.checkpoint.gguf.pre_tokenizers import PATTERNS, WHOLE_WORDS
from model.spec import CheckpointError

Json = dict[str, Any]
PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""
SPACE = "\u2581"
"""What stands for a space in the pieces of a SentencePiece vocabulary."""
ENDS = ("eos", "eot", "eom")
NAMED = {
    "bos_token": ("bos",),
    "eos_token": ("eos",),
    "fim_prefix_token": ("fim_pre", "prefix"),
    "fim_suffix_token": ("fim_suf", "suffix"),
    "fim_middle_token": ("fim_mid", "middle"),
    "fim_separator_token": ("fim_sep",),
}
"""Key of tokenizer_config.json -> the metadata's names of its id, the newer first."""
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""general.sampling.* -> the key of generation_config.json."""
REFUSED = {
    "remove_extra_whitespaces": "white space is part of a prompt",
    "precompiled_charsmap": "normalization by a table of characters is not supported",
    "suppress_tokens": "tokens that are never generated are not supported",
}
"""Keys that would change what is tokenized or generated, unless they are false or empty."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a GGUF file by id, with the types of llama.cpp's TokenType."""

    metadata: Mapping[str, Any]
    tokens: list[str]
    types: Sequence[int]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
        """Raises CheckpointError for lists that do not fit together, and for a token that occurs twice."""
        given = _list(metadata, "tokens", str)
        tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(given)]
        types = _list(metadata, "token_type", int, len(tokens)) if f"{PREFIX}token_type" in metadata else [NORMAL] * len(tokens)
        if len(set(tokens)) < len(tokens):
            first: dict[str, int] = {}
            for id, token in enumerate(tokens):
                if first.setdefault(token, id) != id:
                    raise CheckpointError(f"{PREFIX}tokens: {id} and {first[token]} are both {short(token)}; expected each token once")
        for key, why in REFUSED.items():
            if metadata.get(f"{PREFIX}{key}"):
                raise CheckpointError(f"{PREFIX}{key} is {short(metadata[PREFIX + key])}; {why}")
        return cls(metadata, tokens, types)

    def id(self, *names: str) -> int | None:
        """The id under the first of these names that the metadata has. Raises CheckpointError if there is no such token."""
        for name in names:
            key = f"{PREFIX}{name}_token_id"
            if (value := self.metadata.get(key)) is not None:
                if not isinstance(value, int) or not 0 <= value < len(self.tokens):
                    raise CheckpointError(f"{key} is {short(value)}, expected an id below {len(self.tokens)}, the number of tokens")
                return value
        return None

    def text(self, *names: str) -> str | None:
        """The token under the first of these names."""
        id = self.id(*names)
        return None if id is None else self.tokens[id]

    def flag(self, name: str, default: bool) -> bool:
        """A boolean of the metadata. Raises CheckpointError."""
        value = self.metadata.get(f"{PREFIX}{name}", default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{PREFIX}{name} is {short(value)}, expected true or false")
        return value


def tokenizer_json(metadata: Mapping[str, Any]) -> Json:
    """The content of tokenizer.json. Raises CheckpointError that names the key for a tokenizer that is not supported."""
    vocabulary = Vocabulary.of(metadata)
    kind = metadata.get(f"{PREFIX}model")
    if kind == "llama":
        text_parts, begins = _sentencepiece(vocabulary), True
    elif kind == "gpt2":
        text_parts, begins = _byte_level(vocabulary), metadata.get(f"{PREFIX}pre") in WHOLE_WORDS
    else:
        raise CheckpointError(f"{PREFIX}model is {short(kind)}, expected llama or gpt2")
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(vocabulary, begins),
        **text_parts,
    }


def tokenizer_config(metadata: Mapping[str, Any]) -> Json:
    """The content of tokenizer_config.json: the special tokens, those of fill-in-the-middle, and the chat templates."""
    vocabulary = Vocabulary.of(metadata)
    named: Json = {key: vocabulary.text(*names) for key, names in NAMED.items()}
    templates = {"default": metadata.get(TEMPLATE)} | {
        key.removeprefix(f"{TEMPLATE}."): value for key, value in metadata.items() if key.startswith(f"{TEMPLATE}.")
    }
    given = [{"name": name, "template": template} for name, template in templates.items() if template is not None]
    named["chat_template"] = given or None
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {key: value for key, value in named.items() if value is not None}


def generation_config(metadata: Mapping[str, Any]) -> Json:
    """The content of generation_config.json: every token that ends a text, and the sampling parameters that the file recommends."""
    vocabulary = Vocabulary.of(metadata)
    ends = {id for name in ENDS if (id := vocabulary.id(name)) is not None}
    sampling = {ours: metadata[key] for name, ours in SAMPLING.items() if (key := f"general.sampling.{name}") in metadata}
    return {"eos_token_id": sorted(ends)} | sampling


def _list(metadata: Mapping[str, Any], name: str, kind: type, count: int | None = None) -> list[Any]:
    """A list of the metadata. Raises CheckpointError if it is missing, is of another kind or has not `count` items."""
    value = metadata.get(f"{PREFIX}{name}")
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value) or not isinstance(value[0], kind):
        found = "is missing" if value is None else f"is {short(value)}"
        raise CheckpointError(f"{PREFIX}{name} {found}; expected a list of {kind.__name__}, of which a tokenizer is made")
    if count is not None and len(value) != count:
        raise CheckpointError(f"{PREFIX}{name} has {len(value)} items, expected {count}, one for each token")
    return list(value)


def _added_tokens(vocabulary: Vocabulary) -> list[Json]:
    """The tokens that are found in a text before it is tokenized: control tokens, which are special, and those defined by the user."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": id, "content": token, **plain, "special": kind != USER_DEFINED}
        for id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def _post_processor(vocabulary: Vocabulary, begins: bool) -> Json | None:
    """Puts the begin token before a prompt and the end token after it, where the metadata says so. `begins`: where it does not say."""
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    used = {}
    for name, default, at in (("bos", begins, 0), ("eos", False, 2)):
        if not vocabulary.flag(f"add_{name}_token", default):
            continue
        id = vocabulary.id(name)
        if id is None:
            raise CheckpointError(f"{PREFIX}{name}_token_id is missing; the tokenizer adds that token to every prompt")
        token = vocabulary.tokens[id]
        single.insert(at, {"SpecialToken": {"id": token, "type_id": 0}})
        used[token] = {"id": token, "ids": [id], "tokens": [token]}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used} if used else None


def _sentencepiece(vocabulary: Vocabulary) -> Json:
    """The parts of a tokenizer.json for a SentencePiece vocabulary: adjacent pieces that make the best piece are merged first."""
    scores = _list(vocabulary.metadata, "scores", float, len(vocabulary.tokens))
    unknown = vocabulary.text("unknown", "unk")
    space = vocabulary.flag("add_space_prefix", True)
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    unescape = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    model = {
        "type": "BPE",
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": BYTE in vocabulary.types,
        "vocab": {token: id for id, token in enumerate(vocabulary.tokens)},
        "merges": _merges(vocabulary, scores),
    }
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space else []
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, escape]}
    return {
        "normalizer": prepend if space else escape,
        "decoder": {"type": "Sequence", "decoders": [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": model,
    }


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, those of the best piece first."""
    pieces = {
        token: score for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True) if kind in (NORMAL, UNUSED)
    }
    merges = []
    for piece in sorted(pieces, key=pieces.__getitem__, reverse=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def _byte_level(vocabulary: Vocabulary) -> Json:
    """The parts of a tokenizer.json for byte-level BPE, whose vocabulary is written in letters that stand for bytes."""
    pre = vocabulary.metadata.get(f"{PREFIX}pre", "default")
    if pre not in PATTERNS:
        raise CheckpointError(f"{PREFIX}pre is {short(pre)}; supported: {', '.join(PATTERNS)}")
    if vocabulary.flag("add_space_prefix", False):
        raise CheckpointError(f"{PREFIX}add_space_prefix is true, which has no meaning for a byte-level vocabulary; expected false")
    vocab = {token: id for id, token in enumerate(vocabulary.tokens)}
    merges = []
    for number, merge in enumerate(_list(vocabulary.metadata, "merges", str)):
        left, _, right = merge[1:].partition(" ")
        pair = merge[:1] + left, right
        if not right or not all(part in vocab for part in (*pair, "".join(pair))):
            raise CheckpointError(
                f"{PREFIX}merges: number {number} is {short(merge)}; expected two tokens of the vocabulary that make a third"
            )
        merges.append(pair)
    splits = [{"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in PATTERNS[pre]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "ignore_merges": pre in WHOLE_WORDS,
        "vocab": vocab,
        "merges": merges,
    }
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": model,
    }
