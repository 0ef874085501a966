"""Ollama's API: by its own client against the embedded model, and what no client of its shows."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest

from server import protocol
from server.generation.request import Choice, Request
from server.generation.stream import Piece
from server.http.ollama.fields import ChatBody
from server.http.ollama.replies import OllamaReply
from server.text.calls.parser import CallDelta
from tests.server.http.test_routes import client_of, make
from tests.support.fake_engine import Served
from tests.support.processes import ServerProcess

GREEDY = {"temperature": 0, "num_predict": 60}
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


def get_weather(city: str) -> str:
    """Current weather of a city

    Args:
        city: The city
    """
    return city


@pytest.fixture(scope="module")
def client(pretrained_server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(f"http://127.0.0.1:{pretrained_server.port}") as client:
        yield client


# --- its client


def test_the_model_is_listed_and_shown(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "embedded:latest" and len(model.digest or "") == 64
    assert model.details is not None and model.details.parameter_size == "7.63M"
    (loaded,) = client.ps().models
    assert loaded.digest == model.digest and loaded.context_length == 4096
    shown = client.show("embedded")
    assert shown.capabilities == ["completion", "tools", "insert"] and shown.template
    facts = shown.modelinfo or {}
    assert facts["general.architecture"] == "gpt_bigcode"
    assert facts["gpt_bigcode.context_length"] == 4096
    assert [step.status for step in client.pull("embedded", stream=True)][-1] == "success"


def test_scripts_find_the_server_and_browsers_the_playground(
    client: ollama.Client, pretrained_server: ServerProcess
) -> None:
    url = f"http://127.0.0.1:{pretrained_server.port}"
    for accepted in ({"accept": "*/*"}, {"accept": "application/json"}):
        answer = httpx.get(url, headers=accepted)
        assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert httpx.head(url).status_code == 200
    assert "<title>" in httpx.get(url, headers={"accept": "text/html,*/*;q=0.8"}).text


@pytest.mark.parametrize("more", [{}, {"suffix": "\n"}, {"raw": True}], ids=str)
def test_generate(client: ollama.Client, more: dict[str, Any]) -> None:
    given: Any = {
        "model": "embedded:latest",
        "prompt": "def is_even(number):\n    return ",
        "options": GREEDY,
    }
    whole = client.generate(**given, **more)
    *parts, last = client.generate(**given, **more, stream=True)
    assert "".join(part.response for part in parts) == whole.response != ""
    assert not any(part.done for part in parts) and last.done and last.done_reason == "stop"
    assert (last.eval_count, last.context) == (whole.eval_count, whole.context)
    assert whole.prompt_eval_count and (whole.context is None) == ("raw" in more)
    assert 0 < (whole.eval_duration or 0) < (whole.total_duration or 0)


def test_generate_goes_on_from_the_context_of_an_answer(client: ollama.Client) -> None:
    first = client.generate("embedded", "What is the capital of France?", options=GREEDY)
    assert "Paris" in str(first.response)
    context = [*(first.context or ())]
    second = client.generate("embedded", "Hello", context=context, options=GREEDY)
    assert [*(second.context or ())][: len(context)] == context
    assert second.prompt_eval_count == len(context) + 4


def test_a_tool_is_called_and_its_result_told(client: ollama.Client) -> None:
    answer = client.chat("embedded", WEATHER, tools=[get_weather], options=GREEDY)
    (call,) = answer.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    parts = [*client.chat("embedded", WEATHER, tools=[get_weather], stream=True, options=GREEDY)]
    assert [part.message.tool_calls for part in parts if part.message.tool_calls] == [[call]]
    told = {"role": "tool", "tool_name": "get_weather", "content": "7 degrees and rain"}
    messages = [*WEATHER, answer.message, told]
    answer = client.chat("embedded", messages, tools=[get_weather], options=GREEDY)
    assert "7" in str(answer.message.content) and answer.done_reason == "stop"


@pytest.mark.parametrize("form", ["json", {"type": "array", "items": {"enum": [1, 2]}}], ids=str)
def test_a_format_is_followed(client: ollama.Client, form: Any) -> None:
    messages = [{"role": "user", "content": "Write as JSON with the key name: Anna is here."}]
    text = client.chat("embedded", messages, format=form, options=GREEDY).message.content
    assert isinstance(json.loads(text or ""), dict if form == "json" else list)


def test_questions_by_ids(client: ollama.Client) -> None:
    room: Any = {"type": "choice", "instructions": "Which room?", "criteria": {"hall": None}}
    dark: Any = {"type": "noul", "instructions": "It is dark."}
    answers = client.systemone(
        "embedded", "The hall is dark.", {"room": room, "dark": dark}
    ).answers
    assert answers["room"].choice == "hall" and 0 <= answers["dark"].noul <= 1  # type: ignore[union-attr]


def test_log_probabilities(client: ollama.Client) -> None:
    answer = client.chat(
        "embedded", WEATHER[:1], logprobs=True, top_logprobs=2, options=GREEDY | {"num_predict": 3}
    )
    assert answer.done_reason == "length" and len(answer.logprobs or ()) == 3
    for token in answer.logprobs or ():
        assert [top.token for top in token.top_logprobs or ()][:1] == [token.token]


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        (lambda client: client.chat("other", WEATHER), 404, "model 'other' not found"),
        (lambda client: client.embed("embedded", "a"), 400, "does not support embeddings"),
        (lambda client: client.chat("embedded", WEATHER, think=True), 400, "thinking"),
        (lambda client: client.generate("embedded", "a " * 5000), 400, "`prompt` must have less"),
        (lambda client: client.generate("embedded", "a", images=["aaaa"]), 400, "`images`"),
        (lambda client: client.delete("embedded"), 501, "no other"),
        (
            lambda client: client.chat("embedded", WEATHER, tools=[get_weather], format="json"),
            400,
            "`format` cannot be combined with `tools`",
        ),
    ],
)
def test_what_is_not_served_is_said(
    client: ollama.Client, asked: Any, status: int, text: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=text) as caught:
        asked(client)
    assert caught.value.status_code == status


# --- the wire


async def post(served: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    async with client_of(served) as client:
        return await client.post(path, content=json.dumps(body), headers=headers)


async def test_a_stream_is_lines_of_json_and_needs_no_content_type(tmp_path: Path) -> None:
    served = await make(tmp_path)
    body = {"prompt": "a", "options": {"num_predict": 3, "num_ctx": 4096}}
    answer = await post(served, "/api/generate", body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.headers["x-onehead-ignored"] == "options.num_ctx"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    *parts, last = [line["done"] for line in lines]
    assert last and parts and not any(parts)
    assert lines[-1]["done_reason"] == "length" and lines[-1]["eval_count"] == 3
    # A page of another origin can send that without asking first.
    refused = await post(served, "/api/generate", body, origin="http://elsewhere.example")
    assert refused.status_code == 415 and isinstance(refused.json()["error"], str)


async def test_a_stream_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    served = await make(tmp_path, crash_after=[4, 2, 0, 0, 0])
    answer = await post(served, "/api/generate", {"prompt": "a", "options": {"num_predict": 60}})
    *_, last = answer.text.splitlines()
    assert "done" not in json.loads(last) and "crashed the engine" in json.loads(last)["error"]


@pytest.mark.parametrize(("keep", "reason"), [(None, "load"), (0, "unload"), ("5m", "load")])
async def test_an_empty_request_loads_the_model(tmp_path: Path, keep: Any, reason: str) -> None:
    served = await make(tmp_path)
    for path in ("/api/generate", "/api/chat"):
        answer = await post(served, path, {"keep_alive": keep, "stream": False})
        assert (answer.json()["done"], answer.json()["done_reason"]) == (True, reason)
    assert served.engine.submits == []


async def test_defaults_are_those_of_ollama_after_those_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')
    served = await make(tmp_path)
    await post(served, "/api/generate", {"prompt": "a", "options": {"num_predict": 2}})
    sampling = served.engine.submits[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.5)
    await post(served, "/api/generate", {"prompt": "a", "options": {"num_predict": 10**6}})
    assert len(served.engine.submits[-1].prompt) + served.engine.submits[-1].max_new_tokens == 128


@pytest.mark.parametrize("length", [10, 60])
def test_a_call_that_is_cut_is_not_told(client: ollama.Client, length: int) -> None:
    options = GREEDY | {"num_predict": length}
    answer = client.chat("embedded", WEATHER, tools=[get_weather], options=options)
    assert (answer.message.tool_calls is None) == (answer.done_reason == "length") == (length < 20)


def test_calls_are_numbered() -> None:
    choice = Choice(1, 9, 0, Request([1], protocol.Sampling()))
    streams: Any = SimpleNamespace(choices=[choice], reservation=SimpleNamespace(reply_id="a"))
    reply = OllamaReply(ChatBody(), "m", SimpleNamespace(codec=None), streams)  # type: ignore[arg-type]
    told = []
    for index in range(3):
        for delta in (CallDelta(index, "f", ""), CallDelta(index, None, "{}")):
            told += reply.chunks(Piece(0, 5, "", calls=(delta,)))
    told += reply.chunks(Piece(0, 0, "", finish="eos_token"))
    calls = [call for chunk in told for call in chunk["message"].get("tool_calls", ())]
    assert [call["function"]["index"] for call in calls] == [0, 1, 2]
    assert [call["id"] for call in calls] == ["call_a-0", "call_a-1", "call_a-2"]


async def test_without_a_chat_template_a_prompt_is_continued(tmp_path: Path) -> None:
    served = await make(tmp_path, template=None)
    body: dict[str, Any] = {"prompt": "ab", "options": {"num_predict": 2}}
    await post(served, "/api/generate", body)
    raw = served.engine.submits[-1].prompt
    await post(served, "/api/generate", body | {"raw": True})
    assert served.engine.submits[-1].prompt == raw
    refused = await post(served, "/api/generate", body | {"system": "x"})
    assert refused.status_code == 400 and "`system` needs a model" in refused.json()["error"]
    refused = await post(served, "/api/chat", {"messages": WEATHER})
    assert refused.status_code == 400 and "chat template" in refused.json()["error"]
