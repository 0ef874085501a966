"""OpenAI's wire format event for event, and the other routes as clients of llama.cpp and TGI read
them; a real server and model.
"""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import TinyCheckpoint
from tests.support.processes import ServerProcess, Stream, wait_until


def raw_lines(server: ServerProcess, path: str, body: dict[str, Any]) -> list[bytes]:
    """Every line of a stream that is not empty."""
    stream = Stream(server.port, path, body)
    response = stream.response()
    assert (response.header("content-type") or "").startswith("text/event-stream")
    assert response.header("x-accel-buffering") == "no" and response.header("x-request-id")
    data = response.body()
    stream.close()
    assert data.endswith(b"\n\n")
    blocks = data.split(b"\n\n")[:-1]
    assert all(b"\n" not in block for block in blocks), "an event has one line"
    return blocks


def test_completion_events(embedded_server: ServerProcess) -> None:
    body = {
        "prompt": "def add(a, b):",
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    *events, done = raw_lines(embedded_server, "/v1/completions", body)
    assert done == b"data: [DONE]"
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]} and chunks[0]["id"].startswith(
        "cmpl-"
    )
    for chunk in chunks:
        assert (
            list(chunk)[:4] == ["id", "object", "created", "model"]
            and chunk["object"] == "text_completion"
        )
    for chunk in chunks[:-1]:
        assert (
            list(chunk["choices"][0])
            == ["index", "text", "logprobs", "finish_reason", "stop_reason"]
            and "usage" not in chunk
        )
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == usage
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-2:] == [None, "length"]


def test_chat_events(embedded_server: ServerProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
    }
    *events, done = raw_lines(embedded_server, "/v1/chat/completions", body)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert done == b"data: [DONE]" and all(
        chunk["object"] == "chat.completion.chunk" for chunk in chunks
    )
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in chunks[1:])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_tgi_events_have_top_tokens_where_they_are_asked_for_and_no_done(
    embedded_server: ServerProcess,
) -> None:
    parameters = {"max_new_tokens": 3, "details": True, "top_n_tokens": 2}
    lines = raw_lines(
        embedded_server, "/generate_stream", {"inputs": "def f", "parameters": parameters}
    )
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert [list(event) for event in events] == [
        ["index", "token", "top_tokens", "generated_text", "details"]
    ] * 3
    assert all(
        list(top) == ["id", "text", "logprob", "special"]
        for event in events
        for top in event["top_tokens"]
    )


def test_an_end_token_is_the_last_event_and_no_text(embedded_server: ServerProcess) -> None:
    parameters = {
        "max_new_tokens": 50,
        "details": True,
        "grammar": {"type": "regex", "value": "yes|no"},
    }
    lines = raw_lines(
        embedded_server, "/generate_stream", {"inputs": "x", "parameters": parameters}
    )
    last = json.loads(lines[-1].removeprefix(b"data: "))
    assert last["token"]["special"] is True
    assert last["token"]["text"] in ("<|endoftext|>", "<|end|>")
    assert (
        last["generated_text"] in ("yes", "no") and last["details"]["finish_reason"] == "eos_token"
    )
    assert last["details"]["generated_tokens"] == len(lines) == last["index"]


def test_infill_events(embedded_server: ServerProcess) -> None:
    body = {
        "input_prefix": "def f(",
        "input_suffix": "):\n",
        "n_predict": 4,
        "temperature": 0,
        "stream": True,
    }
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in raw_lines(embedded_server, "/infill", body)
    ]
    assert [event["stop"] for event in events] == [False, False, False, True]
    assert (
        events[-1]["stop_type"] == "limit"
        and events[-1]["tokens_predicted"] == 4
        and events[-1]["timings"]["predicted_n"] == 4
    )
    status, whole = embedded_server.post("/infill", body | {"stream": False})
    assert status == 200 and whole["content"] == "".join(event["content"] for event in events)


