"""`onehead bench` against a server of a few lines, and its arithmetic against numbers worked out by
hand.
"""

import asyncio
import io
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from commands.bench.bench import Ask, BenchSettings, Load, bench, prompt_text, run
from commands.bench.client import Endpoint, Outcome
from commands.bench.figures import figures
from commands.bench.tables import tables
from server.config import load
from server.errors import ConfigurationError
from tests.support.checkpoints import make_tokenizer

INFO = {"model_id": "fake", "max_total_tokens": 4096}
ASK = Ask(prompt_tokens=5, output_tokens=3, timeout=5.0)


class Exchange:
    """One POST /generate as the fake server sees it: the request, and ways to answer it."""

    def __init__(
        self,
        body: dict[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.body = body
        self.reader = reader
        self.writer = writer

    async def send(self, *chunks: bytes) -> None:
        """Chunks of the transfer coding, each a piece of text of its own."""
        for chunk in chunks:
            self.writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        await self.writer.drain()

    async def start(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: "
            b"chunked\r\n\r\n",
        )
        await self.writer.drain()

    def events(self, count: int, input_length: int | None = None) -> list[bytes]:
        """`count` tokens, the last with details."""
        values: list[dict[str, Any]] = [
            {"index": n + 1, "token": {"id": 10 + n, "text": "x"}, "details": None}
            for n in range(count)
        ]
        length = self.body["parameters"]["truncate"] if input_length is None else input_length
        values[-1]["details"] = {
            "finish_reason": "length",
            "generated_tokens": count,
            "input_length": length,
        }
        return [b"data: " + json.dumps(value).encode() + b"\n\n" for value in values]

    async def answer(self) -> None:
        """All that was asked for, at once."""
        await self.start()
        await self.send(*self.events(self.body["parameters"]["max_new_tokens"]), b"")


Script = Callable[[Exchange], Awaitable[None]]


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    """The URL of a server that answers each POST by `script`, and GET /info by INFO."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /info HTTP/1.1"):
            text = json.dumps(INFO).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        else:
            assert (
                head.startswith("POST /generate HTTP/1.1\r\n") and "connection: close\r\n" in head
            )
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            await script(Exchange(json.loads(await reader.readexactly(length)), reader, writer))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def run_on(script: Script, load: Load, count: int, ask: Ask = ASK) -> list[Outcome]:
    async with serving(script) as url:
        rng = random.Random(0)
        return await run(
            Endpoint.parse(url),
            ask,
            load,
            [ask.body(rng) for _ in range(count)],
            lambda: None,
        )


def settings_for(url: str, **values: Any) -> BenchSettings:
    few = {
        "concurrency": [1, 2],
        "requests": 4,
        "prompt_tokens": 5,
        "output_tokens": 3,
        "warmup": 0,
    }
    return BenchSettings.model_validate({"url": url} | few | values)


# --- figures


def test_figures_of_outcomes_worked_out_by_hand() -> None:
    outcomes = [
        Outcome(0.0, sent=0.0, token_times=[1.0, 1.5, 2.5], end=3.0),
        Outcome(1.0, sent=1.5, token_times=[4.0, 4.25, 4.5], end=5.0),
        Outcome(2.0, sent=2.0, token_times=[2.5], end=8.0, failure="cut off"),
    ]
    found = figures(outcomes)
    assert (found["requests"], found["failed"], found["seconds"]) == (3, 1, 8.0)
    assert (found["output_tokens_per_second"], found["requests_per_second"]) == (6 / 8, 2 / 8)
    assert found["time_to_first_token"] == pytest.approx(
        {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98, "max": 3.0},
    )
    assert found["inter_token_latency"] == pytest.approx(
        {"mean": 0.5, "p50": 0.375, "p90": 0.85, "p99": 0.985, "max": 1.0},
    )
    # From the intended time 1.0, though it was sent at 1.5.
    assert found["e2e_latency"]["max"] == 4.0


def test_figures_where_nothing_came_back() -> None:
    found = figures([Outcome(0.0, end=2.0, failure="refused")])
    assert (found["failed"], found["output_tokens_per_second"], found["time_to_first_token"]) == (
        1,
        0.0,
        None,
    )


async def test_latencies_are_the_server_s_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        "commands.bench.bench.time",
        SimpleNamespace(perf_counter=lambda: clock.now),
    )

    async def script(exchange: Exchange) -> None:
        await exchange.start()
        for delay, event in zip((0.5, 0.25, 0.125), exchange.events(3), strict=True):
            clock.now += delay
            await exchange.send(event)
            # The client, in the same loop, reads it before the clock goes on.
            await asyncio.sleep(
                0.01,
            )
        clock.now += 1.0
        await exchange.send(b"")

    outcomes = await run_on(script, Load.closed(1), count=3)
    assert [o.failure for o in outcomes] == [None] * 3
    assert [o.intended for o in outcomes] == [0.0, 1.875, 3.75]
    for outcome in outcomes:
        assert [t - outcome.intended for t in outcome.token_times] == [0.5, 0.75, 0.875]
        assert outcome.end - outcome.intended == 1.875
    assert figures(outcomes)["output_tokens_per_second"] == 9 / 5.625


# --- loads


async def test_closed_loop_keeps_its_clients_busy_and_no_more() -> None:
    open_now: list[int] = []
    most, bodies = 0, []

    async def script(exchange: Exchange) -> None:
        nonlocal most
        bodies.append(exchange.body)
        open_now.append(1)
        most = max(most, len(open_now))
        await asyncio.sleep(0.01)
        open_now.pop()
        await exchange.answer()

    outcomes = await run_on(script, Load.closed(3), count=9)
    assert most == 3
    assert [o.failure for o in outcomes] == [None] * 9
    assert len({body["inputs"] for body in bodies}) == 9
    asked = {
        "max_new_tokens": 3,
        "truncate": 5,
        "do_sample": False,
        "ignore_eos": True,
        "details": True,
    }
    assert all(body["parameters"] == asked and body["stream"] is True for body in bodies)
    assert [o.token_ids for o in outcomes] == [[10, 11, 12]] * 9


async def test_open_loop_sends_without_waiting_for_replies() -> None:
    arrived = 0
    all_there = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 5:
            all_there.set()
        # A client that waited for the first reply would never send the fifth.
        await all_there.wait()
        await exchange.answer()

    load = Load("", arrivals=(0.0, 0.01, 0.01, 0.02, 0.03))
    outcomes = await run_on(script, load, count=5)
    assert [o.failure for o in outcomes] == [None] * 5
    assert [o.intended for o in outcomes] == list(load.arrivals)


async def test_open_loop_counts_from_the_intended_time_when_everything_stalls() -> None:
    stalled = False

    async def script(exchange: Exchange) -> None:
        nonlocal stalled
        if not stalled:
            stalled = True
            time.sleep(0.2)  # Server and client: nothing is sent meanwhile.
        await exchange.answer()

    outcomes = await run_on(script, Load("", arrivals=(0.0, 0.02, 0.04)), count=3)
    first_token = figures(outcomes)["time_to_first_token"]
    assert all(o.sent >= o.intended for o in outcomes)
    assert all(o.token_times[0] - o.intended >= 0.2 - o.intended for o in outcomes)
    assert first_token["max"] == max(o.token_times[0] - o.intended for o in outcomes) >= 0.2


def test_arrivals_are_drawn_from_the_seed() -> None:
    one, same, other = (Load.open(4.0, 2000, random.Random(seed)).arrivals for seed in (1, 1, 2))
    assert one == same != other
    assert list(one) == sorted(one) and one[0] > 0
    assert 2000 / one[-1] == pytest.approx(4.0, rel=0.1)


def test_prompts_have_tokens_enough() -> None:
    tokenizer = make_tokenizer()
    for count in (1, 7, 200):
        text = prompt_text(random.Random(count), count)
        assert text.replace("\n", "").isprintable()
        assert len(tokenizer.encode(text).ids) >= count


# --- failures


async def _refuses(exchange: Exchange) -> None:
    text = b'{"error":"too many","error_type":"overloaded"}'
    exchange.writer.write(
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text),
    )


async def _breaks_off(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.send(exchange.events(3)[0])


async def _ends_early(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.send(*exchange.events(2), b"")


async def _fails_midway(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.send(
        exchange.events(3)[0],
        b'data: {"error":"engine died","error_type":"generation"}\n\n',
        b"",
    )


async def _shortens_the_prompt(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.send(*exchange.events(3, input_length=4), b"")


async def _stalls(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.reader.read()  # Until the client goes.


async def _speaks_otherwise(exchange: Exchange) -> None:
    exchange.writer.write(b"220 mail.example.org\r\n\r\n")


async def _sends_nonsense(exchange: Exchange) -> None:
    await exchange.start()
    await exchange.send(b"data: [DONE]\n\n", b"")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_refuses, "HTTP 429: too many"),
        (_breaks_off, "the connection was closed in mid-reply"),
        (_ends_early, "2 tokens came, 3 were asked for"),
        (_fails_midway, "engine died"),
        (_shortens_the_prompt, "the prompt had 4 tokens, 5 were asked for"),
        (_stalls, "no end within 0.1 s"),
        (_speaks_otherwise, "the reply is not HTTP/1.1"),
        (_sends_nonsense, "an event is not of TGI's dialect"),
    ],
)
async def test_a_failure_is_counted_with_its_reason(script: Script, reason: str) -> None:
    number = 0

    async def every_second(exchange: Exchange) -> None:
        nonlocal number
        number += 1
        await (exchange.answer() if number % 2 else script(exchange))

    outcomes = await run_on(
        every_second,
        Load.closed(1),
        count=4,
        ask=Ask(5, 3, timeout=0.1 if script is _stalls else 5.0),
    )
    assert [o.failure for o in outcomes] == [None, reason, None, reason]
    assert figures(outcomes)["failed"] == 2


async def test_events_may_be_cut_anywhere() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start()
        text = b": a comment\r\n\r\n" + b"".join(exchange.events(3)).replace(b"\n", b"\r\n")
        await exchange.send(text[:20], text[20:21], text[21:150], text[150:], b"")

    assert [o.failure for o in await run_on(script, Load.closed(1), count=1)] == [None]


# --- the command


async def test_the_result_file_holds_all_that_a_later_run_needs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "result.json"
    async with serving(Exchange.answer) as url:
        assert await bench(settings_for(url, rate=[200.0], output=output)) == 0
    result = json.loads(output.read_text())
    assert {"command", "date", "machine", "commit", "server", "settings", "runs"} <= result.keys()
    assert (
        result["server"] == INFO
        and result["machine"]["cpus"] >= 1
        and result["settings"]["url"] == url
    )
    assert [run["load"] for run in result["runs"]] == ["closed 1", "closed 2", "open 200/s"]
    for each in result["runs"]:
        assert each["figures"]["requests"] == 4 and each["failures"] == {}
    printed = capsys.readouterr()
    assert (
        "tokens/s" in printed.out and "open 200/s" in printed.out and "failed:" not in printed.err
    )


WIDE = {"mean": 98_765.4, "p50": 98_765.4, "p90": 98_765.4, "p99": 98_765.4, "max": 98_765.4}


@pytest.mark.parametrize("width", [72, 80, 120])
def test_no_figure_is_cut_at_the_width_of_a_terminal(width: int) -> None:
    """Latencies of a day, in milliseconds, and rates of a large server."""
    part = {"p50": 0.0123456, "p99": 0.123456}
    step = {"count": 123_456, "host": part, "compute": part, "host_share": 0.1234}
    latencies = {
        "time_to_first_token": WIDE,
        "inter_token_latency": WIDE,
        "e2e_latency": WIDE,
        "step": step,
    }
    found = {
        "requests": 1_000_000,
        "failed": 12_345,
        "output_tokens_per_second": 123_456.7,
        "requests_per_second": 12_345.67,
    } | latencies
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*tables([{"load": "open 0.333333/s", "figures": found}]))
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    expected = ["1000000", "12345", "123456.7", "12345.67", "123456", "12.34%"]
    assert (
        all(figure in text.split() for figure in expected)
        and text.count("98765400") == 4
        and text.count("98765") == 6
    )
    assert "TTFT" in text and text.count("12.35 /") == 2 and text.count("0.333333/s") == 3
    if width >= 80:
        # Each run in one line.
        assert all(len(line.split("/")) > 2 for line in text.splitlines() if "98765400" in line)


async def interrupt(bench_run: Coroutine[Any, Any, int], until: Callable[[], bool]) -> int:
    """The exit status of a bench that is cancelled, as asyncio.run does at Ctrl-C, when `until`
    holds.
    """
    task = asyncio.ensure_future(bench_run)
    while not until():
        await asyncio.sleep(0.01)
    task.cancel()
    status = await task
    await asyncio.sleep(0.05)  # The server sees that its clients are gone.
    return status


async def test_an_interrupted_bench_shows_what_it_has_and_writes_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answered, output = [0], tmp_path / "result.json"

    async def some(exchange: Exchange) -> None:
        answered[0] += 1
        # To the end of the connection.
        await (exchange.answer() if answered[0] < 8 else exchange.reader.read())

    async with serving(some) as url:
        bench_run = bench(settings_for(url, concurrency=[1, 1, 2], output=output))
        assert await interrupt(bench_run, lambda: answered[0] == 8) == 130
    printed = capsys.readouterr()
    rows = [line.split()[:4] for line in printed.out.splitlines() if "closed" in line]
    assert rows[0] == ["closed", "1", "4", "0"]
    words = "interrupted: 1 of 3 runs are complete; no result is written"
    assert printed.err.endswith(f"onehead bench: {words}\n") and not output.exists()


async def test_a_bench_that_is_interrupted_before_its_first_reply_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    async def silent(exchange: Exchange) -> None:
        asked.append(exchange)
        await exchange.reader.read()

    async with serving(silent) as url:
        assert await interrupt(bench(settings_for(url, warmup=1)), lambda: bool(asked)) == 130
    printed = capsys.readouterr()
    assert printed.out == "" and "interrupted: 0 of 2 runs are complete; no result" in printed.err


async def test_failures_make_the_status_1_and_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(_refuses) as url:
        assert await bench(settings_for(url, warmup=1)) == 1
    assert "8 failed: HTTP 429: too many" in capsys.readouterr().err


async def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(Exchange.answer) as url:
        pass
    assert await bench(settings_for(url)) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and url in printed.err


def test_options_from_the_command_line_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEHEAD_RATE", "0.5,2")
    settings = load(BenchSettings, ["--concurrency", "1,4", "--requests", "9"], "onehead bench")
    assert (settings.concurrency, settings.rate, settings.requests) == ([1, 4], [0.5, 2.0], 9)
    assert load(BenchSettings, ["--concurrency", ""], "onehead bench").concurrency == []


def test_of_the_default_numbers_of_clients_those_with_enough_requests_are_run() -> None:
    clients = [
        load(BenchSettings, argv, "onehead bench").clients
        for argv in ([], ["--requests", "4"], ["--requests", "8", "--rate", "2"])
    ]
    assert clients == [[1, 8, 32], [1], [1, 8]]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--url", "ftp://127.0.0.1"], "url"),
        (["--concurrency", "1,x"], "concurrency"),
        (["--concurrency", ""], "concurrency"),
        (["--rate", "0"], "rate"),
        (["--requests", "8", "--concurrency", "1,9"], "requests"),
        (["--output", "/no/such/folder/result.json"], "output"),
    ],
)
def test_options_that_cannot_be_are_named(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load(BenchSettings, argv, "onehead bench")
