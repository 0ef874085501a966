"""Unknown fields: refused as typing errors, or as what would change the answer, or ignored and
told, never in silence.
"""

import asyncio
import logging
import random
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from server.config import ServerSection
from server.errors import InvalidRequest
from server.http.body import check
from server.http.decisions.fields import DecisionBody, SystemBody
from server.http.llama_cpp.fields import InfillBody, LlamaCppCompletionBody
from server.http.mistral.fim import FimBody
from server.http.ollama import fields as ollama
from server.http.openai.chat_fields import ChatBody, TemplateBody
from server.http.openai.fields import CompletionBody
from server.http.tgi.fields import GenerateBody
from server.http.token_fields import DetokenizeBody, TokenizeBody
from server.http.unknown_fields import MAX_TOLD, _within, header, level_of, nearest
from tests.support.fake_engine import serve

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 2}
GENERATE: dict[str, Any] = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
PARTS = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
CALL: dict[str, Any] = {
    "id": "1",
    "function": {"name": "f", "arguments": "{}", "parsed": {}},
    "extra": 1,
}
BODIES: dict[type[BaseModel], dict[str, Any]] = {
    ChatBody: CHAT,
    CompletionBody: COMPLETION,
    FimBody: COMPLETION,
    InfillBody: {"input_prefix": "a", "input_suffix": "b"},
    LlamaCppCompletionBody: {"prompt": "a"},
    TemplateBody: {"messages": [USER]},
    DecisionBody: {"input": "x", "questions": [{"type": "predicate", "instructions": "a"}]},
    SystemBody: {"state": "x", "questions": {"q": {"type": "noul"}}},
    GenerateBody: GENERATE,
    TokenizeBody: {"prompt": "a"},
    ollama.GenerateBody: {"prompt": "a"},
    ollama.ChatBody: {"messages": [USER]},
    DetokenizeBody: {"tokens": [1]},
}


@pytest.mark.parametrize("schema", BODIES, ids=lambda schema: schema.__name__)
def test_what_changes_no_answer_is_ignored_and_told(schema: type[BaseModel]) -> None:
    extra = {"usage": {"include": True}, "x-y": 1, "chat_id": "1"}
    body, ignored = check(BODIES[schema] | extra, schema)
    assert ignored == [*extra] and body == check(BODIES[schema], schema)[0]
    assert check(BODIES[schema] | dict.fromkeys(extra), schema)[1] == []
    with pytest.raises(InvalidRequest, match=r"^`usage` is not a known field$"):
        check(BODIES[schema] | extra, schema, strict_fields=True)


TOLD: list[tuple[type[BaseModel], dict[str, Any], list[str]]] = [
    (
        ChatBody,
        {"messages": [USER | {"cache_control": {}, "refusal": "no", "id": "m"}] * 200},
        ["cache_control", "refusal", "id"],
    ),
    (
        ChatBody,
        {"messages": [USER | {"content": PARTS}, USER | {"content": PARTS * 3}]},
        ["content.cache_control"],
    ),
    (
        ChatBody,
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
        ["tool_calls.function.parsed", "tool_calls.extra"],
    ),
    (
        ChatBody,
        {"tools": [TOOL | {"strict": True, "cache_control": {}}]},
        ["tools.strict", "tools.cache_control"],
    ),
    (
        ChatBody,
        {"tools": [{"type": "function", "function": {"name": "f", "return": {}}}]},
        ["tools.function.return"],
    ),
    (ChatBody, {"tools": [TOOL], "tool_choice": TOOL | {"mode": 1}}, ["tool_choice.mode"]),
    (
        ChatBody,
        {
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [TOOL], "x": 1}},
        },
        ["tool_choice.allowed_tools.x"],
    ),
    (ChatBody, {"response_format": {"type": "text", "x": 1}}, ["response_format.x"]),
    (
        ChatBody,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": 1}, "x": 1}}},
        ["response_format.json_schema.x"],
    ),
    (
        ChatBody,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        ["stream_options.include_obfuscation"],
    ),
    (
        ChatBody,
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        ["structured_outputs.whitespace_pattern"],
    ),
    (
        ChatBody,
        {"store": True, "metadata": {"a": 1}, "service_tier": "priority"},
        ["store", "metadata", "service_tier"],
    ),
    (
        ChatBody,
        {"verbosity": "low", "prediction": {"type": "content"}},
        ["verbosity", "prediction"],
    ),
    (
        ChatBody,
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h"},
        ["prompt_cache_key", "prompt_cache_retention"],
    ),
    (ChatBody, {"models": ["a"], "top_a": 0, "mode": "chat"}, ["models", "top_a", "mode"]),
    (CompletionBody, {"user": "a", "length_penalty": 2.0}, ["user", "length_penalty"]),
    (
        GenerateBody,
        {"parameters": {"max_new_tokens": 2, "use_cache": True, "x": 1}},
        ["parameters.use_cache", "parameters.x"],
    ),
    (GenerateBody, {"options": {"use_gpu": True}, "x": {"y": [1] * 9}}, ["options.use_gpu", "x"]),
    (
        SystemBody,
        {"questions": {"q.r": {"type": "noul", "x": 1}, "s": {"type": "noul", "x": 1}}},
        ["questions.x"],
    ),
    (DecisionBody, {"input": [USER | {"id": "m"}]}, ["input.id"]),
    (
        CompletionBody,
        {"a, b": 1, "\n\x1b[31m": 1, "\u00e9" * 99: 1},
        ["a%2C%20b", "%0A%1B%5B31m", ("%C3%A9" * 11)[:64]],
    ),
]


