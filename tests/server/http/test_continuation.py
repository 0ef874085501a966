"""Every route answers with the text that continues the prompt, whose first space is part of it
where the decoder strips a text's first space; the same streamed and whole, in log-probabilities and
offsets; and a stop that is a special token stops.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import fake_engine
from tests.support.fake_engine import READY, FakeEngine, serve
from tests.support.tokenizers import make_decoding_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT = "de"
Ask = Callable[[str, dict[str, Any]], Awaitable[Any]]


def answers(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    questions: list[tuple[str, dict[str, Any]]],
    kind: str = "strip",
) -> list[Any]:
    """The answers to (path, body) of a server whose model generates the tokens of these names, then
    `f` without end.
    """
    tokenizer = make_decoding_tokenizer(kind, folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE})
    )
    script = [id for name in [*names, *"f" * 99] if (id := tokenizer.token_to_id(name)) is not None]
    num_prompt = len(tokenizer.encode(PROMPT).ids)

    def scripted(tokens: list[int], seed: int, end_rate: float, may_end: bool) -> int:
        return script[len(tokens) - num_prompt]

    monkeypatch.setattr(fake_engine, "next_token", scripted)
    vocab_size = tokenizer.get_vocab_size()

    async def ask() -> list[Any]:
        import msgspec

        served = serve(
            folder,
            FakeEngine(msgspec.structs.replace(READY, vocab_size=vocab_size, end_token_ids=[1])),
        )
        while not served.client.admission.accepting:
            await asyncio.sleep(0)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(served.app), base_url="http://test"
        ) as client:
            return [_read(await client.post(path, json=body)) for path, body in questions]

    return asyncio.run(ask())


def _read(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


NAMES = ["▁f", "▁", "a", "<0xC3>", "<0xA9>", "▁▁", "b"]
TEXT = " f aé  b"


def test_the_first_space_of_a_completion_is_text_on_every_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num = len(NAMES)
    tgi = {
        "inputs": PROMPT,
        "parameters": {"max_new_tokens": num, "details": True, "decoder_input_details": True},
    }
    completion = {"prompt": PROMPT, "max_tokens": num, "logprobs": 1, "temperature": 0}
    chat = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": num,
        "logprobs": True,
        "temperature": 0,
    }
    streams = {"stream": True}
    whole, events, kept, echoed, chunks, chatted, deltas, llama = answers(
        tmp_path,
        monkeypatch,
        NAMES,
        [
            ("/generate", tgi),
            ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": num}}),
            ("/v1/completions", completion),
            ("/v1/completions", completion | {"echo": True}),
            ("/v1/completions", completion | streams),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", chat | streams),
            ("/completion", {"prompt": PROMPT, "n_predict": num}),
        ],
    )
    assert whole["generated_text"] == events[-1]["generated_text"] == llama["content"] == TEXT
    assert "".join(token["text"] for token in whole["details"]["tokens"]) == TEXT
    assert "".join(token["text"] for token in whole["details"]["prefill"]) == PROMPT
    assert "".join(event["token"]["text"] for event in events) == TEXT
    assert (
        kept["choices"][0]["text"]
        == "".join(chunk["choices"][0]["text"] for chunk in chunks)
        == TEXT
    )
    assert (
        chatted["choices"][0]["message"]["content"]
        == "".join(x["choices"][0]["delta"].get("content", "") for x in deltas)
        == TEXT
    )
    assert "".join(entry["token"] for entry in chatted["choices"][0]["logprobs"]["content"]) == TEXT
    assert (
        bytes(b for entry in chatted["choices"][0]["logprobs"]["content"] for b in entry["bytes"])
        == TEXT.encode()
    )
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [offset for part in streamed for offset in part["text_offset"]] == kept["choices"][0][
        "logprobs"
    ]["text_offset"]
    for choice, text in ((kept["choices"][0], TEXT), (echoed["choices"][0], PROMPT + TEXT)):
        assert choice["text"] == text
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == text
        for offset, token, top in zip(
            logprobs["text_offset"], logprobs["tokens"], logprobs["top_logprobs"], strict=True
        ):
            assert text.startswith(token, offset) and (top is None or token in top)


@pytest.mark.parametrize("kind", ["byte level", "metaspace, prefix", "strip", "word piece"])
def test_a_stop_that_is_a_special_token_stops(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = {"stop": ["<end_of_turn>"]}
    chat = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 9,
        "temperature": 0,
        **stop,
    }
    whole, events, completion, chatted, llama = answers(
        tmp_path,
        monkeypatch,
        ["a", "<end_of_turn>", "b"],
        [
            (
                "/generate",
                {"inputs": PROMPT, "parameters": {"max_new_tokens": 9, "details": True, **stop}},
            ),
            ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 9, **stop}}),
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, **stop}),
            ("/v1/chat/completions", chat),
            ("/completion", {"prompt": PROMPT, "n_predict": 9, "top_k": 0, **stop}),
        ],
        kind,
    )
    assert (
        whole["details"]["generated_tokens"] == 2
        and whole["details"]["finish_reason"] == "stop_sequence"
    )
    text = whole["generated_text"]
    assert text.strip() == "a" and events[-1]["generated_text"] == text and len(events) == 2
    assert (completion["choices"][0]["text"], completion["choices"][0]["stop_reason"]) == (
        text,
        "<end_of_turn>",
    )
    assert (
        chatted["choices"][0]["message"]["content"],
        chatted["choices"][0]["finish_reason"],
    ) == (text, "stop")
    assert (llama["content"], llama["stop_type"], llama["stopping_word"]) == (
        text,
        "word",
        "<end_of_turn>",
    )