def test_a_deadline_ends_with_what_there_is(embedded_server: ServerProcess) -> None:
    long = {"max_tokens": 3000, "temperature": 0, "ignore_eos": True, "timeout_s": 0.6}
    for path, body in (
        ("/v1/completions", {"prompt": "def f", "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        status, answer = embedded_server.post(path, body | long)
        assert status == 200
        for choice in answer["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert choice["finish_reason"] == "timeout" and text
    tgi = {
        "inputs": "def f",
        "timeout_s": 0.6,
        "parameters": {"max_new_tokens": 3000, "ignore_eos": True, "details": True},
    }
    assert embedded_server.post("/generate", tgi)[1]["details"]["finish_reason"] == "timeout"
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in raw_lines(embedded_server, "/generate_stream", tgi)
    ]
    assert events[-1]["details"]["finish_reason"] == "timeout" and events[-1]["generated_text"]
    infill = {"input_prefix": "x", "input_suffix": "y", "n_predict": 3000, "t_max_predict_ms": 100}
    assert embedded_server.post("/infill", infill)[1]["stop_type"] in ("limit", "eos")
    wait_until(lambda: embedded_server.metric("onehead_kv_pages_used") == 0, "every page is free")


def test_tokenize_in_both_dialects(embedded_server: ServerProcess) -> None:
    text = "def é(x):\n"
    status, tokens = embedded_server.post(
        "/tokenize", {"inputs": text, "parameters": {"max_new_tokens": 3}}
    )
    assert status == 200 and list(tokens[0]) == ["id", "text", "start", "stop"]
    assert all(text[token["start"] : token["stop"]] == token["text"] for token in tokens)
    status, counted = embedded_server.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert counted["tokens"] == [token["id"] for token in tokens] and counted["count"] == len(
        tokens
    ) == len(counted["token_strs"])
    assert embedded_server.post("/detokenize", {"tokens": counted["tokens"]}) == (
        200,
        {"content": text, "prompt": text},
    )
    assert embedded_server.post("/tokenize", {"inputs": ""})[1]["error_type"] == "validation"
    assert embedded_server.post("/tokenize", {"prompt": 1})[1]["error"]["type"] == "BadRequestError"
    assert embedded_server.post("/tokenize", {"prompt": "a", "inputs": "a"})[0] == 422
    assert embedded_server.post("/detokenize", {"tokens": [4096]})[0] == 400


def test_a_model_without_a_template_refuses_chat(tiny_checkpoint: TinyCheckpoint) -> None:
    server = ServerProcess(tiny_checkpoint.folder)
    try:
        status, body = server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
        )
        assert (
            status == 400
            and "no chat template" in body["error"]["message"]
            and body["error"]["param"] == "messages"
        )
        status, body = server.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
        assert (
            status == 400
            and "cannot fill in the middle" in body["error"]["message"]
            and body["error"]["param"] == "input_suffix"
        )
        check_scores(server, tiny_checkpoint)
    finally:
        assert server.stop() == 0


def check_scores(server: ServerProcess, checkpoint: TinyCheckpoint) -> None:
    """echo + logprobs and prompt_logprobs against transformers, for prompts shorter and longer than
    a step.
    """
    for length in (1, 2, 70, 500):
        ids = torch.randint(
            1, 257, (length,), generator=torch.Generator().manual_seed(length)
        ).tolist()
        with torch.inference_mode():
            expected_TV = checkpoint.oracle(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 3, "prompt_logprobs": 2}
        status, answer = server.post("/v1/completions", body)
        assert status == 200
        assert {
            key: answer["usage"][key] for key in answer["usage"] if key != "prompt_tokens_details"
        } == {
            "prompt_tokens": length,
            "completion_tokens": 0,
            "total_tokens": length,
        }
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][0] is None and len(logprobs["tokens"]) == length
        for place in range(1, length):
            row_V = expected_TV[place - 1]
            assert abs(logprobs["token_logprobs"][place] - row_V[ids[place]].item()) < 1e-4
            entry = answer["choices"][0]["prompt_logprobs"][place]
            own = entry[str(ids[place])]
            assert abs(own["logprob"] - row_V[ids[place]].item()) < 1e-4
            assert own["rank"] == int((row_V >= row_V[ids[place]]).sum())
            assert max(value["logprob"] for value in entry.values()) == pytest.approx(
                row_V.max().item(), abs=1e-4
            )
        named = {
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        status, answer = server.post("/v1/completions", named | {"logprob_token_ids": [5, 200, 6]})
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        row_V = expected_TV[-1]
        wanted = [int(row_V.argmax()), 5, 200, 6]
        assert list(top) == [f"token_id:{id}" for id in dict.fromkeys(wanted)]
        assert list(top.values()) == [
            pytest.approx(row_V[id].item(), abs=1e-4) for id in dict.fromkeys(wanted)
        ]


def test_lm_evals_request(embedded_server: ServerProcess) -> None:
    """A request of lm-evaluation-harness that scores a continuation, read at the same indices as it
    does.
    """
    ids = embedded_server.post("/tokenize", {"prompt": "import os\nimport sys\n"})[1]["tokens"]
    body = {
        "model": "embedded",
        "prompt": [ids, ids[:3]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = embedded_server.post("/v1/completions", body)[1]
    for choice, prompt in zip(answer["choices"], (ids, ids[:3]), strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
        tops = choice["logprobs"]["top_logprobs"][1:]
        for logprob, top in zip(choice["logprobs"]["token_logprobs"][1:], tops, strict=True):
            assert logprob <= max(top.values()) and math.isfinite(logprob)


def test_bad_bodies_get_openais_error(embedded_server: ServerProcess) -> None:
    cases: list[tuple[str, Any, str, str | None]] = [
        ("/v1/completions", {}, "`prompt` is required", "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "`prompt.1` must be a token id", "prompt.1"),
        (
            "/v1/completions",
            {"prompt": [[1], [2, -1]]},
            "`prompt.1.1` must be a token id",
            "prompt.1.1",
        ),
        ("/v1/completions", {"prompt": [1, True]}, "`prompt.1` must be a token id", "prompt.1"),
        ("/v1/completions", {"prompt": ["a", [1]]}, "`prompt.1` differs in kind", "prompt.1"),
        ("/v1/completions", {"prompt": []}, "`prompt` cannot be empty", "prompt"),
        ("/v1/completions", {"prompt": [4096]}, "not below the vocabulary's 4096", "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 257}, "up to 256 items", "prompt"),
        (
            "/v1/completions",
            {"prompt": ["a"] * 256, "n": 128},
            "more than 1024 sequences",
            "prompt",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 5000},
            "`prompt` tokens + `max_tokens` must be <= 4096",
            "max_tokens",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "suffix": "b", "echo": True},
            "`suffix` needs",
            "suffix",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "structured_outputs": {}},
            "exactly one of json",
            "structured_outputs",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
            "`max_completion_tokens` must be >= 1, or -1 for no limit",
            "max_completion_tokens",
        ),
        ("/v1/chat/completions", {"messages": []}, "`messages` cannot be empty", "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}]},
            "`messages`: only an assistant's",
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": 1}]},
            "`messages.0.content` must be of type string or array",
            None,
        ),
        (
            "/v1/completions",
            {"prompt": "a", "timeout_s": 2e-311},
            "`timeout_s` must be >= 0.001. Given: 2e-311",
            "timeout_s",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": None}]},
            "`messages`: only an assistant's",
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "function", "content": "x"}]},
            "`messages.0.role` is supported only as",
            "messages.0.role",
        ),
        ("/infill", {"input_prefix": "a"}, "`input_suffix` is required", "input_suffix"),
    ]
    for path, body, words, param in cases:
        status, answer = embedded_server.post(path, body)
        error = answer["error"]
        assert status == 400, answer
        assert words in error["message"] and set(error) == {"message", "type", "param", "code"}, (
            answer
        )
        assert param is None or error["param"] == param, answer
    assert embedded_server.get("/v1/nowhere")[0] == 404 and "error" in json.loads(
        embedded_server.get("/v1/nowhere")[1]
    )
    assert embedded_server.get("/v1/completions")[0] == 405
    assert embedded_server.metric("onehead_kv_pages_used") == 0


def test_choices_share_the_pages_of_their_prompt_and_differ_only_in_their_draws(
    embedded_server: ServerProcess, tmp_path: Path
) -> None:
    prompt = "".join(f"def function_{i}(x):\n    return x + {i}\n\n\n" for i in range(20))
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 2.0, "seed": 5}
    many = embedded_server.post("/v1/completions", body | {"n": 6})[1]["choices"]
    (alone,) = embedded_server.post("/v1/completions", body)[1]["choices"]
    again = embedded_server.post("/v1/completions", body | {"n": 6})[1]["choices"]
    assert (
        many == again
        and many[0]["text"] == alone["text"]
        and len({choice["text"] for choice in many}) > 2
    )
    assert embedded_server.metric("onehead_kv_pages_used") == 0