@pytest.mark.parametrize(("schema", "extra", "told"), TOLD, ids=lambda x: str(x)[:60])
def test_fields_are_told_by_their_places(
    schema: type[BaseModel], extra: dict[str, Any], told: list[str]
) -> None:
    ignored = check(BODIES[schema] | extra, schema)[1]
    assert [name.removeprefix("messages.") for name in ignored] == told


REFUSED: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (
        CompletionBody,
        {"max_new_tokens": 3},
        "`max_new_tokens` is not a known field; did you mean `max_tokens`?",
    ),
    (
        ChatBody,
        {"max_new_tokens": 3},
        "`max_new_tokens` is not a known field; did you mean `max_tokens`?",
    ),
    (
        GenerateBody,
        {"parameters": {"max_tokens": 3}},
        "`parameters.max_tokens` is not a known field; did you mean `max_new_tokens`?",
    ),
    (
        GenerateBody,
        {"max_tokens": 3},
        "`max_tokens` is not a known field; did you mean `parameters.max_new_tokens`?",
    ),
    (
        GenerateBody,
        {"temperature": 3},
        "`temperature` is not a known field; did you mean `parameters.temperature`?",
    ),
    (
        GenerateBody,
        {"parameters": {"timeout_s": 3}},
        "`parameters.timeout_s` is not a known field; did you mean `timeout_s`?",
    ),
    (GenerateBody, {"parameters": {"min_new_tokens": 3}}, "did you mean `min_tokens`?"),
    (
        GenerateBody,
        {"parameters": {"response_format": {"type": "json"}}},
        "did you mean `grammar`?",
    ),
    (InfillBody, {"max_new_tokens": 3}, "did you mean `max_tokens`?"),
    (
        CompletionBody,
        {"guided_json": {"type": "object"}},
        "`guided_json` is not a known field; did you mean `structured_outputs`?",
    ),
    (ChatBody, {"guided_choice": ["a"]}, "did you mean `structured_outputs`?"),
    (ChatBody, {"enable_thinking": False}, "did you mean `chat_template_kwargs`?"),
    (ChatBody, {"maxTokens": 3}, "`maxTokens` is not a known field; did you mean `max_tokens`?"),
    (ChatBody, {"topP": 0.1}, "did you mean `top_p`?"),
    (ChatBody, {"temprature": 0}, "`temprature` is not a known field; did you mean `temperature`?"),
    (
        ChatBody,
        {"temprature": 0, "temperature": 0},
        "`temprature` is not a known field; did you mean `temperature`?",
    ),
    (ChatBody, {"tol_chioce": "none"}, "did you mean `tool_choice`?"),
    (
        ChatBody,
        {"messages": [USER, USER | {"naem": "x"}]},
        "`messages.1.naem` is not a known field; did you mean `name`?",
    ),
    (
        ChatBody,
        {"messages": [{"role": "user", "contents": "x"}]},
        "`messages.0.contents` is not a known field; did you mean `content`?",
    ),
    (
        ChatBody,
        {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
        "`tools.0.function.paramters` is not",
    ),
    (
        ChatBody,
        {"response_format": {"typ": "text"}},
        "`response_format.typ` is not a known field; did you mean `type`?",
    ),
    (
        ChatBody,
        {"stream": True, "stream_options": {"include_usag": True}},
        "did you mean `include_usage`?",
    ),
    (ChatBody, {"audio": {"voice": "x"}}, "`audio` is not supported: text alone"),
    (ChatBody, {"modalities": ["text", "audio"]}, "`modalities` is not supported: text alone"),
    (
        ChatBody,
        {"functions": [{"name": "f"}]},
        "`functions` is not supported: functions are given as `tools`",
    ),
    (
        ChatBody,
        {"function_call": {"name": "f"}},
        "`function_call` is not supported: functions are given as `tools`",
    ),
    (
        ChatBody,
        {"web_search_options": {"x": 1}},
        "`web_search_options` is not supported: no tools are hosted here",
    ),
    (
        ChatBody,
        {"tools": [{"type": "web_search"}]},
        "`tools.0.type` is supported only as 'function'",
    ),
    (
        ChatBody,
        {"tools": [{"type": "code_interpreter", "container": {}}]},
        "`tools.0.type` is supported only as 'function'",
    ),
    (
        ChatBody,
        {"messages": [USER | {"images": ["aaa"]}]},
        "`messages.0.images` is not supported: text alone",
    ),
    (
        ChatBody,
        {"messages": [{"role": "assistant", "audio": {"id": "x"}}]},
        "`messages.0.audio` is not supported: text alone",
    ),
    (
        ChatBody,
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "`messages.0.content.0.image_url` is not supported: text alone",
    ),
    (
        ChatBody,
        {"messages": [USER, USER | {"prefix": True}]},
        "`messages.1.prefix` is not supported",
    ),
    (ChatBody, {"best_of": 2}, "`best_of` is not supported"),
    (ChatBody, {"echo": True}, "`echo` is not supported"),
    (ChatBody, {"suffix": "x"}, "`suffix` is not supported"),
    (
        ChatBody,
        {"use_beam_search": True},
        "`use_beam_search` is not supported: there is no beam search",
    ),
    (ChatBody, {"logits_processors": ["x"]}, "`logits_processors` is not supported"),
    (
        ChatBody,
        {"xtc_probability": 0.5},
        "`xtc_probability` is not supported: there is no such sampler",
    ),
    (
        ChatBody,
        {"extra_body": {"top_k": 1}},
        "`extra_body` is not supported: give its members in the body itself",
    ),
    (
        ChatBody,
        {"parameters": {"top_k": 1}},
        "`parameters` is not supported: give its members in the body itself",
    ),
    (
        CompletionBody,
        {"tools": [TOOL]},
        "`tools` is not supported: this route has nothing of the kind",
    ),
    (
        GenerateBody,
        {"parameters": {"adapter_id": "x"}},
        "`parameters.adapter_id` is not supported: there are no adapters",
    ),
    (GenerateBody, {"parameters": {"n": 2}}, "`parameters.n` is not supported"),
    (
        TemplateBody,
        {"chat_template": "x"},
        "`chat_template` is not supported: the operator gives the template",
    ),
]


