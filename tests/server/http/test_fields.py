"""Every field of every body has an effect, or is on the list of fields without one; any other field
is refused by name.

Effects are observed in the submissions to the engine, and in the answer without its ids, times and
random seeds.
"""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import BaseModel

from server.http.anthropic.fields import CountBody, MessagesBody
from server.http.decisions.fields import DecisionBody, DecisionQuestion, SystemBody, SystemQuestion
from server.http.llama_cpp.fields import InfillBody, LlamaCppCompletionBody
from server.http.mistral.fim import FimBody
from server.http.ollama import fields as ollama
from server.http.openai.chat_fields import ChatBody, TemplateBody
from server.http.openai.fields import CompletionBody
from server.http.responses.fields import ResponsesBody
from server.http.tgi.fields import GenerateBody, Parameters
from server.http.token_fields import DetokenizeBody, TokenizeBody
from tests.conftest import CHAT_TEMPLATE
from tests.support.checkpoints import make_tokenizer
from tests.support.fake_engine import READY, FakeEngine, Served, serve

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
GREEDY = {"max_tokens": 8, "temperature": 0}
# What both /v1 bodies take: field -> (what the request has besides, what the field is set to).
COMMON: dict[str, tuple[dict[str, Any], Any]] = {
    "temperature": ({}, 0.5),
    "top_p": ({}, 0.5),
    "top_k": ({}, 3),
    "min_p": ({}, 0.1),
    "typical_p": ({}, 0.5),
    "repetition_penalty": ({}, 1.5),
    "frequency_penalty": ({}, 1.5),
    "presence_penalty": ({}, 1.5),
    "logit_bias": ({}, {"5": 3}),
    "allowed_token_ids": ({}, [5]),
    "bad_words": ({}, ["if"]),
    "seed": ({"seed": 1}, 2),
    "stop": ({}, ["R"]),
    "stop_token_ids": ({}, [5]),
    "include_stop_str_in_output": ({"stop": ["R"]}, True),
    "ignore_eos": ({}, True),
    "min_tokens": ({}, 4),
    "skip_special_tokens": ({"ignore_eos": True, "max_tokens": 40}, False),
    "prompt_logprobs": ({}, 1),
    "n": ({}, 2),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "response_format": ({}, {"type": "json_object"}),
    "structured_outputs": ({}, {"choice": ["a", "b"]}),
    "return_token_ids": ({}, True),
    "truncate_prompt_tokens": ({}, 1),
    "priority": ({}, -1),
    "request_id": ({}, "mine"),
}
OF_COMPLETIONS: dict[str, tuple[dict[str, Any], Any]] = COMMON | {
    "prompt": ({}, "def g"),
    "suffix": ({"token_healing": False}, "x"),
    "max_tokens": ({}, 3),
    "echo": ({}, True),
    "logprobs": ({}, 1),
    "logprob_token_ids": ({"logprobs": 1}, [5, 6]),
    "return_tokens_as_token_ids": ({"logprobs": 1}, True),
    "best_of": ({}, 2),
    "add_special_tokens": ({}, False),
    "token_healing": ({}, True),
}
OF_LLAMA_CPP: dict[str, tuple[dict[str, Any], Any]] = {
    "n_predict": ({}, 3),
    "n_cmpl": ({}, 2),
    "temperature": ({}, 0.1),
    "top_k": ({}, 3),
    "top_p": ({}, 0.5),
    "min_p": ({}, 0.2),
    "typical_p": ({}, 0.5),
    "repetition_penalty": ({}, 1.5),
    "presence_penalty": ({}, 1.5),
    "frequency_penalty": ({}, 1.5),
    "logit_bias": ({}, [[5, 3]]),
    "allowed_token_ids": ({}, [5]),
    "min_tokens": ({}, 4),
    "stop_token_ids": ({}, [5]),
    "ignore_eos": ({}, True),
    "json_schema": ({}, SCHEMA),
    "grammar": ({}, 'root ::= "a" | "b"'),
    "n_probs": ({}, 2),
    "return_tokens": ({}, True),
    "timings_per_token": ({"stream": True}, True),
    "seed": ({"temperature": 1}, 2),
    "stream": ({}, True),
    "priority": ({}, 3),
    "samplers": ({"top_k": 5, "temperature": 1, "seed": 1}, ["temperature"]),
    "response_fields": ({}, ["content", "timings/predicted_n"]),
}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
USED = {"name": "f", "input_schema": SCHEMA}
OF_MESSAGES: dict[str, tuple[dict[str, Any], Any]] = {
    "messages": ({}, [{"role": "user", "content": "hoho"}]),
    "system": ({}, "be brief"),
    "tools": ({}, [USED]),
    "tool_choice": ({"tools": [USED]}, {"type": "any"}),
    "thinking": ({}, {"type": "disabled"}),
    "output_config": ({}, {"format": {"type": "json_schema", "schema": SCHEMA}}),
    "output_format": ({}, {"type": "json_schema", "schema": SCHEMA}),
}
OLLAMA = {"num_predict": 8, "temperature": 0, "seed": 1}
OF_OLLAMA: dict[str, tuple[dict[str, Any], Any]] = {
    "stream": ({}, False),
    "format": ({}, "json"),
    "options": ({}, OLLAMA | {"num_predict": 3}),
    "think": ({}, False),
    "logprobs": ({}, True),
    "top_logprobs": ({"logprobs": True}, 2),
}
CASES: dict[type[BaseModel], tuple[str, dict[str, Any], dict[str, tuple[dict[str, Any], Any]]]] = {
    CompletionBody: (
        "/v1/completions",
        {"prompt": "def f", **GREEDY},
        OF_COMPLETIONS,
    ),
    ChatBody: (
        "/v1/chat/completions",
        {"messages": MESSAGES, **GREEDY},
        COMMON
        | {
            "messages": ({}, [{"role": "user", "content": "ho"}]),
            "stop": ({}, ["X"]),
            "include_stop_str_in_output": ({"stop": ["X"]}, True),
            "max_tokens": ({}, 3),
            "max_completion_tokens": ({"max_tokens": None}, 3),
            "logprobs": ({}, True),
            "top_logprobs": ({"logprobs": True}, 2),
            "logprob_token_ids": ({"logprobs": True}, [5, 6]),
            "return_tokens_as_token_ids": ({"logprobs": True}, True),
            "add_generation_prompt": ({}, False),
            "n_predict": ({"max_tokens": None}, 3),
            "samplers": ({"top_k": 5, "temperature": 1, "seed": 1}, ["temperature"]),
            "continue_final_message": (
                {"messages": [*MESSAGES, {"role": "assistant", "content": "yes"}]},
                True,
            ),
            "chat_template_kwargs": ({}, {"mood": "calm"}),
            "reasoning_effort": ({}, "none"),
            "tools": ({"tool_choice": "auto"}, [TOOL]),
            "tool_choice": ({"tools": [TOOL]}, "required"),
            "parallel_tool_calls": ({"tools": [TOOL], "tool_choice": "required"}, False),
        },
    ),
    FimBody: (
        "/v1/fim/completions",
        {"prompt": "def f", **GREEDY},
        OF_COMPLETIONS,
    ),
    InfillBody: (
        "/infill",
        {"input_prefix": "ab", "input_suffix": "cd", "n_predict": 8, "temperature": 0, "seed": 1},
        OF_LLAMA_CPP
        | {
            "input_prefix": ({}, "ax"),
            "input_suffix": ({}, "x"),
            "input_extra": ({}, [{"filename": "x.py", "text": "y"}]),
            "prompt": ({}, "x"),
            "stop": ({}, ["2"]),
            "token_healing": ({}, False),
        },
    ),
    LlamaCppCompletionBody: (
        "/completion",
        {"prompt": "def f", "n_predict": 8, "temperature": 0, "seed": 1},
        OF_LLAMA_CPP | {"prompt": ({}, "def g"), "stop": ({}, ["R"])},
    ),
    TemplateBody: (
        "/apply-template",
        {"messages": MESSAGES},
        {
            "messages": ({}, [{"role": "user", "content": "ho"}]),
            "add_generation_prompt": ({}, False),
            "continue_final_message": (
                {"messages": [*MESSAGES, {"role": "assistant", "content": "yes"}]},
                True,
            ),
            "chat_template_kwargs": ({}, {"mood": "calm"}),
            "reasoning_effort": ({}, "none"),
            "tools": ({}, [TOOL]),
            "tool_choice": ({"tools": [TOOL]}, "none"),
        },
    ),
    ollama.GenerateBody: (
        "/api/generate",
        {"prompt": "def f", "options": OLLAMA},
        OF_OLLAMA
        | {
            "prompt": ({}, "def g"),
            "suffix": ({}, "x"),
            "system": ({}, "be brief"),
            "raw": ({}, True),
            "context": ({}, [5, 6]),
        },
    ),
    ollama.ChatBody: (
        "/api/chat",
        {"messages": MESSAGES, "options": OLLAMA},
        OF_OLLAMA | {"messages": ({}, [{"role": "user", "content": "ho"}]), "tools": ({}, [TOOL])},
    ),
    ollama.Options: (
        "/api/chat",
        OLLAMA,
        {name: case for name, case in COMMON.items() if name in ollama.Options.model_fields}
        | {
            "temperature": ({}, 0.5),
            "num_predict": ({}, 3),
            "stop": ({}, ["X"]),
            "ignore_eos": ({}, True),
        },
    ),
    MessagesBody: (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 8, "temperature": 0},
        OF_MESSAGES
        | {name: COMMON[name] for name in ("temperature", "top_k", "top_p", "stream")}
        | {"max_tokens": ({}, 3), "stop_sequences": ({}, ["X"])},
    ),
    CountBody: (
        "/v1/messages/count_tokens",
        {"messages": MESSAGES},
        {name: OF_MESSAGES[name] for name in ("messages", "system", "tools", "thinking")},
    ),
    ResponsesBody: (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 8, "temperature": 0},
        {name: COMMON[name] for name in ("temperature", "top_p", "stream")}
        | {
            "input": ({}, [{"role": "user", "content": "ho"}]),
            "instructions": ({}, "be brief"),
            "max_output_tokens": ({}, 3),
            "top_logprobs": ({}, 2),
            "tools": ({}, [FUNCTION]),
            "tool_choice": ({"tools": [FUNCTION]}, "required"),
            "parallel_tool_calls": ({}, False),
            "text": ({}, {"format": {"type": "json_object"}}),
            "reasoning": ({}, {"effort": "none"}),
            "include": ({}, ["message.output_text.logprobs"]),
        },
    ),
    DecisionBody: (
        "/v1/decisions",
        {"input": "x", "questions": [{"type": "predicate", "instructions": "a"}]},
        {
            "input": ({}, [{"role": "system", "content": "x"}]),
            "questions": ({}, [{"type": "predicate", "instructions": "a", "name": "b"}]),
            "chat_template_kwargs": ({}, {"mood": "calm"}),
            "reasoning_effort": ({}, "none"),
            "priority": ({}, -1),
        },
    ),
    DecisionQuestion: (
        "/v1/decisions",
        {"type": "choice", "instructions": "a", "choices": [{"value": "a"}, {"value": "b"}]},
        {
            "type": ({"choices": None, "levels": [{"label": "a"}, {"label": "b"}]}, "score"),
            "instructions": ({}, [{"type": "input_text", "text": "b"}]),
            "name": ({}, "b"),
            "choices": ({}, [{"value": "a", "description": "c"}, {"value": True}]),
            "levels": (
                {"type": "score", "choices": None, "levels": [{"label": "a"}, {"label": "b"}]},
                [{"label": "a", "description": "b"}, {"label": "b"}],
            ),
        },
    ),
    SystemBody: (
        "/v1/systemone",
        {"state": "x", "questions": {"q": {"type": "noul"}}},
        {
            "state": ({}, {"x": 1}),
            "questions": ({}, {"p": {"type": "noul"}}),
            "chat_template_kwargs": ({}, {"mood": "calm"}),
            "reasoning_effort": ({}, "none"),
            "priority": ({}, -1),
        },
    ),
    SystemQuestion: (
        "/v1/systemone",
        {"type": "choice", "criteria": {"a": None, "b": "c"}},
        {
            "type": ({"criteria": {}}, "noul"),
            "instructions": ({}, "x"),
            "criteria": ({}, {"a": "d", "b": "c"}),
        },
    ),
    GenerateBody: (
        "/generate",
        {"inputs": "def f", "parameters": {"max_new_tokens": 8}},
        {
            "inputs": ({}, "def g"),
            "parameters": ({}, {"max_new_tokens": 3}),
            "stream": ({}, True),
            "priority": ({}, 2),
        },
    ),
    Parameters: (
        "/generate",
        {"max_new_tokens": 8, "seed": 1, "details": True},
        {
            "do_sample": ({}, True),
            "temperature": ({}, 0.5),
            "top_k": ({}, 3),
            "top_p": ({}, 0.5),
            "min_p": ({}, 0.2),
            "typical_p": ({}, 0.5),
            "repetition_penalty": ({}, 1.5),
            "frequency_penalty": ({}, 1.5),
            "presence_penalty": ({}, 1.5),
            "logit_bias": ({}, {"5": 3}),
            "allowed_token_ids": ({}, [5]),
            "seed": ({"do_sample": True}, 2),
            "max_new_tokens": ({}, 3),
            "min_tokens": ({}, 4),
            "stop": ({}, ["R"]),
            "stop_token_ids": ({}, [5]),
            "ignore_eos": ({}, True),
            "truncate": ({}, 2),
            "return_full_text": ({}, True),
            "details": ({"details": False}, True),
            "decoder_input_details": ({}, True),
            "top_n_tokens": ({}, 2),
            "grammar": ({}, {"type": "json", "value": SCHEMA}),
            "token_healing": ({}, True),
        },
    ),
    TokenizeBody: (
        "/tokenize",
        {"prompt": "ab"},
        {
            "inputs": ({"prompt": None}, "ab"),
            "prompt": ({}, "ac"),
            "messages": ({"prompt": None}, MESSAGES),
            "add_special_tokens": ({}, False),
            "add_generation_prompt": ({"prompt": None, "messages": MESSAGES}, False),
            "return_token_strs": ({}, True),
            "tools": ({"prompt": None, "messages": MESSAGES}, [TOOL]),
            "tool_choice": ({"prompt": None, "messages": MESSAGES, "tools": [TOOL]}, "none"),
            "chat_template_kwargs": ({"prompt": None, "messages": MESSAGES}, {"mood": "calm"}),
            "reasoning_effort": ({"prompt": None, "messages": MESSAGES}, "none"),
            "continue_final_message": (
                {"prompt": None, "messages": [*MESSAGES, {"role": "assistant", "content": "yes"}]},
                True,
            ),
            "content": ({"prompt": None}, "ab"),
            "add_special": ({"prompt": None, "content": "ab"}, True),
            "with_pieces": ({"prompt": None, "content": "ab"}, True),
        },
    ),
    DetokenizeBody: ("/detokenize", {"tokens": [5, 6]}, {"tokens": ({}, [7])}),
}
# What is accepted and changes no answer, at these values alone.
OF_OPENAI: dict[str, Any] = {"model": "tiny"}
HARMLESS: dict[type[BaseModel], dict[str, Any]] = {
    CompletionBody: OF_OPENAI,
    FimBody: OF_OPENAI,
    TemplateBody: {"model": "tiny"},
    ChatBody: OF_OPENAI,
    DecisionBody: {"model": "tiny", "stream": False, "resumable": False},
    DecisionQuestion: {},
    SystemBody: {"model": "tiny", "stream": False, "resumable": False},
    SystemQuestion: {},
    InfillBody: {"model": "tiny", "post_sampling_probs": False},
    LlamaCppCompletionBody: {"model": "tiny", "post_sampling_probs": False},
    GenerateBody: {
        "model": "http://127.0.0.1:8000",
        "options": {"use_cache": False, "wait_for_model": True},
        "use_cache": True,
    },
    Parameters: {"watermark": False},
    TokenizeBody: {"model": "tiny"},
    DetokenizeBody: {"model": "tiny"},
    MessagesBody: {"model": "tiny", "metadata": {"user_id": "a"}, "service_tier": "auto"}
    | {"container": "", "mcp_servers": []},
    CountBody: {"model": "tiny"},
    ResponsesBody: {"model": "tiny", "store": True, "truncation": "disabled", "background": False}
    | {"previous_response_id": "", "conversation": "", "prompt": {}, "max_tool_calls": 0}
    | {"context_management": []},
    ollama.GenerateBody: {"model": "", "keep_alive": "5m", "images": [], "template": ""}
    | {"truncate": False, "shift": False},
    ollama.ChatBody: {"model": "", "keep_alive": 0, "truncate": False, "shift": False},
    ollama.Options: {"mirostat": 0, "tfs_z": 1},
}
# In tests/server/http/openai/test_routes.py: what needs a clock, and what goes with one other field
# alone.
ELSEWHERE = {
    # `reasoning_effort`: tests/server/http/openai/test_chat_input.py.
    TokenizeBody: {"parameters", "parse_special", "reasoning_effort"},
    Parameters: {"best_of"},  # It takes no seed, so nothing can be compared: tests/test_clients.py.
    # `resumable`: tests/server/http/test_streams.py; `cache_salt`:
    # tests/server/engine/test_prefix_reuse.py.
    CompletionBody: {"timeout_s", "resumable", "cache_salt"},
    FimBody: {"timeout_s", "resumable", "cache_salt"},
    ChatBody: {"timeout_s", "resumable", "cache_salt", "cache_prompt"},
    GenerateBody: {"timeout_s", "resumable", "cache_salt"},
    MessagesBody: {"resumable"},
    ResponsesBody: {"resumable"},
    CountBody: {
        "tool_choice",
        "output_config",
        "output_format",
    },  # They are the body's of /v1/messages too.
    DecisionBody: {"timeout_s", "cache_salt"},
    SystemBody: {"timeout_s", "cache_salt"},
    InfillBody: {"t_max_predict_ms", "n_indent", "resumable", "cache_prompt"},
    LlamaCppCompletionBody: {"t_max_predict_ms", "n_indent", "resumable", "cache_prompt"},
}