def test_prompts_of_one_request_share_its_fields_and_draw_seeds_of_their_own(
    embedded_server: ServerProcess,
) -> None:
    body = {
        "prompt": ["def f"] * 3,
        "max_tokens": 16,
        "temperature": 1.5,
        "allowed_token_ids": [*range(100, 400)],
        "ignore_eos": True,
    }
    drawn = embedded_server.post("/v1/completions", body | {"return_token_ids": True})[1]["choices"]
    assert all(set(choice["token_ids"]) <= {*range(100, 400)} for choice in drawn)
    assert len({choice["text"] for choice in drawn}) == 3
    seeded = embedded_server.post("/v1/completions", body | {"seed": 5})[1]["choices"]
    assert len({choice["text"] for choice in seeded}) == 1


def test_what_ends_a_text_is_no_part_of_it_unless_it_is_asked_for(
    embedded_server: ServerProcess,
) -> None:
    body = {"prompt": "import os\n", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    whole = embedded_server.post("/v1/completions", body)[1]["choices"][0]
    end = whole["token_ids"][4]
    name = embedded_server.post("/detokenize", {"tokens": [end]})[1]["prompt"]
    before = embedded_server.post(
        "/detokenize", {"tokens": whole["token_ids"][: whole["token_ids"].index(end)]}
    )[1]["prompt"]
    stopped = embedded_server.post("/v1/completions", body | {"stop_token_ids": [end]})[1][
        "choices"
    ][0]
    assert (
        stopped["text"] == before
        and stopped["stop_reason"] == end
        and stopped["finish_reason"] == "stop"
    )
    kept = embedded_server.post(
        "/v1/completions", body | {"stop_token_ids": [end], "include_stop_str_in_output": True}
    )[1]["choices"][0]
    assert kept["text"] == before + name
    parameters = {"max_new_tokens": 12, "stop_token_ids": [end], "details": True}
    tgi = embedded_server.post("/generate", {"inputs": "import os\n", "parameters": parameters})[1]
    assert tgi["generated_text"] == before and tgi["details"]["tokens"][-1]["text"] == name
    assert [token["special"] for token in tgi["details"]["tokens"]][-2:] == [False, True]


def test_what_cannot_be_satisfied_is_the_requests_fault(embedded_server: ServerProcess) -> None:
    cases: list[dict[str, Any]] = [
        {"allowed_token_ids": [0], "min_tokens": 3},
        {"allowed_token_ids": [5], "response_format": {"type": "json_object"}},
        {
            "bad_words": ["a"],
            "allowed_token_ids": embedded_server.post("/tokenize", {"prompt": "a"})[1]["tokens"],
        },
    ]
    for case in cases:
        status, answer = embedded_server.post(
            "/v1/completions", {"prompt": "x", "max_tokens": 8} | case
        )
        assert status == 400 and answer["error"]["type"] == "BadRequestError", answer


def test_tgis_own_example_of_a_grammar_gives_an_object(embedded_server: ServerProcess) -> None:
    value = {
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    parameters = {"max_new_tokens": 40, "grammar": {"type": "json", "value": value}}
    assert json.loads(
        embedded_server.post("/generate", {"inputs": "x", "parameters": parameters})[1][
            "generated_text"
        ]
    ).keys() == {"n"}


def test_response_fields_that_are_missing_are_left_out(embedded_server: ServerProcess) -> None:
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}
    for fields, found in (
        (["content", "timings/prompt_n", "no/such"], {"content", "timings/prompt_n"}),
        ([""], set()),
    ):
        status, answer = embedded_server.post("/infill", body | {"response_fields": fields})
        assert status == 200 and set(answer) == found


def test_a_warm_up_computes_the_prompt_and_the_next_request_finds_it(
    embedded_server: ServerProcess,
) -> None:
    """As llama.vim sends it, with time limits of a millisecond and no tokens to predict."""
    extra = [
        {
            "filename": "other.py",
            "text": "".join(f"def function_{i}(x):\n    return x + {i}\n" for i in range(30)),
        }
    ]
    body = {"input_prefix": "", "input_suffix": "", "input_extra": extra}
    status, warmed = embedded_server.post(
        "/infill", body | {"n_predict": 0, "t_max_prompt_ms": 1, "t_max_predict_ms": 1}
    )
    assert status == 200 and (
        warmed["content"],
        warmed["tokens_predicted"],
        warmed["tokens_cached"],
    ) == ("", 0, 0)
    status, answer = embedded_server.post(
        "/infill", body | {"input_prefix": "def f(x):\n    ", "n_predict": 2}
    )
    assert (
        status == 200
        and answer["tokens_cached"] >= 256
        and answer["generation_settings"]["n_ctx"] == 4096
    )


def test_the_time_of_llama_cpp_is_that_of_the_output_and_leaves_its_first_line(
    embedded_server: ServerProcess,
) -> None:
    body = {"prompt": "def f(", "n_predict": 2000, "t_max_predict_ms": 1, "temperature": 0}
    status, answer = embedded_server.post("/completion", body)
    assert (
        status == 200
        and answer["stop_type"] == "limit"
        and "\n" in answer["content"]
        and answer["tokens_predicted"] < 500
    )
    lines = raw_lines(embedded_server, "/completion", body | {"stream": True})
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert (
        "\n" in "".join(event["content"] for event in events)
        and [event["stop"] for event in events].count(True) == 1
    )


def test_completion_of_llama_cpp(embedded_server: ServerProcess) -> None:
    body = {"prompt": "def add(a, b):", "n_predict": 6, "temperature": 0}
    whole = embedded_server.post("/completion", body)[1]
    text = embedded_server.post(
        "/v1/completions", {"prompt": "def add(a, b):", "max_tokens": 6, "temperature": 0}
    )[1]["choices"][0]["text"]
    assert (whole["content"], whole["tokens_predicted"], whole["stop_type"], whole["index"]) == (
        text,
        6,
        "limit",
        0,
    )
    ids = embedded_server.post("/tokenize", {"content": "def add(a, b):", "add_special": True})[1][
        "tokens"
    ]
    assert embedded_server.post("/completion", body | {"prompt": ids})[1]["content"] == text
    several = embedded_server.post(
        "/completion", body | {"prompt": ["def add(a, b):", "class A"], "n_cmpl": 2}
    )[1]
    assert [answer["index"] for answer in several] == [0, 1, 2, 3] and several[0]["content"] == text
    assert (
        several[0]["content"] == several[1]["content"]
        and several[2]["content"] == several[3]["content"]
    )
    more_than_fit = embedded_server.post(
        "/completion", body | {"n_predict": 10**6, "stop": [text[-4:]]}
    )[1]
    assert text.startswith(more_than_fit["content"]) and more_than_fit["stop_type"] == "word"
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in raw_lines(embedded_server, "/completion", body | {"n": 2, "stream": True})
    ]
    for index in (0, 1):
        own = [event for event in events if event["index"] == index]
        assert "".join(event["content"] for event in own) == text and [
            event["stop"] for event in own
        ] == [False] * 5 + [True]


