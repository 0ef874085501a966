"""Streams whose plain tokens native code writes have the events that Python writes, for every dialect and kind of token."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from server.supervision.token_writer import library
from tests.support.processes import ServerProcess, metric_sums
from tests.support.wire import exchange, http_request

pytestmark = pytest.mark.skipif(library() is None, reason="the token writer was not compiled")

PROMPTS = "The capital of France is", "def f(x):\n    return", "# \u00e9\u4e2d\U0001f600 \u00fcber", "import numpy as np\n\n\nclass A:\n"
VARYING = {"id", "created", "timings"}


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    for number, prompt in enumerate(PROMPTS):
        sampled: dict[str, Any] = {"temperature": 1.3, "seed": number}
        for more in (
            {},
            {"details": True},
            {"top_n_tokens": 2},
            {"stop": ["e", "\n"]},
            sampled | {"do_sample": True, "max_new_tokens": 60},
        ):
            yield "/generate_stream", {"inputs": prompt, "parameters": {"max_new_tokens": 24, "ignore_eos": True} | more}
        kinds: tuple[dict[str, Any], ...] = (
            {},
            {"return_token_ids": True},
            {"logprobs": 1},
            {"stop": ["the", "\n\n", "zzz"]},
            {"stream_options": {"include_usage": True}},
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"n": 3, "echo": True} | sampled,
            {"min_tokens": 5, "stop": ["."]} | sampled,
            {"token_healing": True},
            {"skip_special_tokens": False} | sampled,
        )
        for more in kinds:
            yield "/v1/completions", {"prompt": prompt, "max_tokens": 24, "stream": True, "temperature": 0} | more
        yield "/infill", {"input_prefix": prompt, "input_suffix": "\n", "n_predict": 16, "stream": True, "temperature": 0, "seed": 1}
        for more in ({"n_indent": 2}, {"response_fields": ["content"]}, {"response_fields": ["tokens_predicted", "stop"]}):
            yield "/infill", {"input_prefix": prompt, "input_suffix": "\n", "n_predict": 16, "stream": True, "seed": 1} | more


def events(port: int, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, without what differs from one to the next of the same request, in the order of each choice."""
    response, data = exchange(port, http_request("POST", path, body), 60.0)
    assert response.status == 200, data
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        text = block.removeprefix("data: ")
        found.append(text if text == "[DONE]" else {name: value for name, value in json.loads(text).items() if name not in VARYING})

    def choice(event: Any) -> int:
        return event["choices"][0]["index"] if isinstance(event, dict) and event.get("choices") else 99

    return sorted(found, key=choice)


def answers(launcher: str, at_once: int) -> tuple[list[Any], float]:
    """The events of all requests, so many at once, and the tokens that were written."""
    with ServerProcess(None, launcher=(launcher,)) as server:
        asked = list(requests())
        found: list[Any] = [None] * len(asked)

        def ask(first: int) -> None:
            for number in range(first, len(asked), at_once):
                found[number] = events(server.port, *asked[number])

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _, shown = exchange(server.port, http_request("GET", "/metrics"), 60.0)
        return found, metric_sums(shown.decode())["onehead_generation_tokens_total"]


def test_native_code_writes_what_python_writes() -> None:
    expected, num_tokens = answers("tests.support.python_streams", 1)
    for at_once in (1, 8):
        found, num_written = answers("commands.cli", at_once)
        for request, one, other in zip(requests(), found, expected, strict=True):
            assert one == other, request
        # Sequences that end at a stop string have been computed a little further by then.
        assert num_written == pytest.approx(num_tokens, rel=0.05)
