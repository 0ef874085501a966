"""Bytes of the engine's pipe become the same messages however they are split; a process's exit is
reported once, after its messages.
"""

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from typing import Any

import msgspec
import pytest

from server import protocol
from server.supervision.transport import EngineHolder, EngineProcess, Frames


def messages(rng: random.Random) -> list[protocol.FromEngine]:
    gauges = protocol.Gauges(1, 2, 3, 4, 0.5)
    kinds = [
        lambda: protocol.Heartbeat(rng.randrange(2**40)),
        lambda: protocol.Tokens(
            [protocol.Token(i, 0, i, -0.5) for i in range(rng.randrange(3000))], gauges
        ),
        lambda: protocol.Failed(1, "x" * rng.randrange(5)),
    ]
    return [rng.choice(kinds)() for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("seed", range(200))
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sent = messages(rng)
    ours, theirs = Pipe()
    frames, got, data = Frames(), [], b""
    for (
        message
    ) in sent:  # By the very pipe that an engine writes to, which takes 64 KiB and more at once.
        theirs.send_bytes(protocol.encode(message))
        data += os.read(ours.fileno(), 2**20)
    while data:
        size = rng.choice((1, 2, 3, 5, 100, len(data)))
        got += list(frames.push(data[:size]))
        data = data[size:]
    assert got == sent


def test_what_is_no_message_is_an_error_and_those_before_it_are_heard() -> None:
    beat = protocol.encode(protocol.Heartbeat(7))
    whole = len(beat).to_bytes(4, "big") + beat
    heard = []
    with pytest.raises(msgspec.MsgspecError):
        for message in Frames().push(whole + (3).to_bytes(4, "big") + b"???"):
            heard.append(message)
    assert heard == [protocol.Heartbeat(7)]


@pytest.mark.parametrize("length", [-1, -(2**31), protocol.MAX_FRAME_BYTES + 1])
def test_a_message_is_refused_by_its_length_before_it_comes(length: int) -> None:
    with pytest.raises(ValueError, match="a message of"):
        list(Frames().push(length.to_bytes(4, "big", signed=True)))


@pytest.fixture
def started(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[
    Callable[[str], tuple[EngineProcess, asyncio.Future[int], list[protocol.FromEngine]]]
]:
    """Starts a process that runs a line of Python in place of an engine; `pipe` is its end of the
    pipe.
    """
    processes: list[EngineProcess] = []

    def start(line: str) -> tuple[EngineProcess, asyncio.Future[int], list[protocol.FromEngine]]:
        code = (
            "import sys, time; from multiprocessing.connection import Connection; pipe = "
            f"Connection(int(sys.argv[1])); {line}"
        )
        popen = subprocess.Popen
        patched = lambda command, **named: popen([sys.executable, "-c", code, command[-3]], **named)  # noqa: E731
        monkeypatch.setattr("server.supervision.transport.subprocess.Popen", patched)
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        heard: list[protocol.FromEngine] = []
        with socket.socket() as channel:
            holder = EngineHolder(protocol.Shutdown(), channel)  # type: ignore[arg-type]
        processes.append(EngineProcess(holder))
        processes[-1].listen(heard.append, ended.set_result)
        return processes[-1], ended, heard

    yield start
    for process in processes:
        process.kill()


async def test_everything_is_heard_before_the_exit(started: Any) -> None:
    beat = protocol.encode(protocol.Heartbeat(7))
    _, ended, heard = started(f"[pipe.send_bytes({beat!r}) for _ in range(5000)]; sys.exit(3)")
    assert await asyncio.wait_for(ended, 20) == 3 and heard == [protocol.Heartbeat(7)] * 5000


@pytest.mark.parametrize(
    "line", ["pipe.send_bytes(b'???'); time.sleep(60)", "pipe.close(); time.sleep(60)"]
)
async def test_what_speaks_no_more_is_ended(started: Any, line: str) -> None:
    process, ended, heard = started(line)
    process.send(protocol.Cancel(1))
    assert await asyncio.wait_for(ended, 20) == -9 and heard == []


async def test_a_message_that_cannot_be_written_ends_the_engine_and_is_heard_of(
    started: Any,
) -> None:
    process, ended, _ = started("time.sleep(60)")
    process.send(object())
    assert await asyncio.wait_for(ended, 20) == -9


async def test_a_listener_that_fails_loses_one_message(started: Any) -> None:
    beat = protocol.encode(protocol.Heartbeat(7))
    process, ended, _ = started(f"time.sleep(0.3); [pipe.send_bytes({beat!r}) for _ in range(3)]")
    calls = []

    def fails_once(message: protocol.FromEngine) -> None:
        calls.append(message)
        if len(calls) == 1:
            raise RuntimeError("a fault of the test's")

    process._on_message = fails_once
    assert await asyncio.wait_for(ended, 20) == 0 and len(calls) == 3