def test_fill_in_the_middle_of_mistral(embedded_server: ServerProcess) -> None:
    gap = {
        "prompt": "def add(a, b):\n    ret",
        "suffix": "\n\nprint(add(1, 2))\n",
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = embedded_server.post("/v1/completions", gap)[1]
    expected, usage = whole["choices"][0]["text"], whole["usage"]
    for path in ("/v1/fim/completions", "/fim/completions"):
        answer = embedded_server.post(path, gap | {"random_seed": 3})[1]
        assert answer["object"] == "chat.completion" and answer["usage"] == usage
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
        *lines, done = raw_lines(embedded_server, path, gap | {"stream": True})
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        assert done == b"data: [DONE]" and {chunk["object"] for chunk in chunks} == {
            "chat.completion.chunk"
        }
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == expected
    drawn = gap | {"temperature": 1.5, "max_tokens": 16}
    texts = [
        embedded_server.post("/fim/completions", drawn | seed)[1]["choices"][0]["message"][
            "content"
        ]
        for seed in SEEDS
    ]
    assert texts[0] == texts[1] != texts[2]
    status, answer = embedded_server.post("/fim/completions", gap | {"seed": 3, "random_seed": 4})
    assert status == 400 and "`random_seed`" in answer["error"]["message"]
    # To the end, without a gap.
    begun = {"prompt": "def count_vowels(text):", "temperature": 0}
    assert embedded_server.post("/fim/completions", begun)[1]["usage"]["completion_tokens"] > 16


SEEDS = ({"random_seed": 3}, {"seed": 3}, {"random_seed": 4})


def test_a_template_is_applied_as_chat_does(embedded_server: ServerProcess) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    for more in ({}, {"add_generation_prompt": False}):
        prompt = embedded_server.post("/apply-template", {"messages": messages} | more)[1]["prompt"]
        ids = embedded_server.post("/tokenize", {"messages": messages} | more)[1]["tokens"]
        assert embedded_server.post("/tokenize", {"content": prompt})[1] == {"tokens": ids}
    status, answer = embedded_server.post(
        "/apply-template", {"messages": [{"role": "nobody", "content": "x"}]}
    )
    assert status == 400 and "messages.0.role" in answer["error"]["message"]
    props = json.loads(embedded_server.get("/props")[1])
    assert props["default_generation_settings"] == {"n_ctx": 4096} and props["chat_template"]


def test_a_chat_without_a_token_computes_its_prompt(embedded_server: ServerProcess) -> None:
    """The warm-up of llama.vim's instructions; afterwards the prompt is in the prefix cache unless
    `cache_prompt` is false.
    """
    text = "".join(f"value_{i} = {i}\n" for i in range(60))
    body = {"messages": [{"role": "user", "content": text}], "id_slot": 3}
    answer = embedded_server.post("/v1/chat/completions", body | {"n_predict": 0, "samplers": []})[
        1
    ]
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == (
        "",
        0,
    )
    for cache_prompt in (True, False):
        usage = embedded_server.post(
            "/v1/chat/completions", body | {"max_tokens": 1, "cache_prompt": cache_prompt}
        )[1]["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 128) == cache_prompt
    status, answer = embedded_server.post(
        "/v1/chat/completions", body | {"n_predict": 3, "max_tokens": 4}
    )
    assert status == 400 and "differ; give one of them" in answer["error"]["message"]


def test_a_line_indented_too_little_ends_the_middle(embedded_server: ServerProcess) -> None:
    body = {
        "input_prefix": "class A:\n    def f(self):\n        x = 1\n",
        "input_suffix": "",
        "temperature": 0,
        "n_predict": 200,
    }
    body |= {"grammar": r'root ::= "y = 2\n            z = 3\n\n    def"'}
    whole = embedded_server.post("/infill", body)[1]["content"]
    lines = whole.split("\n")
    least = 12
    cut = next(
        i
        for i, line in enumerate(lines)
        if i and line.strip() and len(line) - len(line.lstrip()) < least
    )
    expected = "\n".join(lines[:cut])
    answer = embedded_server.post("/infill", body | {"n_indent": least})[1]
    assert (answer["content"].rstrip("\n"), answer["stop"]) == (expected.rstrip("\n"), True)
    lines_ = raw_lines(embedded_server, "/infill", body | {"n_indent": least, "stream": True})
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines_]
    assert "".join(event["content"] for event in events) == answer["content"] and events[-1]["stop"]


def test_long_texts_do_not_hold_up_the_others(embedded_server: ServerProcess) -> None:
    """Every route tokenizes long texts in worker processes: probes are answered meanwhile. (Longer
    ones are refused before.)
    """
    text = "def function(x):\n    return x + 1\n\n" * 5000
    slow: list[float] = []
    for path, body in (
        ("/tokenize", {"inputs": text}),
        ("/tokenize", {"prompt": text, "add_special_tokens": False}),
        ("/infill", {"input_prefix": text, "input_suffix": ""}),
        ("/v1/completions", {"prompt": text, "suffix": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            answer = pool.submit(embedded_server.post, path, body)
            probes = 0
            while not answer.done():
                assert embedded_server.get("/live")[0] == 200
                probes += 1
            seconds = time.monotonic() - began
        slow.append(seconds / max(1, probes) / seconds)
    # A blocked loop answers one probe at the end; a free one many.
    assert max(slow) < 0.34, slow
