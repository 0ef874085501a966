"""The text of a rendered chat, sent back as a raw prompt, makes the tokens that the conversation
makes: its BOS is not doubled.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import processors

from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import READY, FakeEngine, serve

BOS = 257
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
]
TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}"


@pytest.fixture(params=["<s> $A", "<s> $A <e>", "<s> <e> $A", "$A"])
async def door(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[FakeEngine, httpx.AsyncClient]]:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<s>", "<e>"])
    assert tokenizer.token_to_id("<s>") == BOS
    marks = [("<s>", BOS), ("<e>", BOS + 1)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=request.param, special_tokens=marks
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    engine = FakeEngine(msgspec.structs.replace(READY, vocab_size=261))
    served = serve(tmp_path, engine)
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as http:
        yield engine, http


def trimmed(ids: list[int]) -> list[int]:
    """Without what a post-processor puts after a text."""
    return ids[:-1] if ids[-1] == BOS + 1 else ids


async def test_it_has_one_bos_on_every_route(door: tuple[FakeEngine, httpx.AsyncClient]) -> None:
    engine, http = door

    async def post(path: str, body: dict[str, Any]) -> Any:
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    text = (await post("/apply-template", {"messages": MESSAGES}))["prompt"]
    assert text == "<s>[hi][yes][so]"
    await post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
    await post("/completion", {"prompt": text, "n_predict": 2})
    await post("/completion", {"prompt": [text, text], "n_predict": 2})
    echoed = await post(
        "/v1/completions", {"prompt": text, "max_tokens": 2, "echo": True, "logprobs": 0}
    )
    for path in ("/generate", "/"):
        await post(path, {"inputs": text, "parameters": {"max_new_tokens": 2}})
    conversation = engine.submits[0].prompt
    assert conversation.count(BOS) == 1
    assert [trimmed(submit.prompt) for submit in engine.submits] == [conversation] * 7
    choice = echoed["choices"][0]
    assert choice["text"].startswith(text)
    # Else the last of the prompt's tokens is not in its text.
    if engine.submits[1].prompt == conversation:
        assert choice["logprobs"]["text_offset"][:3] == [0, 3, 4]
    assert (
        trimmed((await post("/v1/completions/render", {"prompt": text}))[0]["token_ids"])
        == conversation
    )
    assert trimmed((await post("/tokenize", {"prompt": text}))["tokens"]) == conversation
    assert (
        trimmed((await post("/tokenize", {"content": text, "add_special": True}))["tokens"])
        == conversation
    )
    places = [token for token in await post("/tokenize", {"inputs": text}) if token["stop"]]
    assert [token["id"] for token in places] == conversation
    assert places[0] == {"id": BOS, "text": "<s>", "start": 0, "stop": 3}


async def test_what_the_text_has_stays(door: tuple[FakeEngine, httpx.AsyncClient]) -> None:
    """Two of them that were written are two; one after other text is no beginning; ids are taken as
    they are.
    """
    engine, http = door
    for prompt in ("<s><s>a", "a<s>", [BOS, BOS, 5]):
        assert (
            await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
        ).status_code == 200
    ids = [trimmed(submit.prompt) for submit in engine.submits]
    added = http.post("/tokenize", json={"prompt": "a"})
    begins = (await added).json()["tokens"][0] == BOS
    assert [found.count(BOS) for found in ids] == [2, 1 + begins, 2]
