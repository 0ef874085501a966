"""`onehead top`: rates and percentiles by hand, and the command against a server of a few lines."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from rich.console import Console

from commands.cli import main
from commands.top import parse, quantile, table
from server.metrics import Metrics

STEPS = """
onehead_requests_running 3.0
onehead_requests_total{{outcome="stop"}} {stopped}
onehead_requests_total{{outcome="length"}} 5.0
onehead_generation_tokens_total {tokens}
onehead_step_time_seconds_bucket{{le="0.1"}} {short}
onehead_step_time_seconds_bucket{{le="1.0"}} {medium}
onehead_step_time_seconds_bucket{{le="+Inf"}} {all}
"""
OLD = parse(STEPS.format(stopped=1, tokens=100, short=4, medium=4, all=4), 10.0)
NEW = parse(STEPS.format(stopped=5, tokens=400, short=6, medium=10, all=14), 12.0)


def shown(text: str) -> str:
    """Of a printed table, its words with single spaces."""
    return re.sub(r"\s+", " ", text)


def printed(notice: str = "") -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table("http://[fe80::1]:8000", OLD, NEW, notice))
    return shown(console.file.getvalue())  # type: ignore[attr-defined]


def test_percentiles_are_of_what_was_counted_between_two_scrapes() -> None:
    # 10 steps: 2 within 0.1 s, 4 within 1 s, and 4 above.
    name = "onehead_step_time_seconds_bucket"
    assert quantile(name, 0.1, OLD, NEW) == pytest.approx(0.05)
    assert quantile(name, 0.4, OLD, NEW) == pytest.approx(0.1 + 0.9 / 2)
    assert quantile(name, 0.95, OLD, NEW) == 1.0
    assert quantile(name, 0.5, NEW, NEW) is None
    assert quantile("onehead_nothing_bucket", 0.5, OLD, NEW) is None


def test_rates_are_counters_over_seconds() -> None:
    words = printed("trying again: [bold]refused")
    assert "http://[fe80::1]:8000" in words and "trying again: [bold]refused" in words
    assert "requests running 3" in words and "requests ended 2.0 a second" in words
    assert "tokens generated 150.0" in words and "engine step 775.0 / 1,000.0 ms" in words


@contextmanager
def serving(status: int, body: bytes) -> Iterator[str]:
    """The URL of a server with this answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("authorization", ""))
            self.send_response(status, "\x1b]0;title")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    keys: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
    assert set(keys) == {"Bearer right"}


def run(url: str) -> int:
    return main(["top", url, "--once", "--interval", "0.1", "--key", "right"])


def test_a_server_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(200, Metrics("m").exposition()) as url:
        assert run(url) == 0
    words = shown(capsys.readouterr().out)
    assert "requests running 0" in words and "KV cache pages 0" in words
    assert "time to first token - / - ms (p50 / p95)" in words


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"", "HTTP Error 401: \\x1b]0;title"),
        (200, b"process_open_fds 1.0\n", "its /metrics are not those of onehead"),
        (200, b"<html>", ""),
    ],
)
def test_a_server_that_cannot_be_used_is_one_line(
    status: int,
    body: bytes,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(status, body) as url:
        assert run(url) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"onehead top: the server at {url} cannot be used: {words}")
    assert errors.count("\n") == 1


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("http://127.0.0.1:1") == 1
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("--key", ""), ("--key", "a\nb"), ("--url", "ftp://a"), ("--interval", "0")],
)
def test_an_option_that_cannot_be_used_is_named(
    arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["top", *arguments]) == 78
    assert f"onehead top: {arguments[0].removeprefix('--')}" in capsys.readouterr().err