@pytest.mark.parametrize(("schema", "extra", "words"), REFUSED, ids=lambda x: str(x)[:60])
def test_what_would_change_the_answer_is_refused_by_name(
    schema: type[BaseModel], extra: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(BODIES[schema] | extra, schema)
    assert words in caught.value.message
    assert caught.value.message.startswith(f"`{caught.value.param}` is ")


NOTHING = {
    "functions": [],
    "function_call": "auto",
    "modalities": ["text"],
    "use_beam_search": False,
    "lora_request": {},
    "best_of": 1,
}
NOTHING |= {
    "mirostat": 0,
    "tfs_z": 1,
    "top_n_sigma": -1,
    "typ_p": 1.0,
    "repeat_penalty": 1.0,
    "guided_json": "",
    "stop_sequences": [],
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_refused_field_is_told_at_a_value_that_changes_nothing(name: str) -> None:
    assert check(CHAT | {name: NOTHING[name]}, ChatBody)[1] == [name]


# What clients and other servers have, and is spelt as no field here.
OTHERS: list[str] = re.findall(
    r"\w+",
    """audio prediction verbosity service_tier store metadata user prompt_cache_key prompt_cache_retention n_probs
safety_identifier cache_control refusal annotations id reasoning_effort reasoning thinking include_reasoning moderation echo
web_search_options early_stopping documents mm_processor_kwargs vllm_xargs kv_transfer_params regex ebnf lora_path rid extra_key
models provider transforms route top_a plugins usage session_id trace preset debug dynatemp_range dry_base mirostat_tau n_keep
slot_id samplers timings_per_token repeat_last_n penalize_nl tfs_z grammar json_schema reasoning_format num_ctx keep_alive options
think format template system raw context images num_gpu chat_id background_tasks features files params variables mode character
guidance_scale tags user_id timestamp parts createdAt date info status citations signature return returns examples defer_loading
strict version deprecated outputSchema custom effort language prefix app client source origin bias caches index finish_reason
done role_id text_format title additional_kwargs response_metadata usage_metadata tool_plan summary thinking_blocks code""",  # noqa: E501
)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "schema", [ChatBody, CompletionBody, GenerateBody], ids=lambda schema: schema.__name__
)
def test_no_field_of_others_is_taken_for_a_misspelling(schema: type[BaseModel], name: str) -> None:
    levels: list[Any] = [schema]
    for level in levels:
        if name not in level_of(level):
            assert nearest(level, name) is None
        levels += [inner for inner in level_of(level).values() if isinstance(inner, type)]


def test_edits_are_counted_as_a_table_counts_them() -> None:
    def distance(a: str, b: str) -> int:
        table = {(i, j): i + j for i in range(len(a) + 1) for j in range(len(b) + 1)}
        for i in range(1, len(a) + 1):
            for j in range(1, len(b) + 1):
                ways = [
                    table[i - 1, j] + 1,
                    table[i, j - 1] + 1,
                    table[i - 1, j - 1] + (a[i - 1] != b[j - 1]),
                ]
                if i > 1 and j > 1 and a[i - 2 : i] == b[j - 1] + b[j - 2]:
                    ways.append(table[i - 2, j - 2] + 1)
                table[i, j] = min(ways)
        return table[len(a), len(b)]

    rng = random.Random(1)
    for _ in range(3000):
        a, b = ("".join(rng.choices("abc", k=rng.randrange(7))) for _ in range(2))
        for edits in range(3):
            assert _within(a, b, edits) == (distance(a, b) <= edits), (a, b, edits)


def test_many_unknown_fields_are_told_in_a_short_header() -> None:
    many = {f"{i:060}": i for i in range(2000)}
    ignored = check(COMPLETION | many, CompletionBody)[1]
    assert (
        len(ignored) == MAX_TOLD
        and len(header(ignored)) <= 520
        and header(ignored).endswith(", ...")
    )
    assert header(["a", "b.c"]) == "a, b.c" and header(ignored[:1]) == ignored[0]
    short = check(COMPLETION | {f"k{i}": i for i in range(2000)}, CompletionBody)[1]
    assert header(short).startswith("k0, k1, ") and header(short).endswith(", k63, ...")
    with pytest.raises(InvalidRequest, match="`audio`"):  # However many others stand before it.
        check(COMPLETION | many | {"audio": 1}, CompletionBody)


@pytest.mark.parametrize("strict", [False, True])
async def test_the_response_the_metric_and_the_log_tell(
    tokenizer_folder: Path, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    served = serve(tokenizer_folder, section=ServerSection(strict_fields=strict))
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    caplog.set_level(logging.INFO, logger="onehead.api")
    paths = {
        "/v1/completions": COMPLETION,
        "/generate": GENERATE,
        "/tokenize": {"prompt": "a"},
        "/completion": {"prompt": "a", "n_predict": 2},
    }
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as client:
        for path, body in paths.items():
            for stream in [False, True] if path != "/tokenize" else [False]:
                more = {"stream": True} if stream else {}
                reply = await client.post(path, json=body | more | {"verbosity": 1, "usage": {}})
                if strict:
                    assert (
                        reply.status_code in (400, 422)
                        and "`verbosity` is not a known field" in reply.text
                    )
                    continue
                assert (
                    reply.status_code == 200
                    and reply.headers["x-onehead-ignored"] == "verbosity, usage"
                )
                assert (
                    "x-onehead-ignored" not in (await client.post(path, json=body | more)).headers
                )
        for i in range(100):
            await client.post("/tokenize", json={"prompt": "a", f"field{i}": 1})
        text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("onehead_ignored_fields_total{")]
    logged = [message for message in caplog.messages if "unknown and ignored" in message]
    if strict:
        assert lines == logged == []
        return
    assert 'onehead_ignored_fields_total{field="verbosity"} 7.0' in lines
    assert 'onehead_ignored_fields_total{field="other"} 38.0' in lines and len(lines) == 65
    assert (
        len(logged) == 64
        and logged[0] == "the field verbosity is unknown and ignored, in this request and others"
    )
