"""The tokenizer of a GGUF file: its metadata `tokenizer.*` -> tokenizer.json, tokenizer_config.json
and generation_config.json.

Invariant: the tokenizer.json gives the ids that llama.cpp gives with the same metadata, or the
metadata is refused by key. Only pieces of text are merged: no text becomes a control token by
merging. It knows neither the file nor the library that reads a tokenizer.json.
"""

from array import array
from collections import Counter
from typing import Any

from model.checkpoint.config import Config, short
from model.checkpoint.gguf.pre_tokenizers import PATTERNS, WHOLE_WORDS
from model.spec import CheckpointError

Json = dict[str, Any]
PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type."""
SPACE = "\u2581"
"""Letter that stands for a space in the pieces of a SentencePiece vocabulary."""
GEMMA4 = "gemma4"
"""The kind of tokenizer with SentencePiece's pieces whose merges are listed."""
ENDS = ("eos", "eot", "eom")
ENDING = ("<turn|>", "<|tool_response>")
"""Tokens that end a text of Gemma 4, as in llama.cpp: the metadata do not name them."""
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


class Vocabulary:
    """The tokens of a GGUF file by id, with the types of llama.cpp's TokenType, and all metadata as
    `config`. Raises CheckpointError for lists that do not fit together, and for a repeated token.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        given = _list(config, "tokens", str)
        self.tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(given)]
        self.types = [NORMAL] * len(given)
        if config.get(f"{PREFIX}token_type") is not None:
            self.types = _list(config, "token_type", int, len(given))
        (token, count), *_ = Counter(self.tokens).most_common(1)
        if count > 1:
            expected = f"each token once, not {count} times {short(token)}"
            raise config.wrong(f"{PREFIX}tokens", expected)
        for key, why in REFUSED.items():
            if config.get(PREFIX + key):
                raise config.wrong(PREFIX + key, f"false or empty, as {why}")

    def id(self, *names: str) -> int | None:
        """The id under the first of these names that the metadata has. Raises CheckpointError if
        there is no such token.
        """
        for name in names:
            if self.config.get(key := f"{PREFIX}{name}_token_id") is not None:
                return self.config.integer(key, least=0, most=len(self.tokens) - 1)
        return None

    def text(self, *names: str) -> str | None:
        """The token under the first of these names."""
        id = self.id(*names)
        return None if id is None else self.tokens[id]


def tokenizer_json(vocabulary: Vocabulary) -> Json:
    """The content of tokenizer.json. Raises CheckpointError that names the key for a tokenizer that
    is not supported.
    """
    config = vocabulary.config
    kind = config.choice(
        f"{PREFIX}model", {name: name for name in ("llama", "gpt2", GEMMA4)}, "none"
    )
    begins = kind in ("llama", GEMMA4) or config.get(f"{PREFIX}pre") in WHOLE_WORDS
    if kind == "gpt2":
        parts = _byte_level(vocabulary)
    else:
        parts = _pieces(vocabulary, _merges(vocabulary) if kind == "llama" else _pairs(vocabulary))
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(vocabulary, begins),
        **parts,
    }


def tokenizer_config(vocabulary: Vocabulary) -> Json:
    """The content of tokenizer_config.json: the special tokens, those of fill-in-the-middle, and
    the chat templates.
    """
    named: Json = {key: vocabulary.text(*names) for key, names in NAMED.items()}
    named["chat_template"] = [
        {"name": key.removeprefix(TEMPLATE)[1:] or "default", "template": text}
        for key, text in sorted(vocabulary.config.values.items())
        if f"{key}.".startswith(f"{TEMPLATE}.")
    ]
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | {k: v for k, v in named.items() if v}


def generation_config(vocabulary: Vocabulary) -> Json:
    """The content of generation_config.json: every token that ends a text, and the sampling
    parameters that the file recommends.
    """
    config = vocabulary.config
    ends = {id for name in ENDS if (id := vocabulary.id(name)) is not None}
    if config.get(f"{PREFIX}model") == GEMMA4:
        ends |= {vocabulary.tokens.index(each) for each in ENDING if each in vocabulary.tokens}
    sampling = {ours: config.get(f"general.sampling.{name}") for name, ours in SAMPLING.items()}
    given = {key: value for key, value in sampling.items() if value is not None}
    return {"eos_token_id": sorted(ends)} | given


def _list(config: Config, name: str, kind: type, count: int | None = None) -> list[Any]:
    """A list of the metadata. Raises CheckpointError if it is missing, is of another kind or has
    not `count` items.
    """
    value = config.get(PREFIX + name)
    items = list(value) if isinstance(value, list | array) else []
    if not items or not isinstance(items[0], kind) or len(items) != (count or len(items)):
        each = f"one for each of {count} tokens" if count else "one or more"
        raise config.wrong(PREFIX + name, f"a list of {kind.__name__}, {each}")
    return items


def _added_tokens(vocabulary: Vocabulary) -> list[Json]:
    """The tokens that are found in a text before it is tokenized: control tokens, which are
    special, and those defined by the user.
    """
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": id, "content": token, **plain, "special": kind != USER_DEFINED}
        for id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def _post_processor(vocabulary: Vocabulary, begins: bool) -> Json | None:
    """Puts the begin token before a prompt and the end token after it, where the metadata says so.
    `begins`: whether it has a begin token where they do not say.
    """
    single: list[Json] = [{"Sequence": {"id": "A", "type_id": 0}}]
    used = {}
    for name, default, at in (("bos", begins, 0), ("eos", False, 2)):
        if not vocabulary.config.flag(f"{PREFIX}add_{name}_token", default):
            continue
        if (id := vocabulary.id(name)) is None:
            expected = "an id, as the tokenizer adds that token to every prompt"
            raise vocabulary.config.wrong(f"{PREFIX}{name}_token_id", expected)
        token = vocabulary.tokens[id]
        single.insert(at, {"SpecialToken": {"id": token, "type_id": 0}})
        used[token] = {"id": token, "ids": [id], "tokens": [token]}
    if not used:
        return None
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": used}


def _pieces(vocabulary: Vocabulary, merges: list[tuple[str, str]]) -> Json:
    """The parts of a tokenizer.json for a vocabulary of pieces of text, in which a letter stands
    for a space. The first of the merges that a text has is made first.
    """
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    unescape = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders: list[Json] = [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizers: list[Json] = [escape]
    if vocabulary.config.flag(f"{PREFIX}add_space_prefix", True):
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": vocabulary.text("unknown", "unk"),
            "fuse_unk": True,
            "byte_fallback": BYTE in vocabulary.types,
            "vocab": {token: id for id, token in enumerate(vocabulary.tokens)},
            "merges": merges,
        },
    }


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Of a SentencePiece vocabulary, every way to make a piece of two others, those of the best
    piece first.
    """
    scores = _list(vocabulary.config, "scores", float, len(vocabulary.tokens))
    rows = zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
    pieces = {token: score for token, kind, score in rows if kind in (NORMAL, UNUSED)}
    merges = []
    for piece in sorted(pieces, key=pieces.__getitem__, reverse=True):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def _pairs(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges that the metadata list. Raises CheckpointError."""
    config, tokens, merges = vocabulary.config, set(vocabulary.tokens), []
    for number, merge in enumerate(_list(config, "merges", str)):
        left, _, right = merge[1:].partition(" ")
        pair = merge[:1] + left, right
        if not right or not tokens.issuperset((*pair, "".join(pair))):
            expected = "expected two tokens of the vocabulary that make a third"
            found = f"{PREFIX}merges: number {number} is {short(merge)}"
            raise CheckpointError(f"{config.path}: {found}; {expected}")
        merges.append(pair)
    return merges


def _byte_level(vocabulary: Vocabulary) -> Json:
    """The parts of a tokenizer.json for byte-level BPE, whose vocabulary is written in letters that
    stand for bytes.
    """
    config = vocabulary.config
    pre = config.choice(f"{PREFIX}pre", {name: name for name in PATTERNS}, "default")
    if config.flag(f"{PREFIX}add_space_prefix", False):
        raise config.wrong(f"{PREFIX}add_space_prefix", "false for a byte-level vocabulary")
    merges, vocab = _pairs(vocabulary), {token: id for id, token in enumerate(vocabulary.tokens)}
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits: list[Json] = [isolated | {"pattern": {"Regex": regex}} for regex in PATTERNS[pre]]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": pre in WHOLE_WORDS,
            "vocab": vocab,
            "merges": merges,
        },
    }
