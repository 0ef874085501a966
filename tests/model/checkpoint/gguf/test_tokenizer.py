"""The tokenizer of a GGUF file gives the ids of the library whose vocabulary it is: SentencePiece,
or `tokenizers` with its own parts.
"""

import importlib.util
import io
import json
import random
from importlib import import_module
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model.checkpoint.config import Config
from model.checkpoint.gguf.tokenizer import (
    CONTROL,
    NORMAL,
    PREFIX,
    USER_DEFINED,
    Vocabulary,
    generation_config,
    tokenizer_config,
    tokenizer_json,
)
from model.spec import CheckpointError
from tests.support.checkpoints import make_tokenizer

TEXTS = (
    "def f(x):\n    return x + 12\n\n\n",
    "a  b   c    d",
    "  leading and trailing  ",
    "\t\ttabs \t and\r\nlines\n\n",
    "日本語のテキスト。漢字仮名",
    "é e\u0301 \ufb01 \uff21 \ufdfa 😀👩‍👩‍👧 🇩🇪",
    '{"a": [1, 2.5e-3, null], "b": "\\n"}',
    "1234567890 007 3.14 x1y22z333",
    "Don't, can't -- I'LL; they've?",
    "$a += b^2 <= `c` | ~d",
    "\x00\x01\x7f",
    "",
)
CORPUS = (
    *TEXTS,
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "return self.x if x else None # 1234\n",
) * 4
needs_sentencepiece = pytest.mark.skipif(
    not (importlib.util.find_spec("sentencepiece") and importlib.util.find_spec("google")),
    reason="takes sentencepiece and protobuf",
)


def of(metadata: dict[str, Any]) -> Vocabulary:
    return Vocabulary(Config(metadata, "m.gguf"))


def loaded(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(of(metadata))))


def probes() -> list[str]:
    """The texts, and random ones of their characters."""
    letters, draw = "".join(TEXTS) + "  \n\n", random.Random(0)
    return [*TEXTS, *("".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(300))]


