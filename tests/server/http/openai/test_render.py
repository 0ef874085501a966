"""Render routes: the tokens that they show are those that the engine is given for the same body;
nothing is generated.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from server.config import ServerSection
from tests.conftest import CHAT_TEMPLATE
from tests.support.bad_inputs import KEY_HASHES, KEYS
from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import READY, FakeEngine, Served, serve

Door = tuple[Served, FakeEngine, httpx.AsyncClient]
MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "def f"},
    {"prompt": "def f", "n": 2, "best_of": 3, "max_tokens": 3},
    {"prompt": ["def f", "x"], "echo": True},
    {"prompt": [[5, 6, 7], [8]], "stop": ["R"]},
    {"prompt": "def f", "suffix": "x"},
    {"prompt": "def f", "suffix": "x", "token_healing": False},
    {"prompt": "def f", "token_healing": True},
    {"prompt": "def f", "truncate_prompt_tokens": 2},
    {"prompt": [[5, 6, 7]], "truncate_prompt_tokens": -1, "max_tokens": 510},
    {"prompt": "def f", "add_special_tokens": False},
    {"prompt": "ab", "structured_outputs": {"choice": ["x", "y"]}, "cache_salt": "pepper"},
]
CHATS: list[dict[str, Any]] = [
    {"messages": MESSAGES},
    {
        "messages": [*MESSAGES, {"role": "assistant", "content": "yes"}],
        "continue_final_message": True,
        "max_tokens": 3,
    },
    {"messages": MESSAGES, "truncate_prompt_tokens": 3, "n": 2},
    {"messages": MESSAGES, "add_generation_prompt": False, "stream": False, "temperature": 0},
]


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    make_tokenizer(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), 261).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    engine = FakeEngine(
        msgspec.structs.replace(READY, vocab_size=261, max_context=512, capacity=512)
    )
    served = serve(tmp_path, engine)
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as http:
        yield served, engine, http


@pytest.mark.parametrize("body", COMPLETIONS, ids=str)
async def test_tokens_of_prompts_are_those_that_are_computed(
    door: Door, body: dict[str, Any]
) -> None:
    served, engine, http = door
    rendered = await http.post("/v1/completions/render", json=body)
    assert rendered.status_code == 200, rendered.text
    assert engine.submits == [] and served.client.admission.num_reserved == 0
    generated = await http.post("/v1/completions", json=body)
    assert generated.status_code == 200, generated.text
    given = [
        (submit.prompt, submit.max_new_tokens)
        for submit in engine.submits[:: body.get("best_of") or body.get("n") or 1]
    ]
    assert [
        (each["token_ids"], each["sampling_params"]["max_tokens"]) for each in rendered.json()
    ] == given
    ids = [each["request_id"] for each in rendered.json()]
    assert all(id.startswith("cmpl-") for id in ids) and len({*ids}) == len(ids)
    for each in rendered.json():
        assert (each["model"], each["features"]) == ("tiny", None)


@pytest.mark.parametrize("body", CHATS, ids=str)
async def test_tokens_of_a_conversation_are_those_that_are_computed(
    door: Door, body: dict[str, Any]
) -> None:
    _, engine, http = door
    rendered = (await http.post("/v1/chat/completions/render", json=body)).json()
    assert engine.submits == []
    assert (
        await http.post("/v1/chat/completions", json=body | {"max_tokens": 3})
    ).status_code == 200
    assert rendered["token_ids"] == engine.submits[0].prompt
    assert rendered["request_id"].startswith("chatcmpl-")
    assert rendered["sampling_params"]["max_tokens"] == body.get(
        "max_tokens", 512 - len(rendered["token_ids"])
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "x" * 5000}, 400),
        ({"prompt": [[5] * 512]}, 400),
        ({"prompt": [[5] * 500], "max_tokens": 13}, 400),
        ({"prompt": "a", "promt": 1}, 400),
        ({"prompt": "a", "model": "another"}, 404),
        ({"prompt": ["a"] * 257}, 400),
        ({"prompt": "a", "stop": ["x"] * 17}, 400),
        ({"prompt": []}, 400),
    ],
    ids=str,
)
async def test_what_could_not_be_generated_is_not_rendered(
    door: Door, body: dict[str, Any], status: int
) -> None:
    """With the answer of the generating route."""
    answers = [
        await door[2].post(path, json=body)
        for path in ("/v1/completions/render", "/v1/completions")
    ]
    assert [answer.status_code for answer in answers] == [status] * 2
    assert answers[0].json() == answers[1].json()


async def test_a_key_is_needed_where_there_are_any(tokenizer_folder: Path) -> None:
    served = serve(tokenizer_folder, section=ServerSection.model_validate({"api_keys": KEY_HASHES}))
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as http:
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions/render": {"prompt": "a"},
            "/v1/chat/completions/render": {"messages": MESSAGES},
        }
        for path, body in bodies.items():
            assert (await http.post(path, json=body)).status_code == 401
        key = {"authorization": f"Bearer {KEYS[0]}"}
        assert (
            await http.post(
                "/v1/completions/render", json=bodies["/v1/completions/render"], headers=key
            )
        ).status_code == 200