def allowed(*names: str) -> dict[str, Any]:
    """A `tool_choice` of these functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


NOT_HARMLESS = [
    ("/v1/chat/completions", {"tools": [{"type": "function"}]}),
    ("/v1/chat/completions", {"tool_choice": "required"}),
    ("/v1/chat/completions", {"modalities": ["audio"]}),
    ("/v1/chat/completions", {"continue_final_message": True}),
    ("/v1/chat/completions", {"chat_template_kwargs": {"messages": []}}),
    ("/v1/chat/completions", {"tools": [TOOL, TOOL]}),
    (
        "/v1/chat/completions",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": allowed("other")}),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": allowed()}),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": TOOL | allowed("f")}),
    ("/v1/chat/completions", {"tool_choice": allowed("f")}),
    ("/v1/chat/completions", {"tools": [TOOL], "ignore_eos": True}),
    ("/v1/chat/completions", {"tools": [TOOL], "allowed_token_ids": [5]}),
    ("/v1/chat/completions", {"tools": [TOOL], "logprobs": True, "logprob_token_ids": [5]}),
    ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required", "min_tokens": 3}),
    ("/v1/chat/completions", {"functions": [TOOL]}),
    ("/v1/completions", {"use_beam_search": True}),
    ("/infill", {"samplers": ["mirostat"]}),
    ("/infill", {"lora": [{"id": 0, "scale": 0.5}]}),
    ("/completion", {"mirostat": 2}),
    ("/v1/chat/completions", {"lora": [{"id": 0, "scale": 0.5}]}),
    ("/v1/chat/completions", {"samplers": ["mirostat"]}),
    ("/apply-template", {"tools": [{"type": "function"}]}),
    ("/tokenize", {"prompt": None, "content": "ab", "parse_special": False}),
]
# (path, what the request has besides, what is the same as not being said): values of fields that
# change something at others.
SAME_AS_ABSENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", {}, {"top_logprobs": 0}),
    (
        "/v1/chat/completions",
        {},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
    ),
    ("/v1/chat/completions", {}, {"tools": [TOOL], "tool_choice": "none"}),
    (
        "/v1/chat/completions",
        {},
        {"continue_final_message": False, "chat_template_kwargs": {"thinking": True}},
    ),
    (
        "/v1/chat/completions",
        {"stream": True, "stream_options": {}},
        {"stream_options": {"include_usage": False, "continuous_usage_stats": True}},
    ),
    ("/v1/chat/completions", {}, {"max_tokens": 8.0, "n": 1.0, "top_k": -1.0}),
    ("/v1/completions", {"temperature": 1, "seed": 3}, {"seed": 3.0, "max_tokens": 8.0}),
    ("/infill", {}, {"n_predict": 8.0, "lora": []}),
    ("/v1/chat/completions", {}, {"n_predict": 8, "id_slot": -1}),
    ("/v1/chat/completions", {}, {"n_predict": -1}),
    ("/v1/chat/completions", {"max_tokens": None}, {"max_tokens": -1}),
    ("/v1/chat/completions", {}, {"max_completion_tokens": -1}),
    ("/v1/fim/completions", {"max_tokens": None}, {"max_tokens": -1.0}),
    ("/v1/completions", {"logprobs": None}, {"logprobs": False}),
    (
        "/v1/completions",
        {},
        {
            "store": True,
            "metadata": {"a": 1},
            "service_tier": "priority",
            "user": 5,
            "verbosity": "low",
        },
    ),
    (
        "/v1/chat/completions",
        {},
        {"prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h"},
    ),
    ("/infill", {"n_predict": None, "max_tokens": 8}, {"max_tokens": 8.0}),
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test tokenizer with marks for the middle and for calls, a post-processor that adds a BOS,
    and a chat template.
    """
    from tokenizers import processors

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), 261)
    tokenizer.add_special_tokens(["<start_function_call>", "<end_function_call>", "<escape>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        CHAT_TEMPLATE
        + "{{ mood }}{% if enable_thinking is false %}!{% endif %}{{ tools | length if tools else "
        "'' }}"
    )
    return folder


async def observe(folder: Path, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status, and everything that a client or the engine can see of a request, without what differs
    each time.
    """
    engine = FakeEngine(
        ready=msgspec.structs.replace(READY, vocab_size=264, capacity=512), end_rate=0.1
    )
    served: Served = serve(folder, engine)
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(served.app), base_url="http://test"
    ) as client:
        response = await client.post(path, json=body)
    if re.search('"id":"(cmpl|chatcmpl)-mine"', response.text):
        return response.status_code, ("the id that was asked for", [])
    text = re.sub(
        r'"(id|seed|created_at|\w*duration|call_id|item_id|prompt_(?:per_)?(?:token_)?(?:ms|second)|created|predicted_\w+)":("[^"]*"|[0-9.e+-]+)',
        "",
        response.text,
    )
    seeded = (
        body.get("seed", body.get("parameters", body.get("options", {})).get("seed")) is not None
    )
    submits = []
    for submit in engine.submits:
        sampling = submit.sampling if seeded else replace(submit.sampling, seed=0)
        # The fake engine goes on with a submission's own output.
        submits.append(
            msgspec.structs.asdict(
                msgspec.structs.replace(submit, sampling=sampling, output=[], request="")
            )
        )
    return response.status_code, (text, submits)


def bodies() -> list[type[BaseModel]]:
    return list(CASES)


@pytest.mark.parametrize("schema", bodies(), ids=lambda schema: schema.__name__)
def test_no_field_is_forgotten(schema: type[BaseModel]) -> None:
    known = set(CASES[schema][2]) | set(HARMLESS[schema]) | ELSEWHERE.get(schema, set())
    assert known == set(schema.model_fields)
    assert not set(CASES[schema][2]) & set(HARMLESS[schema])


def in_place(schema: type[BaseModel], body: dict[str, Any]) -> dict[str, Any]:
    whole: dict[type[BaseModel], dict[str, Any]] = {
        Parameters: {"inputs": "def f", "parameters": body},
        DecisionQuestion: {"input": "x", "questions": [body]},
        SystemQuestion: {"state": "x", "questions": {"q": body}},
        ollama.Options: {"messages": MESSAGES, "options": body},
    }
    return whole.get(schema, body)


@pytest.mark.parametrize(
    ("schema", "field"),
    [(schema, field) for schema in bodies() for field in CASES[schema][2]],
    ids=lambda x: getattr(x, "__name__", x),
)
async def test_the_field_changes_something(
    tokenizer_folder: Path, schema: type[BaseModel], field: str
) -> None:
    path, base, fields = CASES[schema]
    besides, value = fields[field]
    before = await observe(tokenizer_folder, path, in_place(schema, base | besides))
    again = await observe(tokenizer_folder, path, in_place(schema, base | besides))
    after = await observe(tokenizer_folder, path, in_place(schema, base | besides | {field: value}))
    assert before == again, "the comparison would show anything"
    assert after[0] == 200, after
    assert after != before


@pytest.mark.parametrize(
    ("schema", "field"),
    [(schema, field) for schema in bodies() for field in HARMLESS[schema]],
    ids=lambda x: getattr(x, "__name__", x),
)
async def test_the_harmless_field_changes_nothing(
    tokenizer_folder: Path, schema: type[BaseModel], field: str
) -> None:
    path, base, _ = CASES[schema]
    before = await observe(tokenizer_folder, path, in_place(schema, base))
    after = await observe(
        tokenizer_folder, path, in_place(schema, base | {field: HARMLESS[schema][field]})
    )
    assert before == after and after[0] == 200


@pytest.mark.parametrize(("path", "extra"), NOT_HARMLESS, ids=str)
async def test_it_is_harmless_at_no_other_value(
    tokenizer_folder: Path, path: str, extra: dict[str, Any]
) -> None:
    base = next(base for other, base, _ in CASES.values() if other == path)
    status, (text, submits) = await observe(tokenizer_folder, path, base | extra)
    assert status == 400 and [*extra][-1] in text and submits == []


@pytest.mark.parametrize("schema", bodies(), ids=lambda schema: schema.__name__)
async def test_an_unknown_field_that_is_null_changes_nothing(
    tokenizer_folder: Path, schema: type[BaseModel]
) -> None:
    path, base, _ = CASES[schema]
    nulls: dict[str, Any] = {"streem": None, "reasoning_effort": None} | dict.fromkeys(
        CASES[schema][2].keys() - base.keys()
    )
    before = await observe(tokenizer_folder, path, in_place(schema, base))
    assert (
        before == await observe(tokenizer_folder, path, in_place(schema, base | nulls))
        and before[0] == 200
    )


@pytest.mark.parametrize(("path", "besides", "extra"), SAME_AS_ABSENT, ids=str)
async def test_the_value_is_the_same_as_none(
    tokenizer_folder: Path, path: str, besides: dict[str, Any], extra: dict[str, Any]
) -> None:
    base = next(base for other, base, _ in CASES.values() if other == path) | besides
    before = await observe(tokenizer_folder, path, base)
    assert before == await observe(tokenizer_folder, path, base | extra) and before[0] == 200


async def test_a_number_of_tokens_may_be_without_limit(tokenizer_folder: Path) -> None:
    before = await observe(
        tokenizer_folder, "/v1/completions", {"prompt": "def f", "temperature": 0}
    )
    after = await observe(
        tokenizer_folder, "/v1/completions", {"prompt": "def f", "temperature": 0, "max_tokens": -1}
    )
    assert before[1][1][0]["max_new_tokens"] == 16 and after[1][1][0]["max_new_tokens"] > 400


async def test_logprobs_may_be_true(tokenizer_folder: Path) -> None:
    base = {"prompt": "def f", **GREEDY}
    after = [
        await observe(tokenizer_folder, "/v1/completions", base | {"logprobs": value})
        for value in (True, 1)
    ]
    assert after[0] == after[1] and after[0][0] == 200


SEEDED = [CompletionBody, ChatBody, FimBody, InfillBody, LlamaCppCompletionBody, Parameters]
SEEDED += [ollama.Options]


@pytest.mark.parametrize("schema", SEEDED, ids=lambda schema: schema.__name__)
async def test_a_seed_of_minus_one_is_drawn_for_each_request(
    tokenizer_folder: Path, schema: type[BaseModel]
) -> None:
    path, base, _ = CASES[schema]
    seeds = []
    for _ in range(2):
        status, (_, (submit,)) = await observe(
            tokenizer_folder, path, in_place(schema, base | {"seed": -1})
        )
        assert status == 200
        seeds.append(submit["sampling"].seed)
    assert seeds[0] != seeds[1] and min(seeds) >= 0


@pytest.mark.parametrize("schema", bodies(), ids=lambda schema: schema.__name__)
async def test_a_misspelt_field_is_refused_by_name(
    tokenizer_folder: Path, schema: type[BaseModel]
) -> None:
    path, base, _ = CASES[schema]
    name = next(iter(base))
    misspelt = f"{name[:-2]}{name[-1]}{name[-2]}"
    status, (text, submits) = await observe(
        tokenizer_folder, path, in_place(schema, {misspelt: 1} | base)
    )
    assert status in (400, 422) and submits == []
    assert re.search(rf"{misspelt}` is not a known field; did you mean `{name}`", text), text