def sentencepiece(prefix: bool, bytes_too: bool = True) -> tuple[Any, dict[str, Any]]:
    """(a processor of a small vocabulary, the metadata that llama.cpp's converter writes of it)."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    pb2: Any = import_module("sentencepiece.sentencepiece_model_pb2")

    made = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=made,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=bytes_too,
        normalization_rule_name="identity",
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        user_defined_symbols=["\u2581\u2581", "\u2581\u2581\u2581", "\n", "\n\n", "<table>"],
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    model = pb2.ModelProto.FromString(made.getvalue())
    pieces = [
        (piece.piece.replace("\u2581", " ") if piece.type == USER_DEFINED else piece.piece, piece)
        for piece in model.pieces
    ]
    metadata = {
        f"{PREFIX}model": "llama",
        f"{PREFIX}tokens": [text for text, _ in pieces],
        f"{PREFIX}scores": [piece.score for _, piece in pieces],
        f"{PREFIX}token_type": [piece.type for _, piece in pieces],
        f"{PREFIX}add_space_prefix": prefix,
        f"{PREFIX}unknown_token_id": 0,
        f"{PREFIX}bos_token_id": 1,
        f"{PREFIX}eos_token_id": 2,
    }
    return SentencePieceProcessor(model_proto=made.getvalue()), metadata


@needs_sentencepiece
@pytest.mark.parametrize("bytes_too", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_is_read_as_sentencepiece_reads_it(
    prefix: bool, bytes_too: bool
) -> None:
    oracle, metadata = sentencepiece(prefix, bytes_too)
    made = loaded(metadata)
    # With a prefix SentencePiece puts it before the text alone, where it may begin an added token;
    # llama.cpp after every added token too.
    texts = [
        text
        for text in probes()
        if not (prefix and (text.startswith(" ") or "  " in text or "\n" in text))
    ]
    assert len(texts) > 60
    for text in texts:
        ids = oracle.encode(text)
        assert made.encode(text, add_special_tokens=False).ids == ids, repr(text)
        if bytes_too:
            assert made.decode(ids, skip_special_tokens=False) == text
    assert made.encode("").ids == [1]  # The begin token, unless add_bos_token says otherwise.
    assert loaded(
        metadata | {f"{PREFIX}add_bos_token": False, f"{PREFIX}add_eos_token": True}
    ).encode("").ids == [2]


@needs_sentencepiece
def test_control_tokens_are_found_in_a_prompt_and_never_merged_from_text() -> None:
    _, metadata = sentencepiece(prefix=False)
    made = loaded(metadata)
    ids = {token: id for id, token in enumerate(metadata[f"{PREFIX}tokens"])}
    found = made.encode("<start_of_turn>a<table>", add_special_tokens=False).ids
    assert found == [ids["<start_of_turn>"], ids["a"], ids["<table>"]]
    made.encode_special_tokens = True
    assert (
        ids["<start_of_turn>"] not in made.encode("<start_of_turn>", add_special_tokens=False).ids
    )
    assert made.decode(found, skip_special_tokens=True) == "a<table>"
    merged = {"".join(pair) for pair in tokenizer_json(of(metadata))["model"]["merges"]}
    assert merged and not merged & {
        token
        for token, kind in zip(ids, metadata[f"{PREFIX}token_type"], strict=True)
        if kind != NORMAL
    }


def byte_level(parts: list[Any], **metadata: Any) -> tuple[Tokenizer, dict[str, Any]]:
    """(a trained tokenizer with these pre-tokenizers, the metadata of its vocabulary)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    marks = ["<|endoftext|>", "<fim_prefix>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    described = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["merges"]]
    found = {
        "model": "gpt2",
        "tokens": tokens,
        "merges": merges,
        "token_type": [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2),
    }
    return tokenizer, {f"{PREFIX}{key}": value for key, value in (found | metadata).items()}


WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("gpt-2", [WORDS]),
        ("starcoder", [DIGITS, WORDS]),
        ("refact", [DIGITS, WORDS]),
        (
            "falcon",
            [
                pre_tokenizers.Punctuation("contiguous"),
                WORDS,
                pre_tokenizers.Split("333", "isolated"),
            ],
        ),
        ("default", [WORDS, pre_tokenizers.Digits(individual_digits=False)]),
        (None, [WORDS, pre_tokenizers.Digits(individual_digits=False)]),
    ],
)
def test_a_byte_level_vocabulary_is_split_as_its_model_splits(
    pre: str | None, parts: list[Any]
) -> None:
    oracle, metadata = byte_level(parts, **({} if pre is None else {"pre": pre}))
    made = loaded(metadata)
    same = 0
    for text in probes():
        ids = made.encode(text).ids
        assert made.decode(ids, skip_special_tokens=False) == text
        same += ids == oracle.encode(text).ids
    # Of these the parts of `tokenizers` say all; of the others only the part that the texts with
    # neither punctuation nor script need.
    assert same == len(probes()) if pre in ("gpt-2", "starcoder", "refact") else same > 20


def test_every_pre_tokenizer_keeps_every_character() -> None:
    from model.checkpoint.gguf.pre_tokenizers import PATTERNS

    _, metadata = byte_level([WORDS])
    for pre in PATTERNS:
        made = loaded(metadata | {f"{PREFIX}pre": pre, f"{PREFIX}bos_token_id": 0})
        assert [
            made.decode(made.encode(text, add_special_tokens=False).ids) for text in TEXTS
        ] == list(TEXTS), pre


