"""`onehead top` as a process: on a terminal of its own, and for scripts."""

import asyncio
import os
import pty
import re
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, get_args

import pytest

from commands.top import top
from commands.top.top import TopSettings
from tests.support.fake_monitor import FakeMonitor
from tests.support.paths import ROOT
from tests.support.processes import ServerProcess

SECONDS = 30.0
ENVIRONMENT = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
ENVIRONMENT |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "LANG": "C.UTF-8"}


def command(port: int, *arguments: str) -> tuple[str, ...]:
    return sys.executable, "-m", "commands.cli", "top", f"http://127.0.0.1:{port}", *arguments


async def once(port: int, *arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """Exit status, output and errors of a run without a terminal."""
    pipes: dict[str, Any] = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command(port, *arguments), env=ENVIRONMENT | environment, **pipes)
    async with asyncio.timeout(SECONDS):
        out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, columns: int, lines: int) -> None:
        self.ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (lines, columns))
        self.modes = termios.tcgetattr(self.theirs)
        self.text = ""
        self.process: asyncio.subprocess.Process

    async def start(self, port: int, *arguments: str) -> None:
        ends: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), self.theirs) | {"stderr": asyncio.subprocess.PIPE}
        self.process = await asyncio.create_subprocess_exec(*command(port, *arguments), env=ENVIRONMENT, start_new_session=True, **ends)
        os.set_blocking(self.ours, False)
        asyncio.get_running_loop().add_reader(self.ours, self._read)

    def _read(self) -> None:
        self.text += os.read(self.ours, 65536).decode(errors="replace")

    @property
    def words(self) -> str:
        """What was written, without what moves the cursor and sets colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.02)

    async def shows(self, words: str) -> None:
        """Waits for words from now on."""
        self.text = ""
        await self.until(lambda: words in self.words)

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())


@asynccontextmanager
async def terminal(port: int, columns: int = 80, lines: int = 24) -> AsyncIterator[Terminal]:
    """The command, running; it must have ended when the test has."""
    made = Terminal(columns, lines)
    await made.start(port)
    try:
        yield made
        async with asyncio.timeout(SECONDS):
            await made.process.wait()
    finally:
        asyncio.get_running_loop().remove_reader(made.ours)
        if made.process.returncode is None:
            made.process.kill()
            await made.process.wait()
        os.close(made.ours)
        os.close(made.theirs)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 50)])
async def test_it_draws_and_sorts_until_q(columns: int, lines: int) -> None:
    fake = FakeMonitor()
    async with fake.serving(), terminal(fake.port, columns, lines) as screen:
        await screen.shows(":reverse")  # The end of a frame.
        assert ("req-000" in screen.words) == (columns >= 120)
        screen.press("o")
        await screen.until(lambda: "\x1b[7m:output" in screen.text)
        screen.press("r")
        await screen.until(lambda: "\x1b[7m:reverse" in screen.text)
        assert termios.tcgetattr(screen.theirs) != screen.modes
        screen.press("q")
        assert await asyncio.wait_for(screen.process.wait(), SECONDS) == 0
        assert termios.tcgetattr(screen.theirs) == screen.modes
        assert screen.text.count("\x1b[?1049l") == 1  # The screen from before is back.


async def test_ctrl_c_ends_it_and_the_terminal_is_as_it_was() -> None:
    fake = FakeMonitor()
    async with fake.serving(), terminal(fake.port) as screen:
        await screen.shows("pages in use")
        screen.process.send_signal(2)
        assert await asyncio.wait_for(screen.process.wait(), SECONDS) == 130
        assert termios.tcgetattr(screen.theirs) == screen.modes


async def test_a_new_size_is_drawn() -> None:
    fake = FakeMonitor()
    async with fake.serving(), terminal(fake.port) as screen:
        await screen.shows("pages in use")
        termios.tcsetwinsize(screen.theirs, (50, 200))
        await screen.shows("req-000")
        screen.press("q")


async def test_a_lost_connection_is_shown_and_made_again() -> None:
    fake = FakeMonitor()
    async with fake.serving(), terminal(fake.port) as screen:
        await screen.shows("ready")
        fake.cut()
        await screen.shows("connection lost, trying again: ")
        await screen.shows("ready")
        assert fake.num_connections == 2
        screen.press("q")


async def test_a_server_that_is_back_wants_a_key_now() -> None:
    fake = FakeMonitor()
    async with fake.serving(), terminal(fake.port) as screen:
        await screen.shows("ready")
        fake.key = "new"
        fake.cut()
        assert await asyncio.wait_for(screen.process.wait(), SECONDS) == 1
        assert screen.process.stderr is not None
        assert b"it needs a key" in await screen.process.stderr.read()
        assert termios.tcgetattr(screen.theirs) == screen.modes


async def test_one_frame_for_scripts_is_plain() -> None:
    fake = FakeMonitor()
    async with fake.serving():
        status, out, errors = await once(fake.port, "--once")
    assert (status, errors) == (0, "")
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) == 80
    assert len(re.findall(r"^ *\d+ +(running|waiting|prefill)", out, re.MULTILINE)) == 15


async def test_a_real_server_is_shown(embedded_server: ServerProcess) -> None:
    async with asyncio.timeout(SECONDS):
        while True:  # Statistics are those of up to a second ago, and a fast machine may end a stream before they are printed.
            stream = embedded_server.stream("def", max_new_tokens=4000, ignore_eos=True)
            stream.response()
            status, out, errors = await once(embedded_server.port, "--once")
            stream.close()
            if "running 1 " in out:
                break
    assert (status, errors) == (0, "")
    assert "embedded on cpu  ready" in out and "of 512 pages in use" in out and "running 1 " in out
    assert len(re.findall(r"^ *\d+ +(running|prefill) +\d", out, re.MULTILINE)) == 1


async def test_columns_of_the_environment_are_taken() -> None:
    fake = FakeMonitor()
    async with fake.serving():
        _, out, _ = await once(fake.port, "--once", COLUMNS="200")
    assert max(map(len, out.splitlines())) == 200
    assert "req-000" in out


@pytest.mark.parametrize("sort", get_args(TopSettings.model_fields["sort"].annotation))
async def test_a_frame_is_sorted_as_asked(sort: str) -> None:
    fake = FakeMonitor()
    async with fake.serving():
        status, out, _ = await once(fake.port, "--once", "--sort", sort)
    rows = [line.split() for line in out.splitlines() if re.match(r" *\d+ +(running|waiting|prefill)", line)]
    values = [row[("id", "state", "", "", "", "output", "tokens", "pages", "preemptions").index(sort)] for row in rows]
    assert status == 0 and len(values) == 15
    if sort == "state":
        assert values[:3] == ["waiting"] * 3
    else:
        assert values == sorted(values, key=float, reverse=sort != "id")


@pytest.mark.parametrize("given", [("--key", "the key"), ("ONEHEAD_KEY", "the key")])
async def test_a_key_is_sent(given: tuple[str, str]) -> None:
    fake = FakeMonitor(key="the key")
    async with fake.serving():
        arguments = given if given[0].startswith("--") else ()
        status, out, errors = await once(fake.port, "--once", *arguments, **({} if arguments else dict([given])))
    assert (status, errors) == (0, "")
    assert "pages in use" in out


@pytest.mark.parametrize(
    ("server", "arguments", "words"),
    [
        ({"key": "right"}, (), "it needs a key: --key, or the environment variable ONEHEAD_KEY"),
        ({"key": "right"}, ("--key", "wrong"), "it does not accept the key"),
        ({"missing": True}, (), "it has no GET /monitor: its option server.ui is false, or it is of another version"),
    ],
)
async def test_an_answer_that_cannot_be_used_is_one_line(server: dict[str, Any], arguments: tuple[str, ...], words: str) -> None:
    fake = FakeMonitor(**server)
    async with fake.serving():
        done = await once(fake.port, "--once", *arguments)
    assert done == (1, "", f"onehead top: the server at http://127.0.0.1:{fake.port} cannot be used: {words}\n")


async def test_no_server_is_one_line() -> None:
    fake = FakeMonitor()
    async with fake.serving():
        pass
    status, out, errors = await once(fake.port, "--once")
    assert (status, out) == (1, "")
    assert re.fullmatch(
        rf"onehead top: the server at http://127.0.0.1:{fake.port} cannot be used: .*refused.*\n|.*Connect call failed.*\n", errors
    )


async def test_a_frame_that_cannot_be_had_ends_with_the_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(top, "ONCE_SECONDS", 1.5)
    fake = FakeMonitor(is_loading=True)
    async with fake.serving(), asyncio.timeout(SECONDS):
        assert await top.top(TopSettings(url=f"http://127.0.0.1:{fake.port}", once=True)) == 1
    assert capsys.readouterr() == (
        "",
        f"onehead top: the server at http://127.0.0.1:{fake.port} cannot be used: "
        "the state of its KV cache has not come for 1.5 s; its status is: starting\n",
    )


async def test_a_server_that_loads_its_engine_is_shown_with_its_status() -> None:
    fake = FakeMonitor(is_loading=True)
    async with fake.serving(), terminal(fake.port) as screen:
        await screen.shows("status: starting; waiting for the state of the KV cache")
        screen.press("q")


async def test_what_a_terminal_would_obey_is_not_written() -> None:
    fake = FakeMonitor(refusal=b'{"error": "\\u001b]0;title\\u0007\\u001b[2J"}')
    async with fake.serving():
        done = await once(fake.port, "--once")
    words = "GET /monitor is answered with HTTP 500: ?]0;title??[2J"
    assert done == (1, "", f"onehead top: the server at http://127.0.0.1:{fake.port} cannot be used: {words}\n")


async def test_without_a_terminal_it_says_what_to_do() -> None:
    status, out, errors = await once(1)
    assert (status, out) == (2, "")
    assert "onehead top: standard input and output are no terminal to draw on; --once prints one frame\n" in errors


@pytest.mark.parametrize("arguments", [("--key", ""), ("--key", "a\nb"), ("--url", "ftp://a")])
async def test_an_option_that_cannot_be_used_is_named(arguments: tuple[str, ...]) -> None:
    url = ("http://127.0.0.1:1",) if arguments[0] == "--key" else ()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "commands.cli", "top", *url, "--once", *arguments, env=ENVIRONMENT, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 78
    assert f"onehead top: {arguments[0].removeprefix('--')}: ".encode() in errors
