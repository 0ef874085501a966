"""The text of a continuation is that of prompt and continuation without the prompt's, as
transformers slices it, whatever the decoder.

Pieces joined, token texts joined and whole texts agree; stops and bad words that are pieces of the
text work.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from server import protocol
from server.generation.request import Choice, Request
from server.generation.stream import ChoiceDetokenizer, Piece
from server.text.codec import Detokenizer, TextCodec
from server.text.jobs import Spell, Texts
from tests.support.tokenizers import MAKERS, SPECIAL, make_decoding_tokenizer

NUM_SAMPLES = 300
"""Of each kind of decoder."""


@dataclass
class Kind:
    codec: TextCodec
    oracle: Any
    """The tokenizer as `transformers` loads it."""
    is_byte: list[bool]
    """For each token whether it is a single byte."""

    def samples(self) -> Iterator[tuple[list[int], list[int]]]:
        """Prompts and continuations: of random tokens, and a text's tokens cut anywhere."""
        weights = [1 if byte else 8 for byte in self.is_byte]
        for seed in range(NUM_SAMPLES):
            rng = random.Random(seed)
            ids = rng.choices(range(len(weights)), weights, k=rng.randint(1, 40))
            if seed % 3 == 0:
                ids = self.codec.encode("".join(rng.choices("abcdef  .,'é漢😀", k=30)))
            cut = rng.randint(0, len(ids) - 1)
            yield ids[:cut], ids[cut:]

    def text(self, ids: list[int], skips: bool = True) -> Any:
        return self.oracle.decode(
            ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
        )

    def pieces(self, prompt: list[int], ids: list[int], **fields: Any) -> list[Piece]:
        request = Request(prompt=prompt, sampling=protocol.Sampling(), **fields)
        made: list[Piece] = []
        choice = ChoiceDetokenizer(
            self.codec, Choice(len(prompt), len(ids), index=0, request=request)
        )
        for index, id in enumerate(ids):
            made.append(
                choice.piece(
                    protocol.Token(1, index, id, -1.0, "length" if index == len(ids) - 1 else None)
                )
            )
            if made[-1].finish is not None:
                break
        return made


@pytest.fixture(scope="module", params=MAKERS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("kind")
    tokenizer = make_decoding_tokenizer(request.param, folder)
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    names = map(tokenizer.id_to_token, range(tokenizer.get_vocab_size()))
    return Kind(
        TextCodec(folder),
        oracle,
        [str(name).startswith("<0x") or len(str(name)) == 1 for name in names],
    )


@pytest.mark.parametrize("skips", [True, False])
def test_pieces_are_the_slice_that_transformers_returns(kind: Kind, skips: bool) -> None:
    for prompt, ids in kind.samples():
        expected = kind.text(prompt + ids, skips)[len(kind.text(prompt, skips)) :]
        made = kind.pieces(prompt, ids, skip_special_tokens=skips)
        assert "".join(piece.text for piece in made) == expected, (prompt, ids)
        assert all(piece.token_text == piece.text for piece in made if not piece.special)


def test_a_stop_that_is_a_piece_of_the_text_ends_it_there(kind: Kind) -> None:
    for number, (prompt, ids) in enumerate(kind.samples()):
        text = kind.text(prompt + ids)[len(kind.text(prompt)) :]
        if not text:
            continue
        rng = random.Random(number)
        begin = rng.randrange(len(text))
        stop = text[begin : begin + rng.randint(1, 4)]
        for keep in (True, False):
            made = kind.pieces(prompt, ids, stop_strings=(stop,), keep_stop=keep)
            end = text.find(stop) + len(stop) * keep
            assert "".join(piece.text for piece in made) == text[:end], (prompt, ids, stop)
            assert made[-1].finish == "stop_sequence" and made[-1].stop == stop


def test_a_bad_word_that_is_a_piece_of_the_text_is_spelt_as_its_token(kind: Kind) -> None:
    """In the middle of a text; spaces before a word are the word's own where they are asked for."""
    anchor = kind.codec.encode_bare("ab")
    for id, byte in enumerate(kind.is_byte):
        word = kind.codec.token_text(id)
        if byte or id < len(SPECIAL) or not word.strip() or "�" in word:
            continue
        detokenizer = Detokenizer(kind.codec, anchor)
        assert detokenizer.push(id) + detokenizer.flush() == word
        found = Spell([word]).run(Texts(kind.codec))
        assert [id] in found, word
        for ids in found:
            whole = kind.codec.decode([*anchor, *ids])
            assert whole in (
                kind.codec.decode(anchor) + word,
                f"{kind.codec.decode(anchor)} {word.lstrip()}",
            )


def test_a_token_alone_has_the_text_that_it_has_in_a_text(kind: Kind) -> None:
    """Not the one that the decoder gives it at a text's beginning."""
    anchor = kind.codec.encode_bare("ab cd")
    before = kind.codec.decode(anchor)
    for id, byte in enumerate(kind.is_byte):
        if id >= len(SPECIAL) and not byte:
            assert before + kind.codec.token_text(id) == kind.codec.decode([*anchor, id])
