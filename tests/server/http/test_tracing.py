"""Spans of requests, as a collector gets them from a running server."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.errors import ConfigurationError
from server.http.tracing import Tracing
from tests.support.bad_inputs import KEY_HASHES, KEYS
from tests.support.collector import Collector, collecting
from tests.support.paths import ROOT
from tests.support.processes import DEADLINE, ServerProcess, Stream
from tests.support.wire import exchange, http_request

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
QUICKLY = {
    "OTEL_BSP_SCHEDULE_DELAY": "100",
    "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
}
SERVER_KIND = 2
GENERATING = {"/generate", "/v1/completions", "/v1/chat/completions"}
CLOCKS = 0.02
"""Seconds by which two clocks of this machine may differ."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[ServerProcess]:
    """A server that sends its spans to the collector."""
    options = ("--cache.pages", "512", "--server.max_waiting", "0", "--engine.max_running", "4")
    with ServerProcess(
        None, *options, "--server.tracing_endpoint", f"{collector.url}/", environment=QUICKLY
    ) as server:
        yield server


@pytest.fixture
def id(request: pytest.FixtureRequest) -> str:
    """The id of the request of a test."""
    return f"request-{abs(hash(request.node.name))}"


def ask(server: ServerProcess, path: str, body: dict[str, Any], **headers: str) -> int:
    """The status of an answer, after its end."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return exchange(server.port, http_request("POST", path, body, names), DEADLINE)[0].status


def stream(server: ServerProcess, id: str, tokens: int) -> Stream:
    """A request whose events can be read."""
    body = {
        "inputs": "def",
        "parameters": {"max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    return Stream(server.port, "/generate", body, {"x-request-id": id})


SHORT = {"inputs": "def", "parameters": {"max_new_tokens": 2, "ignore_eos": True}}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "def area(", "max_tokens": 20, "ignore_eos": True}),
        (
            "/generate",
            {"inputs": "def area(", "parameters": {"max_new_tokens": 20, "ignore_eos": True}},
        ),
    ],
)
def test_a_request_is_one_span_with_three_below(
    streamed: bool,
    path: str,
    body: dict[str, Any],
    id: str,
    server: ServerProcess,
    collector: Collector,
) -> None:
    num_prompt = server.post("/tokenize", {"prompt": "def area("})[1]["count"]
    before = time.time()
    assert (
        ask(
            server,
            path,
            body | {"stream": streamed},
            x_request_id=id,
            traceparent=f"00-{TRACE}-{PARENT}-01",
        )
        == 200
    )
    after = time.time()
    found = collector.of(id)
    assert list(found) == ["whole", "queue", "prefill", "decode"]
    whole, queue, prefill, decode = found.values()
    assert (whole.name, whole.kind, whole.parent) == (
        "text_completion pretrained",
        SERVER_KIND,
        PARENT,
    )
    assert {span.trace for span in found.values()} == {TRACE}
    assert whole.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "onehead",
        "gen_ai.request.model": "pretrained",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": 20,
        "http.response.status_code": 200,
        "onehead.request_id": id,
        "server.address": "127.0.0.1",
        "server.port": server.port,
        "url.path": path,
    }
    assert (
        whole.resource["service.name"] == "onehead"
        and whole.resource["deployment.environment.name"] == "test"
    )
    times = [
        before - CLOCKS,
        whole.begin,
        queue.begin,
        queue.end,
        prefill.end,
        decode.end,
        whole.end,
        after + CLOCKS,
    ]
    assert times == sorted(times)
    assert (queue.end, prefill.end) == (prefill.begin, decode.begin)
    assert prefill.begin < prefill.end < decode.end
    assert not any(span.is_error for span in found.values())


def test_the_times_are_those_of_the_tokens(
    id: str, server: ServerProcess, collector: Collector
) -> None:
    """The engine stops between two tokens, for a second that stands in the span of decode."""
    seen: list[float] = []
    for _ in stream(server, id, 60).events():
        seen.append(time.time())
        if len(seen) == 30:
            os.kill(server.engine_pid, signal.SIGSTOP)
            time.sleep(1)
            os.kill(server.engine_pid, signal.SIGCONT)
    found = collector.of(id)
    assert found["prefill"].end == pytest.approx(seen[0], abs=0.1)
    assert found["decode"].end == pytest.approx(seen[-1], abs=0.1)
    assert found["decode"].end - found["decode"].begin >= 1


def test_waiting_is_in_the_span_of_the_queue(
    id: str, server: ServerProcess, collector: Collector
) -> None:
    os.kill(server.engine_pid, signal.SIGSTOP)
    waiting = stream(server, id, 2)
    time.sleep(0.5)
    os.kill(server.engine_pid, signal.SIGCONT)
    list(waiting.events())
    queue = collector.of(id)["queue"]
    assert 0.4 <= queue.end - queue.begin <= 2


def test_several_choices_are_one_request(
    id: str, server: ServerProcess, collector: Collector
) -> None:
    body = {"prompt": "def", "max_tokens": 8, "n": 3, "temperature": 1, "ignore_eos": True}
    assert ask(server, "/v1/completions", body, x_request_id=id) == 200
    found = collector.of(id)
    assert len(found) == 4
    assert found["whole"].attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert found["whole"].attributes["gen_ai.usage.output_tokens"] == 24


@pytest.mark.parametrize(
    ("path", "body", "name", "status"),
    [
        ("/v1/completions", {"prompt": "def", "max_tokens": -2}, "text_completion pretrained", 400),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "nobody", "content": "hello"}]},
            "chat pretrained",
            400,
        ),
        ("/generate", {"inputs": ""}, "text_completion pretrained", 422),
    ],
)
def test_a_request_that_is_refused_is_a_span_alone(
    path: str,
    body: dict[str, Any],
    name: str,
    status: int,
    id: str,
    server: ServerProcess,
    collector: Collector,
) -> None:
    assert ask(server, path, body, x_request_id=id) == status
    (whole,) = collector.of(id).values()
    assert (whole.name, whole.attributes["http.response.status_code"], whole.is_error) == (
        name,
        status,
        False,
    )
    assert whole.attributes["gen_ai.usage.output_tokens"] == 0


def test_a_request_beyond_the_limits_is_a_span_alone(
    id: str, server: ServerProcess, collector: Collector
) -> None:
    running = [stream(server, f"{id}-{number}", 1000).events() for number in range(4)]
    for events in running:
        next(events)
    assert ask(server, "/generate", SHORT, x_request_id=id) == 429
    del running, events  # Closes the connections.
    (whole,) = collector.of(id).values()
    assert whole.attributes["http.response.status_code"] == 429
    for number in range(4):
        collector.of(f"{id}-{number}")


@pytest.mark.parametrize("header", ["", "00-xyz-1-01", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_traceparent_that_is_none_begins_a_trace(
    header: str, id: str, server: ServerProcess, collector: Collector
) -> None:
    ask(server, "/generate", SHORT, x_request_id=id, traceparent=header)
    whole = collector.of(id)["whole"]
    assert (
        whole.parent == "" and re.fullmatch("[0-9a-f]{32}", whole.trace) and whole.trace != "0" * 32
    )


def test_what_makes_no_spans(id: str, server: ServerProcess, collector: Collector) -> None:
    """Traces that are not sampled, and routes that generate nothing."""
    ask(server, "/generate", SHORT, x_request_id="unsampled", traceparent=f"00-{TRACE}-{PARENT}-00")
    ask(server, "/tokenize", {"prompt": "def"}, x_request_id="tokens")
    server.get("/v1/models")
    ask(server, "/generate", SHORT, x_request_id=id)
    collector.of(id)
    assert {
        span.attributes["url.path"] for span in collector.spans if span.kind == SERVER_KIND
    } <= GENERATING
    assert not {"unsampled", "tokens"} & {
        span.attributes.get("onehead.request_id") for span in collector.spans
    }


def test_a_client_that_leaves_has_cancelled(
    id: str, server: ServerProcess, collector: Collector
) -> None:
    left = stream(server, id, 500)
    next(left.events())
    left.close()
    whole = collector.of(id)["whole"]
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert 0 < whole.attributes["gen_ai.usage.output_tokens"] < 500


def test_a_resumable_stream_ends_with_its_generation(
    id: str, server: ServerProcess, collector: Collector
) -> None:
    body = {
        "prompt": "def",
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
        "resumable": True,
    }
    left = Stream(server.port, "/v1/completions", body, {"x-request-id": id})
    left.response()
    left.close()
    whole = collector.of(id)["whole"]
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 300


def test_a_crash_of_the_engine_is_in_the_span_of_decode(
    id: str, server: ServerProcess, collector: Collector
) -> None:
    events = stream(server, id, 40).events()
    next(events)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert len(list(events)) == 39
    found = collector.of(id)
    # It is as long as a fork of the engine takes, at least.
    decode, queue = (found[name].end - found[name].begin for name in ("decode", "queue"))
    assert decode > 0.01 + queue
    assert found["whole"].attributes["gen_ai.usage.output_tokens"] == 40


def test_spans_are_sent_in_batches(id: str, server: ServerProcess, collector: Collector) -> None:
    posts = collector.num_posts
    for number in range(30):
        ask(server, "/generate", SHORT, x_request_id=f"{id}-{number}")
    for number in range(30):
        assert len(collector.of(f"{id}-{number}")) == 4
    assert collector.num_posts - posts < 60


def test_spans_that_were_not_yet_sent_are_sent_at_the_end() -> None:
    with collecting() as collector:
        options = ("--cache.pages", "512", "--server.tracing_endpoint", collector.url)
        with ServerProcess(None, *options) as server:
            for number in range(24):
                ask(server, "/generate", SHORT, x_request_id=f"id-{number}")
            assert server.stop() == 0
        # What was not yet sent is sent at the end.
        whole = [span for span in collector.spans if span.kind == SERVER_KIND]
        assert {span.attributes["onehead.request_id"] for span in whole} == {
            f"id-{i}" for i in range(24)
        }
        assert len(collector.spans) == 96


def test_requests_without_a_valid_key_or_host_make_no_spans() -> None:
    with collecting() as collector:
        options = (
            "--server.api_keys",
            KEY_HASHES,
            "--cache.pages",
            "64",
            "--server.tracing_endpoint",
            collector.url,
        )
        with ServerProcess(None, *options) as server:
            key = {"authorization": f"Bearer {KEYS[0]}"}
            assert ask(server, "/generate", SHORT, x_request_id="no key") == 401
            foreign = http_request(
                "POST", "/generate", SHORT, {"x-request-id": "host"} | key
            ).replace(b"127.0.0.1", b"evil.example", 1)
            assert exchange(server.port, foreign, DEADLINE)[0].status == 403
            assert ask(server, "/generate", SHORT, x_request_id="both", **key) == 200
            assert server.stop() == 0
        assert [
            span.attributes["onehead.request_id"]
            for span in collector.spans
            if span.kind == SERVER_KIND
        ] == ["both"]


def test_without_a_collector_it_serves_and_stops(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as errors:
        server = ServerProcess(
            None,
            "--server.tracing_endpoint",
            "http://127.0.0.1:9",
            stderr=errors,
            environment=QUICKLY,
        )
    for _ in range(20):
        assert server.text("def", max_new_tokens=2)
    begin = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin < 15
    assert len(log.read_text().splitlines()) < 120


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(
        ConfigurationError,
        match=r"server.tracing_endpoint needs OpenTelemetry: install onehead\[tracing\]",
    ):
        Tracing("http://localhost:4318", "model")


def test_without_the_option_the_library_is_not_imported() -> None:
    code = "import sys, server.http.app; sys.exit('opentelemetry.sdk' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("value", ["localhost:4318", "http://", "grpc://a:4317"])
def test_an_endpoint_that_is_no_url_is_refused(value: str) -> None:
    server = ServerProcess(None, "--server.tracing_endpoint", value, wait=False)
    _, errors = server.process.communicate(timeout=DEADLINE)
    assert server.process.returncode == 78 and "server.tracing_endpoint" in errors
