"""The real clients against a real server: openai and huggingface_hub. Those that need an
environment of their own are in tests/clients.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, ValidationError
from pydantic import BaseModel

from tests.support.processes import ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "Write a function that adds."}]


class Person(BaseModel):
    """What the model must answer with."""

    name: str
    age: int


@pytest.fixture
def client(embedded_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{embedded_server.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
def hub(embedded_server: ServerProcess) -> InferenceClient:
    return InferenceClient(model=f"http://127.0.0.1:{embedded_server.port}")


def test_openai_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "embedded" and client.models.retrieve("embedded").id == "embedded"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.body["code"] == "model_not_found" and "gpt-4" not in str(caught.value)  # type: ignore[index]


def test_openai_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="embedded", prompt="def count_vowels(text):", max_tokens=12, temperature=0, logprobs=2
    )
    (choice,) = whole.choices
    assert (
        choice.finish_reason == "length" and choice.logprobs is not None and whole.usage is not None
    )
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (10, 12)
    assert "".join(choice.logprobs.tokens or ()) == choice.text
    assert choice.logprobs.text_offset == [
        len("".join((choice.logprobs.tokens or [])[:i])) for i in range(12)
    ]
    for logprob, top in zip(
        choice.logprobs.token_logprobs or (), choice.logprobs.top_logprobs or (), strict=True
    ):
        # Greedy: the drawn token is the likeliest.
        assert logprob == max(top.values()) and len(top) == 2
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model="embedded",
        prompt="def count_vowels(text):",
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options=options,
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == choice.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (
        len(chunks) - 2
    ) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [*range(1, 13), 12]


def test_openai_prompts_of_every_kind(
    client: openai.OpenAI, embedded_server: ServerProcess
) -> None:
    ids = embedded_server.post("/tokenize", {"prompt": "import os"})[1]["tokens"]
    settings: dict[str, Any] = {"model": "embedded", "max_tokens": 5, "temperature": 0}
    (single,) = client.completions.create(prompt="import os", **settings).choices
    (by_ids,) = client.completions.create(prompt=ids, **settings).choices
    several = client.completions.create(prompt=["def f", "import os"], n=2, **settings)
    lists = client.completions.create(prompt=[ids, ids[:1]], **settings)
    assert (
        single.text
        == by_ids.text
        == several.choices[2].text
        == several.choices[3].text
        == lists.choices[0].text
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3] and several.choices[
        0
    ].text != single.text
    echoed = client.completions.create(prompt="import os", echo=True, **settings).choices[0].text
    assert echoed == "import os" + single.text
    stop = single.text[2:4]
    (stopped,) = client.completions.create(prompt="import os", stop=stop, **settings).choices
    assert (
        stopped.text == single.text[: single.text.index(stop)] and stopped.finish_reason == "stop"
    )
    assert stopped.model_extra == {"stop_reason": stop, "prompt_logprobs": None}


def test_openai_fill_in_the_middle(client: openai.OpenAI) -> None:
    filled = client.completions.create(
        model="embedded", prompt="def add(a, b):\n    ", suffix="\n", max_tokens=8, temperature=0
    )
    assert filled.choices[0].text and "<fim" not in filled.choices[0].text


def test_openai_chat(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": "embedded",
        "messages": MESSAGES,
        "temperature": 0.7,
        "seed": 3,
        "max_completion_tokens": 10,
    }
    whole = client.chat.completions.create(logprobs=True, top_logprobs=3, n=2, **settings)
    first, second = whole.choices
    assert first.message.role == "assistant" and first.message.content != second.message.content
    assert first.logprobs is not None and first.logprobs.content is not None
    text = b"".join(bytes(entry.bytes or ()) for entry in first.logprobs.content)
    assert text.decode(errors="replace").startswith(first.message.content or "")
    assert all(len(entry.top_logprobs) == 3 for entry in first.logprobs.content)
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert (
        client.chat.completions.create(**(settings | {"messages": parts})).choices[0].message
        == first.message
    )
    chunks = list(client.chat.completions.create(stream=True, n=2, **settings))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: first.message.content, 1: second.message.content}
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]


def test_openai_parse(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="embedded", messages=MESSAGES, response_format=Person, temperature=0, max_tokens=60
    )
    (choice,) = parsed.choices
    if choice.finish_reason == "stop":
        assert isinstance(choice.message.parsed, Person)
    else:  # A name that does not end: the schema allows it.
        assert (choice.message.content or "").startswith('{"name":"')


def test_openai_decisions(client: openai.OpenAI) -> None:
    decision = client.decisions.create(
        model="embedded",
        input=[
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "def add(a, b):\n    return a + b\n"}],
            }
        ],
        questions=[
            {"type": "predicate", "name": "adds", "instructions": "The function adds."},
            {
                "type": "choice",
                "instructions": "Which language?",
                "choices": [{"value": "Python"}, {"value": False, "description": "C"}],
            },
            {
                "type": "score",
                "instructions": [{"type": "input_text", "text": "How good?"}],
                "levels": [{"label": "bad"}, {"label": "good"}],
            },
        ],
        prompt_cache_key="x",
        safety_identifier="y",
    )
    adds, language, good = decision.answers
    assert (
        adds.type == "predicate"
        and adds.name == "adds"
        and 0 < adds.probability < 1
        and decision.model == "embedded"
    )
    assert language.type == "choice" and [entry.value for entry in language.probabilities] == [
        "Python",
        False,
    ]
    assert language.choice == max(language.probabilities, key=lambda entry: entry.probability).value
    assert (
        good.type == "score"
        and 0 < good.score < 1
        and [(entry.label, entry.value) for entry in good.probabilities]
        == [("bad", 0), ("good", 1)]
    )
    for answer in (language, good):
        assert sum(entry.probability for entry in answer.probabilities) == pytest.approx(1)
        assert (
            0 < answer.confidence <= 1
            and answer.model_extra is not None
            and 0 < answer.model_extra["label_mass"] <= 1
        )
    usage = decision.usage
    assert (
        usage.input_tokens
        == usage.total_tokens
        > 0
        == usage.output_tokens
        == usage.output_tokens_details.reasoning_tokens
    )
    assert (
        usage.input_tokens_details.cached_tokens + usage.input_tokens_details.cache_write_tokens
        == usage.input_tokens
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.decisions.create(
            model="embedded",
            input="x",
            questions=[{"type": "choice", "instructions": "?", "choices": []}],
        )
    assert caught.value.param == "questions.0.choices" and caught.value.type == "BadRequestError"


class SetLight(BaseModel):
    """Turns a light on or off."""

    room: Literal["kitchen", "hall"]
    on: bool


def test_openai_tools(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "embedded",
        "messages": MESSAGES,
        "tools": [openai.pydantic_function_tool(SetLight)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 60,
        "temperature": 0,
    }
    (choice,) = client.chat.completions.parse(**options).choices
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert isinstance(call.function.parsed_arguments, SetLight) and SetLight.model_validate_json(
        call.function.arguments
    )
    with client.chat.completions.stream(**options) as stream:
        whole = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [(part.function.name, part.function.arguments) for part in whole] == [
        (call.function.name, call.function.arguments)
    ]
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "It is on."}
    again = options | {
        "messages": [*MESSAGES, choice.message, result],
        "tool_choice": {"type": "function", "function": {"name": "SetLight"}},
    }
    assert client.chat.completions.create(**again).choices[0].message.tool_calls
    for word in ("auto", "none"):  # This model has no format of calls.
        answer = client.chat.completions.create(**options | {"tool_choice": word})
        assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    named: Any = {"type": "function", "function": {"name": "SetLight"}}
    only = {"mode": "required", "tools": [named]}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": only}
    other: Any = {"type": "function", "function": {"name": "other"}}
    several = options | {"tools": [other, *options["tools"]], "tool_choice": allowed}
    (call,) = client.chat.completions.create(**several).choices[0].message.tool_calls or ()
    assert call.function.name == "SetLight"


def test_openai_errors(client: openai.OpenAI, embedded_server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="embedded", prompt="x" * 30_000, max_tokens=1)
    assert (
        caught.value.code == "context_length_exceeded"
        and caught.value.param == "prompt"
        and "`prompt`" in caught.value.message
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(
            model="embedded", prompt="x", max_tokens=1, extra_body={"temprature": 1}
        )
    assert (
        "did you mean `temperature`" in caught.value.message and caught.value.param == "temprature"
    )
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="../../etc/passwd", prompt="x")
    status, body = embedded_server.post(
        "/v1/chat/completions", {"messages": [{"role": "function", "content": "x"}]}
    )
    assert status == 400 and set(body["error"]) == {"message", "type", "param", "code"}


async def test_openai_async(embedded_server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{embedded_server.port}/v1", api_key="none"
    ) as client:
        whole = await client.completions.create(
            model="embedded", prompt="class A", max_tokens=6, temperature=0
        )
        text = ""
        async for chunk in await client.completions.create(
            model="embedded", prompt="class A", max_tokens=6, temperature=0, stream=True
        ):
            text += chunk.choices[0].text
        assert text == whole.choices[0].text


def test_hugging_face_text_generation(hub: InferenceClient) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 8, "return_full_text": False}
    expected = hub.text_generation("def f", **settings)
    detailed = hub.text_generation(
        "def f", details=True, top_n_tokens=2, decoder_input_details=True, **settings
    )
    assert detailed.generated_text == expected and len(detailed.details.tokens) == 8
    assert [token.text for token in detailed.details.prefill] == [
        "def",
        " f",
    ] and detailed.details.prefill[0].logprob is None
    assert [len(top) for top in detailed.details.top_tokens or ()] == [2] * 8
    events = list(hub.text_generation("def f", stream=True, details=True, **settings))
    assert (
        events[-1].generated_text == expected
        and "".join(event.token.text for event in events) == expected
    )
    best = hub.text_generation("def f", details=True, best_of=3, do_sample=True, **settings)
    assert len(best.details.best_of_sequences or ()) == 2
    stopped = hub.text_generation("def f", stop=[expected[3:5]], **settings)
    assert stopped == expected[: expected.index(expected[3:5]) + 2]


def test_tgis_clients_raise_by_the_status_where_there_is_no_such_route(
    embedded_server: ServerProcess,
) -> None:
    for path, status in (("nowhere", 404), ("info", 405)):
        with pytest.raises(HfHubHTTPError) as caught:
            InferenceClient(
                model=f"http://127.0.0.1:{embedded_server.port}/{path}"
            ).text_generation("x")
        assert type(caught.value) is HfHubHTTPError and caught.value.response.status_code == status
        # text-generation's client goes by the status where no type is given.
        assert caught.value.response.json().keys() == {"error"}
    with pytest.raises(ValidationError):
        InferenceClient(model=f"http://127.0.0.1:{embedded_server.port}").text_generation(
            "x", temperature=9
        )


def test_hugging_face_grammar_and_chat(hub: InferenceClient) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    json_grammar: Any = {"type": "json", "value": schema}
    text = hub.text_generation(
        "x = ", grammar=json_grammar, max_new_tokens=30, return_full_text=False
    )
    assert isinstance(json.loads(text)["a"], int)
    digits: Any = {"type": "regex", "value": "[0-9]{3}"}
    regex = hub.text_generation("x = ", grammar=digits, max_new_tokens=8, return_full_text=False)
    assert len(regex) == 3 and regex.isdigit()
    answer = hub.chat_completion(MESSAGES, max_tokens=6)
    assert answer.choices[0].message.role == "assistant" and answer.usage.completion_tokens == 6
    streamed = hub.chat_completion(MESSAGES, max_tokens=6, temperature=0, stream=True)
    whole = hub.chat_completion(MESSAGES, max_tokens=6, temperature=0).choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole
    shape: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    constrained = hub.chat_completion(MESSAGES, max_tokens=30, response_format=shape)
    assert isinstance(json.loads(constrained.choices[0].message.content or "")["a"], int)
