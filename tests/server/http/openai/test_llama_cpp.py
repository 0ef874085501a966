"""/completion, /infill, /tokenize, /detokenize and /props as llama.cpp's clients use them: what is
served, accepted and refused.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from server.config import ServerSection
from tests.conftest import CHAT_TEMPLATE
from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import READY, FakeEngine, serve
from tests.support.processes import ServerProcess

Door = tuple[FakeEngine, httpx.AsyncClient]
# As llama.cpp's documentation lists them, at their defaults.
DEFAULTS: dict[str, Any] = {
    "temperature": 0.8,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "n_predict": -1,
    "n_indent": 0,
    "n_keep": 0,
    "n_discard": 0,
    "n_cmpl": 1,
    "n_cache_reuse": 0,
    "stream": False,
    "stop": [],
    "typical_p": 1.0,
    "tfs_z": 1.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "penalize_nl": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "top_n_sigma": -1.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "grammar": "",
    "seed": -1,
    "ignore_eos": False,
    "logit_bias": [],
    "n_probs": 0,
    "min_keep": 0,
    "t_max_predict_ms": 0,
    "image_data": [],
    "id_slot": -1,
    "slot_id": -1,
    "cache_prompt": True,
    "return_tokens": False,
    "samplers": [
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    ],
    "timings_per_token": False,
    "return_progress": False,
    "post_sampling_probs": False,
    "response_fields": [],
    "lora": [],
}
# Values at which the answer would be another than is served.
UNSERVED: dict[str, Any] = {
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "dynatemp_range": 0.5,
    "tfs_z": 0.9,
    "top_n_sigma": 1.5,
    "min_keep": 5,
    "image_data": [{"data": "x", "id": 1}],
    "lora": [{"id": 0, "scale": 0.5}],
    "post_sampling_probs": True,
    "samplers": ["mirostat"],
}
ROUTES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "def f"},
    "/infill": {"input_prefix": "ab", "input_suffix": "cd"},
}


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    make_tokenizer(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), 261).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "chat_template.jinja").write_text(
        CHAT_TEMPLATE + "{{ mood }}{{ tools | tojson if tools else '' }}"
    )
    engine = FakeEngine(
        msgspec.structs.replace(READY, vocab_size=261, max_context=512, capacity=512)
    )
    served = serve(tmp_path, engine, ServerSection(max_waiting=0))
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as http:
        yield engine, http


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ROUTES)
async def test_fields_at_their_defaults_change_nothing(door: Door, path: str) -> None:
    """All at once, and each of them alone."""
    engine, http = door
    few = {"n_predict": 4, "seed": 1}
    for given in [{}, DEFAULTS, *({name: value} for name, value in DEFAULTS.items())]:
        await post(http, path, ROUTES[path] | given | few)
    first, *others = engine.submits
    assert all(
        other.sampling == first.sampling and other.prompt == first.prompt for other in others
    )
    assert {other.max_new_tokens for other in others} == {4}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", UNSERVED)
async def test_what_would_change_the_answer_is_refused_by_name(
    door: Door, path: str, name: str
) -> None:
    response = await door[1].post(path, json=ROUTES[path] | {name: UNSERVED[name]})
    assert response.status_code == 400 and f"`{name}" in response.json()["error"]["message"], (
        response.text
    )
    assert door[0].submits == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[5, 3], [6, -2.5]], {5: 3.0, 6: -2.5}),
        ([[5, False]], {5: -100.0}),
        ([["ab", 1]], dict.fromkeys((66, 67), 1.0)),
        ([["ab", False], [5, 1]], {66: -100.0, 67: -100.0, 5: 1.0}),
        ({"5": 3, "6": False}, {5: 3.0, 6: -100.0}),
        ({"ab": 2}, dict.fromkeys((66, 67), 2.0)),
        ([[5, 1e9]], {5: 100.0}),
        ([], {}),
        ({}, {}),
    ],
    ids=str,
)
async def test_logit_bias(door: Door, given: Any, expected: dict[int, float]) -> None:
    engine, http = door
    ids = (await post(http, "/tokenize", {"content": "ab"}))["tokens"]
    expected = {
        ids[token - 66] if token in (66, 67) and len(ids) == 2 else token: bias
        for token, bias in expected.items()
    }
    await post(http, "/completion", {"prompt": "def f", "n_predict": 2, "logit_bias": given})
    assert engine.submits[0].sampling.logit_bias == expected


@pytest.mark.parametrize(
    "given",
    [[5], [[5]], [[5, 1, 2]], [[5, "x"]], [[5, None]], "x", 5, [[[5], 1]], [[5.5, 1]], {"5": []}],
    ids=str,
)
async def test_what_is_no_bias_is_refused(door: Door, given: Any) -> None:
    response = await door[1].post(
        "/completion", json={"prompt": "a", "n_predict": 2, "logit_bias": given}
    )
    assert response.status_code == 400 and "`logit_bias" in response.json()["error"]["message"], (
        response.text
    )


async def test_a_token_beyond_the_vocabulary_is_refused(door: Door) -> None:
    for bias in ([[9999, 1]], {"99999999999999999999999": 1}):
        response = await door[1].post(
            "/completion", json={"prompt": "a", "n_predict": 2, "logit_bias": bias}
        )
        assert (
            response.status_code == 400
            and "not below the vocabulary" in response.json()["error"]["message"]
        )


@pytest.mark.parametrize(
    "names",
    [
        ("n_predict", "max_tokens"),
        ("n_predict", "max_completion_tokens"),
        ("max_tokens", "max_completion_tokens"),
    ],
)
async def test_other_names_of_the_limit(door: Door, names: tuple[str, str]) -> None:
    """Both may be given where they agree; what is refused names those that were sent."""
    engine, http = door
    for body in ({names[0]: 3}, {names[1]: 3}, dict.fromkeys(names, 3)):
        await post(http, "/completion", {"prompt": "a"} | body)
    assert [submit.max_new_tokens for submit in engine.submits] == [3, 3, 3]
    response = await http.post("/completion", json={"prompt": "a", names[0]: 3, names[1]: 4})
    assert (
        response.json()["error"]["message"]
        == f"`{names[0]}` and `{names[1]}` differ; give one of them"
    )
    response = await http.post("/completion", json={"prompt": "a", names[1]: "x"})
    assert response.json()["error"]["message"] == f"`{names[1]}` must be of type integer"


async def test_one_stop_string_needs_no_list(door: Door) -> None:
    _, http = door
    whole = await post(http, "/completion", {"prompt": "a", "n_predict": 12, "seed": 1})
    stop = whole["content"][3]
    cut = await post(http, "/completion", {"prompt": "a", "n_predict": 12, "seed": 1, "stop": stop})
    assert (cut["stop_type"], cut["stopping_word"], cut["content"]) == (
        "word",
        stop,
        whole["content"].partition(stop)[0],
    )


async def test_log_probabilities_in_llama_cpps_form(door: Door) -> None:
    _, http = door
    body = {"prompt": "def f", "n_predict": 3, "seed": 1}
    plain = await post(http, "/completion", body)
    assert plain["tokens"] == [] and "completion_probabilities" not in plain
    whole = await post(http, "/completion", body | {"n_probs": 2, "return_tokens": True})
    found = whole["completion_probabilities"]
    assert [token["id"] for token in found] == whole["tokens"] and len(found) == whole[
        "tokens_predicted"
    ] == 3
    assert "".join(token["token"] for token in found) == whole["content"] == plain["content"]
    for token in found:
        assert set(token) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert bytes(token["bytes"]).decode() == token["token"] and token["logprob"] <= 0
        assert all(set(top) == {"id", "token", "bytes", "logprob"} for top in token["top_logprobs"])
    named = await post(
        http, "/completion", body | {"logprobs": 2, "response_fields": ["completion_probabilities"]}
    )
    assert named == {"completion_probabilities": found}
    text = (
        await http.post(
            "/completion", json=body | {"n_probs": 2, "stream": True, "timings_per_token": True}
        )
    ).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert [row for event in events for row in event["completion_probabilities"]] == found
    assert [id for event in events for id in event["tokens"]] == whole["tokens"]
    assert all(event["timings"]["predicted_n"] == event["tokens_predicted"] for event in events)


async def test_two_constraints_are_refused(door: Door) -> None:
    for path, body in ROUTES.items():
        response = await door[1].post(
            path, json=body | {"grammar": 'root ::= "a"', "json_schema": {}}
        )
        assert response.status_code == 400 and response.json()["error"]["param"] == "grammar"
    response = await door[1].post(
        "/infill", json=ROUTES["/infill"] | {"json_schema": {}, "token_healing": True}
    )
    assert response.status_code == 400 and response.json()["error"]["param"] == "token_healing"


def test_constraints_are_followed(embedded_server: ServerProcess) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for path, body in ROUTES.items():
        status, answer = embedded_server.post(
            path, body | {"json_schema": schema, "n_predict": 40, "seed": 1}
        )
        assert status == 200, answer
        assert isinstance(json.loads(answer["content"])["a"], bool)
        grammar = 'root ::= "yes" | "no"'
        status, answer = embedded_server.post(
            path, body | {"grammar": grammar, "n_predict": 40, "seed": 1}
        )
        assert status == 200 and answer["content"] in ("yes", "no"), answer


def test_indentation_ends_a_completion_too(embedded_server: ServerProcess) -> None:
    body = {
        "prompt": "class Stack:\n    def push(self, x):\n        self",
        "n_predict": 120,
        "temperature": 0,
        "n_indent": 8,
    }
    status, answer = embedded_server.post("/completion", body)
    assert status == 200, answer
    assert all(
        line.startswith(" " * 8) for line in answer["content"].split("\n")[1:] if line.strip()
    )


async def test_pieces_of_tokens(door: Door) -> None:
    _, http = door
    content = "ab\u20ac<fim_prefix>"
    ids = (await post(http, "/tokenize", {"content": content}))["tokens"]
    pieces = (await post(http, "/tokenize", {"content": content, "with_pieces": True}))["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    texts = [piece["piece"] for piece in pieces]
    assert any(isinstance(text, list) for text in texts) and texts[-1] == "<fim_prefix>"
    assert (
        b"".join(
            bytes(text) if isinstance(text, list) else text.encode() for text in texts
        ).decode()
        == content
    )
    response = await http.post("/tokenize", json={"prompt": "a", "with_pieces": True})
    assert response.status_code == 400 and "goes with `content`" in response.text


async def test_detokenize_answers_in_both_forms(door: Door) -> None:
    _, http = door
    ids = (await post(http, "/tokenize", {"content": "def f"}))["tokens"]
    assert await post(http, "/detokenize", {"tokens": ids}) == {
        "content": "def f",
        "prompt": "def f",
    }
    assert await post(http, "/detokenize", {"tokens": []}) == {"content": "", "prompt": ""}


async def test_props(door: Door) -> None:
    props = (await door[1].get("/props")).json()
    assert props["total_slots"] == 64 and props["default_generation_settings"] == {"n_ctx": 512}
    assert props["modalities"] == {"vision": False, "audio": False, "video": False}


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"chat_template_kwargs": {"mood": "calm"}},
        {"chat_template_kwargs": {"mood": "calm", "unread": 1}, "reasoning_effort": "low"},
        {"add_generation_prompt": False},
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "yes"}],
            "continue_final_message": True,
        },
    ],
    ids=str,
)
async def test_a_conversation_is_tokenized_as_it_is_answered(
    door: Door, more: dict[str, Any]
) -> None:
    _, http = door
    body = {"messages": MESSAGES} | more
    tokens = (await post(http, "/tokenize", body))["tokens"]
    rendered = await post(http, "/v1/chat/completions/render", body | {"max_tokens": 3})
    assert tokens == rendered["token_ids"]


async def test_fields_of_a_conversation_go_with_messages_alone(door: Door) -> None:
    for field, value in (
        ("tools", [TOOL]),
        ("chat_template_kwargs", {"mood": "x"}),
        ("continue_final_message", True),
    ):
        response = await door[1].post("/tokenize", json={"prompt": "a", field: value})
        assert response.status_code == 400 and f"`{field}` goes with `messages`" in response.text, (
            response.text
        )
