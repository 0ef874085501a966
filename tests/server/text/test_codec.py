"""Incremental detokenization is exact for every split of characters; stop strings are found across
all splits.
"""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing

from model.spec import CheckpointError
from server.errors import ConfigurationError
from server.text.codec import Detokenizer, StopStrings, TextCodec
from tests.support.checkpoints import make_tokenizer


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("codec")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


def byte_ids(codec: TextCodec, data: bytes) -> list[int]:
    """One token for each byte, whatever the bytes: the tokenizer's alphabet, by the letter it
    prints a byte as.
    """
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # GPT-2's table: bytes that print stand for themselves, the others are shifted past 255 in their
    # order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [b for b in range(256) if b not in printable]
    letter = {b: chr(b) if b in printable else chr(256 + shifted.index(b)) for b in range(256)}
    assert sorted(letter.values()) == alphabet
    return [codec.tokenizer.token_to_id(letter[b]) for b in data]


def streamed(codec: TextCodec, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(codec)
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


@pytest.mark.parametrize(
    "text",
    ["plain", "äöü", "€ and 漢字", "👩‍👩‍👧‍👦🇩🇪", "a\ufffdb", "\x00\u202e\u200b", "e\u0301" * 30],
)
def test_every_byte_of_every_character_alone(codec: TextCodec, text: str) -> None:
    pieces = streamed(codec, byte_ids(codec, text.encode()))
    assert "".join(pieces) == text
    held = 0
    for piece in pieces:
        held = 0 if piece else held + 1
        assert held <= 3, "a finished character is held back"


def test_the_bytes_of_an_added_token_are_its_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["    ", "naïve x"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    for text in ("    ", "naïve x"):
        (id,) = codec.encode(text)
        assert codec.token_bytes(id) == codec.decode([id]).encode() == text.encode()


@given(st.text(max_size=60))
def test_text_through_the_tokenizer_and_back(codec: TextCodec, text: str) -> None:
    assert "".join(streamed(codec, codec.encode(text))) == text


@given(st.binary(max_size=80))
def test_any_bytes_stream_to_what_one_decode_gives(codec: TextCodec, data: bytes) -> None:
    ids = byte_ids(codec, data)
    pieces = streamed(codec, ids)
    assert "".join(pieces) == codec.decode(ids) == data.decode("utf-8", errors="replace")
    for piece in pieces:
        piece.encode("utf-8")


@given(
    st.text(alphabet="ab<", max_size=30),
    st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stop_strings_end_the_text_where_the_first_is_complete(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    finder, out = StopStrings(tuple(stops)), ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, stopped = finder.push(text[start:end])
        out += piece
        if stopped:
            break
    # Character by character, the text ends as soon as any stop string is complete.
    expected = next(
        (
            text[:i]
            for i in range(1, len(text) + 1)
            if any(text[:i].endswith(stop) for stop in stops)
        ),
        text,
    )
    assert out == expected


@given(
    st.text(alphabet="ab", max_size=40),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=8), min_size=1, max_size=4),
)
def test_stop_strings_are_found_one_character_at_a_time(text: str, stops: list[str]) -> None:
    finder, out = StopStrings(tuple(stops)), ""
    for character in text:
        piece, stopped = finder.push(character)
        out += piece
        if stopped:
            break
    assert out == next(
        (text[:i] for i in range(1, len(text) + 1) if text[:i].endswith(tuple(stops))), text
    )


def test_padding_and_truncation_of_a_tokenizers_training_are_not_obeyed(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec(tmp_path)
    assert len(codec.encode("a" * 100)) == 100 and len(codec.encode("a")) == 1


def test_unsearched_text_does_not_stop_but_may_begin_a_stop() -> None:
    finder = StopStrings(("xy",))
    assert finder.push("xyx", search=False) == ("xyx", None)
    assert finder.push("yz") == ("y", "xy")
    finder = StopStrings(("xy",), keep=False)
    assert finder.push("xyx", search=False) == ("xy", None)
    assert finder.push("yz") == ("", "xy")


@given(
    st.text(alphabet="ab<", max_size=40),
    st.lists(st.text(alphabet="ab<", min_size=1, max_size=8), max_size=4),
    st.booleans(),
    st.data(),
)
@settings(max_examples=2000)
def test_what_is_held_back_is_never_more_than_may_begin_a_stop_and_always_released(
    text: str, stops: list[str], keep: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    finder, out, stopped = StopStrings(tuple(stops), keep), "", None
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, stopped = finder.push(text[start:end])
        out += piece
        if stopped is not None:
            break
        held = text[len(out) : end]
        assert text[:end].startswith(out) and (
            not held or any(stop.startswith(held) for stop in stops)
        )
        assert not (keep and held), "text that stays is never held back"
    if stopped is None:
        out += finder.flush()
        assert out == text and not any(stop in text for stop in stops)
    else:
        end = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        assert stopped in ending
        assert out == text[:end] if keep else out == text[: end - max(map(len, ending))]


def test_special_tokens_and_ends(tmp_path: Path, codec: TextCodec) -> None:
    assert codec.special_ids == {0} and codec.encode("<|endoftext|>a")[0] == 0
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}})
    )
    assert TextCodec(tmp_path).end_token_ids == (0,)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        TextCodec(tmp_path)


def test_the_largest_id_may_be_one_that_the_post_processor_adds(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 99_999)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextCodec(tmp_path).largest_id == 99_999


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json: no such file"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="not a tokenizer"):
        TextCodec(tmp_path)


def joining_codec(folder: Path, strips: bool) -> TextCodec:
    """A vocabulary of SentencePiece's kind: words, spaces as U+2581, single bytes."""
    words = ["a", "\u2581b", "\u2581\u2581", "\u4e2d\u2581x", "\n", "\u2581\u00e9"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        word: 256 + id for id, word in enumerate(words)
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


@pytest.mark.parametrize("kind", ["bytes", "joined", "stripped"])
def test_what_is_decoded_token_by_token_is_what_is_decoded_at_once(
    kind: str, tmp_path: Path
) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    found = TextCodec(tmp_path) if kind == "bytes" else joining_codec(tmp_path, kind == "stripped")
    for seed in range(400):
        rng = random.Random(seed)
        ids: list[int] = []
        for _ in range(rng.randint(1, 30)):
            # Decoders of runs of single bytes take back whole characters once an invalid one
            # follows, so there are only valid ones.
            data = rng.choice("x\u00e9\u4e2d\U0001f600").encode()
            single = byte_ids(found, data) if kind == "bytes" else list(data)
            ids += single if rng.random() < 0.4 else [rng.randrange(256, found.largest_id + 1)]
        detokenizer = Detokenizer(found)
        text = "".join(map(detokenizer.push, ids))
        assert text + detokenizer.flush() == found.decode(ids), (seed, ids)