def test_special_tokens_templates_ends_and_sampling_defaults_come_from_the_metadata() -> None:
    _, metadata = byte_level([WORDS])
    tokens = [*metadata[f"{PREFIX}tokens"], "<end_of_turn>", "<pre>"]
    ids = {f"{PREFIX}{name}_token_id": 0 for name in ("bos", "eos")} | {
        f"{PREFIX}eot_token_id": 1,
        f"{PREFIX}prefix_token_id": len(tokens) - 1,
    }
    metadata |= {
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": [*metadata[f"{PREFIX}token_type"], 3, 3],
        **ids,
    }
    assert tokenizer_config(of(metadata)) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "fim_prefix_token": "<pre>",
    }
    assert generation_config(of(metadata)) == {"eos_token_id": [0, 1]}
    sampled = {
        f"{PREFIX}eos_token_id": 2,
        "general.sampling.temp": 0.7,
        "general.sampling.penalty_repeat": 1.1,
    }
    assert generation_config(of(metadata | sampled)) == {
        "eos_token_id": [1, 2],
        "temperature": 0.7,
        "repetition_penalty": 1.1,
    }
    one = metadata | {"tokenizer.chat_template": "{{ x }}<end_of_turn>"}
    assert tokenizer_config(of(one))["chat_template"] == [
        {"name": "default", "template": "{{ x }}<end_of_turn>"}
    ]
    # The template's end of a turn is found by rendering it.
    assert generation_config(of(one)) == {"eos_token_id": [0, 1]}
    assert tokenizer_config(of(one | {"tokenizer.chat_template.tools": "y"}))["chat_template"] == [
        {"name": "default", "template": "{{ x }}<end_of_turn>"},
        {"name": "tools", "template": "y"},
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "bert"}, "model must be one of gemma4, gpt2, llama, found 'bert'"),
        ({"model": None}, "model must be one of gemma4, gpt2, llama, and is missing"),
        ({"pre": "qwen2"}, "pre must be one of default, falcon, gpt-2, .*, found 'qwen2'"),
        ({"tokens": []}, r"tokens must be a list of str, one or more, found \[\]"),
        ({"tokens": None}, "tokens must be a list of str, one or more, and is missing"),
        ({"tokens": ["a", "b", "a"]}, "tokens must be each token once, not 2 times 'a'"),
        (
            {"token_type": [1]},
            "token_type must be a list of int, one for each of [0-9]+ tokens, found",
        ),
        ({"merges": None}, "merges must be a list of str, one or more, and is missing"),
        (
            {"merges": ["a b", "a zzz"]},
            "merges: number 1 is 'a zzz'; expected two tokens of the vocabulary that make a third",
        ),
        (
            {"add_bos_token": True},
            "bos_token_id must be an id, as the tokenizer adds that token to every prompt, and is "
            "missing",
        ),
        ({"add_eos_token": 1}, "add_eos_token must be true or false, found 1"),
        (
            {"add_bos_token": True, "bos_token_id": 10**6},
            "bos_token_id must be an integer from 0 to [0-9]+, found 1000000",
        ),
        (
            {"add_space_prefix": True},
            "add_space_prefix must be false for a byte-level vocabulary, found True",
        ),
        (
            {"remove_extra_whitespaces": True},
            "remove_extra_whitespaces must be false or empty, as white space",
        ),
        ({"suppress_tokens": [1]}, r"suppress_tokens must be false or empty, as .*, found \[1\]"),
    ],
)
def test_what_would_be_tokenized_otherwise_is_refused_by_key(
    change: dict[str, Any], reason: str
) -> None:
    _, metadata = byte_level([WORDS])
    metadata |= {f"{PREFIX}{key}": value for key, value in change.items()}
    if change == {"tokens": ["a", "b", "a"]}:
        del metadata[f"{PREFIX}token_type"]
    with pytest.raises(CheckpointError, match=f"^m.gguf: {PREFIX}{reason}"):
        tokenizer_json(of({key: value for key, value in metadata.items() if value is not None}))


def test_a_sentencepiece_vocabulary_without_scores_is_refused() -> None:
    tokens = make_tokenizer().get_vocab()
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.ggml\.scores must be a list of float, one for each of"
    ):
        tokenizer_json(
            of(
                {
                    f"{PREFIX}model": "llama",
                    f"{PREFIX}tokens": list(tokens),
                    f"{PREFIX}bos_token_id": 0,
                }
            )
        )
