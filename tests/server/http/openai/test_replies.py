"""Token ids, log-probabilities and text offsets in replies of /v1."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import processors

from server import protocol
from server.http.openai import completions
from tests.conftest import CHAT_TEMPLATE
from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import READY, FakeEngine, serve
from tests.support.processes import ServerProcess

BOS = "<|endoftext|>"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes that begins each prompt with a special token, and a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tmp_path


async def ask(folder: Path, path: str, body: dict[str, Any]) -> tuple[Any, list[protocol.Submit]]:
    """The answer, or the chunks of its stream, and what the engine was sent."""
    engine = FakeEngine(ready=msgspec.structs.replace(READY, vocab_size=257))
    served = serve(folder, engine)
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as client:
        response = await client.post(path, json=body)
    if not body.get("stream"):
        return response.json(), engine.submits
    if response.status_code != 200:
        return [response.json()], engine.submits
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
    return [json.loads(line) for line in lines if line not in ("", "[DONE]")], engine.submits


@pytest.mark.parametrize("prompt", ["ab", "aé漢b", f"a{BOS}b", [0, 71, 72], [71, 0, 72]], ids=str)
async def test_offsets_are_places_in_the_text(folder: Path, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 0}
    answer, (submit,) = await ask(folder, "/v1/completions", body)
    choice = answer["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    assert len(logprobs["text_offset"]) == len(submit.prompt) + 4
    ends = [*logprobs["text_offset"][1:], len(text)]
    pieces = [text[begin:end] for begin, end in zip(logprobs["text_offset"], ends, strict=True)]
    assert "".join(pieces) == text
    # In a prompt of ids each is written; to one of text the tokenizer adds the first.
    whole = isinstance(prompt, list)
    assert pieces[0] == (logprobs["tokens"][0] if whole else "") and all(
        piece == token
        for piece, token in zip(pieces[1:], logprobs["tokens"][1:], strict=True)
        if "\ufffd" not in token
    )
    chunks, _ = await ask(folder, "/v1/completions", body | {"stream": True})
    assert [
        offset for chunk in chunks for offset in chunk["choices"][0]["logprobs"]["text_offset"]
    ] == logprobs["text_offset"]


@pytest.mark.parametrize("echo", [True, False])
def test_offsets_are_places_in_the_text_that_token_healing_has_rewritten(
    embedded_server: ServerProcess, echo: bool
) -> None:
    body = {
        "prompt": "def quicks",
        "token_healing": True,
        "max_tokens": 8,
        "temperature": 0,
        "echo": echo,
        "logprobs": 1,
    }
    _, answer = embedded_server.post("/v1/completions", body)
    text, offsets = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] < len(text)
    names = answer["choices"][0]["logprobs"]["tokens"]
    # Before the last tokens the text of each stands at its place; without the prompt the first ones
    # repeat what is not shown.
    places = [
        (text[begin:end], name)
        for begin, end, name in zip(offsets, offsets[1:], names, strict=False)
    ]
    assert (
        all(piece == name for piece, name in places if piece or echo)
        and sum(map(bool, offsets)) >= 4
    )


async def test_prompt_token_ids_stand_where_vllm_has_them(folder: Path) -> None:
    answer, (submit,) = await ask(folder, "/v1/chat/completions", CHAT | {"return_token_ids": True})
    assert answer["prompt_token_ids"] == submit.prompt
    assert (
        len(answer["choices"][0]["token_ids"]) == 4
        and "prompt_token_ids" not in answer["choices"][0]
    )
    chunks, _ = await ask(
        folder, "/v1/chat/completions", CHAT | {"return_token_ids": True, "stream": True}
    )
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [submit.prompt] + [None] * (
        len(chunks) - 1
    )
    assert [id for chunk in chunks[1:] for id in chunk["choices"][0]["token_ids"]] == answer[
        "choices"
    ][0]["token_ids"]
    assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in chunks)
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    answer, (submit,) = await ask(folder, "/v1/completions", body)
    assert (
        answer["choices"][0]["prompt_token_ids"] == submit.prompt
        and "prompt_token_ids" not in answer
    )


async def test_prompt_logprobs_are_null_where_they_are_not_asked_for(folder: Path) -> None:
    answer, _ = await ask(folder, "/v1/chat/completions", CHAT)
    assert answer["prompt_logprobs"] is None and "prompt_token_ids" not in answer
    answer, _ = await ask(folder, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert answer["choices"][0]["prompt_logprobs"] is None


async def test_tokens_are_named_by_their_ids(folder: Path) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 1,
        "return_token_ids": True,
    }
    texts, _ = await ask(folder, "/v1/completions", body)
    named, _ = await ask(folder, "/v1/completions", body | {"return_tokens_as_token_ids": True})
    before, after = texts["choices"][0], named["choices"][0]
    names = [f"token_id:{id}" for id in before["token_ids"]]
    assert after["logprobs"]["tokens"] == names and [
        [*top] for top in after["logprobs"]["top_logprobs"]
    ] == [[name] for name in names]
    assert (after["text"], after["logprobs"]["text_offset"]) == (
        before["text"],
        before["logprobs"]["text_offset"],
    )
    chat, _ = await ask(
        folder,
        "/v1/chat/completions",
        CHAT | {"logprobs": True, "return_tokens_as_token_ids": True, "return_token_ids": True},
    )
    choice = chat["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{id}" for id in choice["token_ids"]
    ]
    assert (
        b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode(
            errors="replace"
        )
        == choice["message"]["content"]
    )


@pytest.mark.parametrize(("kept", "expected"), [(None, 9), (1, 1), (3, 3), (9, 9), (100, 9)])
async def test_the_end_of_a_prompt_is_kept(folder: Path, kept: int | None, expected: int) -> None:
    prompt = "abcdefgh"
    whole = [0, *(make_tokenizer().encode(prompt).ids)]
    for given in (prompt, whole):
        body = {
            "prompt": given,
            "max_tokens": 4,
            "temperature": 0,
            "echo": True,
            "truncate_prompt_tokens": kept,
        }
        answer, (submit,) = await ask(folder, "/v1/completions", body)
        assert submit.prompt == whole[-expected:] and answer["usage"]["prompt_tokens"] == expected
        beginning = (
            prompt[-expected:] if expected < 9 else prompt if given is prompt else BOS + prompt
        )
        assert answer["choices"][0]["text"].startswith(beginning)
    _, (all_of,) = await ask(folder, "/v1/chat/completions", CHAT)
    _, (submit,) = await ask(
        folder, "/v1/chat/completions", CHAT | {"truncate_prompt_tokens": kept}
    )
    assert submit.prompt == (all_of.prompt if kept is None else all_of.prompt[-kept:])


@pytest.mark.parametrize(
    ("limit", "expected"), [({"max_tokens": 10}, READY.capacity - 10), ({}, READY.capacity - 1)]
)
async def test_minus_one_keeps_what_fits_beside_the_output(
    folder: Path, limit: dict[str, int], expected: int
) -> None:
    messages = [{"role": "user", "content": "x" * 1000}]
    _, (submit,) = await ask(
        folder, "/v1/chat/completions", {"messages": messages, "truncate_prompt_tokens": -1} | limit
    )
    assert len(submit.prompt) == expected and submit.max_new_tokens == limit.get("max_tokens", 1)
    default = 16
    _, (submit,) = await ask(
        folder, "/v1/completions", {"prompt": "x" * 1000, "truncate_prompt_tokens": -1} | limit
    )
    assert len(submit.prompt) == READY.capacity - limit.get("max_tokens", default)


async def test_what_does_not_go_together_is_refused_by_name(folder: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"truncate_prompt_tokens": 0}, "`truncate_prompt_tokens` must be -1 or >= 1. Given: 0"),
        ({"truncate_prompt_tokens": -2}, "`truncate_prompt_tokens` must be >= -1. Given: -2"),
        (
            {"truncate_prompt_tokens": 3, "suffix": "x"},
            "`truncate_prompt_tokens` cannot be combined with `suffix`",
        ),
        ({"logprob_token_ids": [1]}, "`logprob_token_ids` is allowed only with `logprobs`"),
        (
            {"logprob_token_ids": [1], "logprobs": 1, "structured_outputs": {"regex": "[ab]+"}},
            "`logprob_token_ids` cannot be combined with a constraint on the output",
        ),
        ({"logprob_token_ids": [], "logprobs": 1}, "`logprob_token_ids` cannot be empty"),
        (
            {"logprob_token_ids": [1] * 129, "logprobs": 1},
            "`logprob_token_ids` supports up to 128 items",
        ),
        ({"logprob_token_ids": [257], "logprobs": 1}, "`logprob_token_ids` holds the token id 257"),
        (
            {"return_tokens_as_token_ids": True},
            "`return_tokens_as_token_ids` is allowed only with `logprobs`",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": {}}},
            "`response_format.schema` goes with the type json_object",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}, "value": {}}},
            "`response_format` has more than its type 'json_object' takes",
        ),
    ]
    for extra, words in cases:
        answer, submits = await ask(
            folder, "/v1/completions", {"prompt": "a", "max_tokens": 2} | extra
        )
        assert words in answer["error"]["message"] and not submits


async def test_an_object_may_have_a_schema(folder: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    formats = [
        {"type": "json_object", "schema": schema},
        {"type": "json_object", "value": schema},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    ]
    grammars = [
        (await ask(folder, "/v1/chat/completions", CHAT | {"response_format": form}))[1][0].grammar
        for form in formats
    ]
    assert grammars[0] and grammars[0] == grammars[1] == grammars[2]


async def test_a_stream_refuses_an_event_that_takes_long_to_make(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MAX_EVENT_LOGPROBS", 62)
    body = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 20, "prompt": [71, 72, 73]}
    answer, submits = await ask(folder, "/v1/completions", body)
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"]) == 4 and len(submits) == 1
    (refused,), submits = await ask(folder, "/v1/completions", body | {"stream": True})
    assert (
        refused["error"]["param"] == "logprobs"
        and "63 log-prob" in refused["error"]["message"]
        and submits == []
    )


async def test_only_one_choice_of_a_prompt_scores_it_and_each_shows_the_scores(
    folder: Path,
) -> None:
    body = {
        "prompt": [71, 72, 73],
        "max_tokens": 1,
        "n": 3,
        "temperature": 0,
        "prompt_logprobs": 1,
        "echo": True,
        "logprobs": 1,
    }
    answer, submits = await ask(folder, "/v1/completions", body)
    assert [submit.score_prompt for submit in submits] == [True, False, False]
    for choice in answer["choices"]:
        assert len(choice["prompt_logprobs"]) == 3 and len(choice["logprobs"]["tokens"]) == 4
        assert choice["prompt_logprobs"] == answer["choices"][0]["prompt_logprobs"]
