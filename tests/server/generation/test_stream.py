"""For every tokenization of a text, streamed text, text in one answer, and `decode` cut at the
first stop string are equal, in both dialects, and every event is valid UTF-8.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server import protocol
from server.generation.request import Choice, Request
from server.generation.stream import ChoiceDetokenizer, Piece
from server.text.calls.parser import CallDelta, Parsed
from server.text.codec import TextCodec
from tests.server.text.test_codec import byte_ids
from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import FakeEngine, serve

TEXTS = st.one_of(st.text(max_size=40), st.text(alphabet="ab<é漢\u200d👩", max_size=40))
STOPS = st.lists(
    st.one_of(
        st.text(alphabet="ab<é漢👩", min_size=1, max_size=5), st.text(min_size=1, max_size=3)
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("codec")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return TextCodec(folder)


def pieces(codec: TextCodec, ids: list[int], request: Request) -> list[Piece]:
    """The pieces of an output that ends by its length."""
    text = ChoiceDetokenizer(codec, Choice(len(request.prompt), len(ids), index=0, request=request))
    made = []
    for index, id in enumerate(ids):
        made.append(
            text.piece(
                protocol.Token(1, index, id, -1.0, "length" if index == len(ids) - 1 else None)
            )
        )
        if made[-1].finish is not None:
            break
    return made


def cut(text: str, stops: list[str], keep: bool) -> str:
    """`text` up to the first completed stop string; of several that end there, the longest is
    removed.
    """
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        return text
    end = min(ends)
    return (
        text[:end]
        if keep
        else text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))]
    )


@given(TEXTS.filter(bool), STOPS, st.booleans(), st.data())
@settings(max_examples=1000)
def test_pieces_joined_are_the_one_shot_decode_cut_at_the_first_stop(
    codec: TextCodec, text: str, stops: list[str], keep: bool, data: st.DataObject
) -> None:
    # Some characters as the tokenizer writes them, some byte by byte.
    ids: list[int] = []
    for character in text:
        whole = codec.encode_plain(character)
        ids += whole if data.draw(st.booleans()) else byte_ids(codec, character.encode())
    made = pieces(
        codec, ids, Request([1], protocol.Sampling(), stop_strings=tuple(stops), keep_stop=keep)
    )
    assert "".join(piece.text for piece in made) == cut(codec.decode(ids), stops, keep)
    for piece in made:
        piece.text.encode("utf-8")
    assert [piece.finish is not None for piece in made] == [False] * (len(made) - 1) + [True]
    stopped = made[-1].finish == "stop_sequence"
    assert (
        stopped == any(stop in codec.decode(ids) for stop in stops)
        and (made[-1].stop in stops) == stopped
    )


@given(st.binary(min_size=1, max_size=60), STOPS)
@settings(max_examples=500)
def test_any_bytes_at_all(codec: TextCodec, data: bytes, stops: list[str]) -> None:
    ids = byte_ids(codec, data)
    made = pieces(
        codec, ids, Request([1], protocol.Sampling(), stop_strings=tuple(stops), keep_stop=False)
    )
    assert "".join(piece.text for piece in made) == cut(
        data.decode("utf-8", errors="replace"), stops, keep=False
    )


@given(st.text(alphabet="ab é漢", min_size=1, max_size=12), TEXTS.filter(bool), st.data())
@settings(max_examples=300)
def test_healed_text_is_left_out_however_it_is_cut_into_tokens(
    codec: TextCodec, healed: str, text: str, data: st.DataObject
) -> None:
    ids = [id for character in healed + text for id in byte_ids(codec, character.encode())]
    made = pieces(codec, ids, Request([1], protocol.Sampling(), healed=healed))
    assert "".join(piece.text for piece in made) == text


def events(response: httpx.Response) -> list[Any]:
    lines = [
        line.removeprefix("data: ")
        for line in response.content.decode("utf-8", errors="strict").split("\n\n")
        if line
    ]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@given(
    st.text(alphabet="abc", min_size=1, max_size=20),
    st.lists(st.text(alphabet="09AZaz;,<", min_size=1, max_size=2), max_size=5),
)
@settings(max_examples=60)
def test_streamed_and_whole_answers_of_both_dialects_agree(
    codec_folder: Path, prompt: str, stops: list[str]
) -> None:
    async def ask() -> None:
        served = serve(codec_folder, FakeEngine())
        while not served.client.admission.accepting:
            await asyncio.sleep(0)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(served.app), base_url="http://test"
        ) as client:
            body = {
                "prompt": prompt,
                "max_tokens": 30,
                "temperature": 0,
                "stop": stops,
                "return_token_ids": True,
            }
            whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            chunks = events(await client.post("/v1/completions", json=body | {"stream": True}))
            tgi: dict[str, Any] = {
                "inputs": prompt,
                "parameters": {"max_new_tokens": 30, "stop": stops, "details": True},
            }
            kept = (await client.post("/generate", json=tgi)).json()
            streamed = events(await client.post("/generate_stream", json=tgi))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
        assert whole["text"] == cut(
            served.generation.codec.decode(whole["token_ids"], skip_special_tokens=True),
            stops,
            keep=False,
        )
        ids = [token["id"] for token in kept["details"]["tokens"] if not token["special"]]
        assert kept["generated_text"] == cut(served.generation.codec.decode(ids), stops, keep=True)
        assert streamed[-1]["generated_text"] == kept["generated_text"]
        assert (
            "".join(event["token"]["text"] for event in streamed if not event["token"]["special"])
            == kept["generated_text"]
        )

    asyncio.run(ask())


@pytest.fixture(scope="module")
def codec_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


class Calling:
    """A parser of replies that takes every `b` for a call."""

    def push(self, token: int | None, text: str, special: bool, is_last: bool) -> Parsed:
        return Parsed(calls=(CallDelta(0, "f", "{"),)) if text == "b" else Parsed(text)


def test_text_that_may_begin_a_stop_string_comes_before_a_call(codec: TextCodec) -> None:
    parser: Any = Calling
    request = Request(
        [1], protocol.Sampling(), stop_strings=("<<x",), keep_stop=False, parser=parser
    )
    made = pieces(codec, byte_ids(codec, b"a<<ba"), request)
    assert [(piece.text, len(piece.calls)) for piece in made][:4] == [
        ("a", 0),
        ("", 0),
        ("", 0),
        ("<<", 1),
    ]
