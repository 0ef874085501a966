"""nginx with the configuration of deploy/compose in front of a real server, where nginx is
installed.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.nginx import NGINX, Nginx
from tests.support.processes import DEADLINE, ServerProcess, Stream, metric_sums, wait_until
from tests.support.wire import exchange, http_request

pytestmark = pytest.mark.skipif(
    NGINX is None, reason="nginx is not installed; Debian's package nginx-light has it"
)
LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server that trusts nginx, and nginx."""
    folder = tmp_path_factory.mktemp("nginx")
    with (folder / "server.log").open("w") as log:
        options = "--server.trusted_proxies", "127.0.0.0/8", "--server.stall_after", "60"
        with ServerProcess(None, *options, stderr=log) as server:
            nginx = Nginx(folder, server.port)
            try:
                yield SimpleNamespace(server=server, port=nginx.port, log=folder / "server.log")
            finally:
                nginx.stop()
            assert server.stop() == 0


def body(prompt: str, **more: object) -> dict[str, object]:
    return {"inputs": prompt, "parameters": LONG, "stream": True, **more}


def test_an_event_passes_at_once(front: SimpleNamespace) -> None:
    before = front.server.metric("onehead_generation_tokens_total")
    stream = Stream(front.port, "/generate", body("import os"))
    wait_until(lambda: front.server.metric("onehead_generation_tokens_total") > before, "a token")
    engine = front.server.engine_pid
    # No event follows that could push the first ones out of a buffer.
    os.kill(engine, signal.SIGSTOP)
    try:
        events = stream.response().events()
        assert "token" in (next(events).data or "")
    finally:
        os.kill(engine, signal.SIGCONT)
    stream.close()


def test_a_client_that_goes_away_cancels_its_request(front: SimpleNamespace) -> None:
    wait_until(lambda: front.server.metric("onehead_requests_running") == 0, "no request")
    stream = Stream(front.port, "/generate", body("def"))
    next(stream.response().events())
    stream.close()
    wait_until(
        lambda: front.server.metric("onehead_requests_running") == 0,
        "the request has been cancelled",
    )
    assert 'outcome="cancelled"' in front.server.get("/metrics")[1]


def test_a_resumable_stream_is_read_on(front: SimpleNamespace) -> None:
    whole = front.server.text("class", **LONG)
    stream = Stream(front.port, "/generate", body("class", resumable=True))
    response = stream.response()
    events = response.events()
    seen = [next(events) for _ in range(3)]
    stream.close()
    request = http_request(
        "GET",
        f"/v1/streams/{response.header('x-stream-id')}",
        headers={"last-event-id": str(seen[-1].id)},
    )
    status, rest = exchange(front.port, request, DEADLINE)
    assert status.status == 200
    answers = [
        json.loads(line.removeprefix("data:"))
        for line in rest.decode().splitlines()
        if line.startswith("data:")
    ]
    assert [each["index"] for each in answers] == list(range(4, LONG["max_new_tokens"] + 1))
    assert answers[-1]["generated_text"] == whole


def test_the_server_sees_the_clients_address_and_not_what_it_says(front: SimpleNamespace) -> None:
    headers = {"x-forwarded-for": "203.0.113.7", "x-request-id": "through-nginx"}
    response, _ = exchange(
        front.port, http_request("POST", "/generate", {"inputs": "a"}, headers), DEADLINE
    )
    assert response.status == 200 and response.header("x-request-id") == "through-nginx"
    (line,) = wait_until(
        lambda: [
            each for each in front.log.read_text().splitlines() if "request=through-nginx" in each
        ],
        "an access line",
    )
    assert "client=127.0.0.1" in line


def test_metrics_are_for_prometheus_alone(front: SimpleNamespace) -> None:
    assert exchange(front.port, http_request("GET", "/metrics"), DEADLINE)[0].status == 404
    assert exchange(front.port, http_request("GET", "/ready"), DEADLINE)[0].status == 200
    assert metric_sums(front.server.get("/metrics")[1])["onehead_requests_total"] > 0


def test_a_body_that_the_server_would_refuse_is_refused_before(
    front: SimpleNamespace, tmp_path: Path
) -> None:
    response, _ = exchange(
        front.port, http_request("POST", "/generate", {"inputs": "a" * 2_200_000}), DEADLINE
    )
    assert response.status == 413
