"""The holder forks one engine after another, each as it was loaded, and says how each ended."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from server import child_process
from server.engine.holder import hold, in_a_thread
from server.protocol import STATUS_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are forked on Linux")


def serve(pipe: Connection) -> None:
    """Answers with how often it was asked; ends as it is told to."""
    count.append(1)
    pipe.send((os.getpid(), len(count)))
    os._exit(pipe.recv())


count: list[int] = []


class Holder:
    """A holder in a process of its own."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pipe, first = Pipe()
        self.pid = os.fork()
        if not self.pid:
            self.control.close()
            hold(theirs, first, serve)
            os._exit(7)
        theirs.close()
        first.close()

    def next(self) -> None:
        self.pipe.close()
        self.pipe, theirs = Pipe()
        with theirs:
            socket.send_fds(self.control, [b"next"], [theirs.fileno()])

    def status(self) -> int:
        return int.from_bytes(self.control.recv(STATUS_BYTES), "big", signed=True)


@pytest.fixture
def holder() -> Iterator[Holder]:
    held = Holder()
    yield held
    held.control.close()
    assert os.waitstatus_to_exitcode(os.waitpid(held.pid, 0)[1]) == 7


def test_each_engine_begins_as_the_first_and_its_end_is_told(holder: Holder) -> None:
    pids = set()
    for ends in (0, 3, signal.SIGKILL, signal.SIGSEGV, 1):
        pid, times_served = holder.pipe.recv()
        pids.add(pid)
        assert times_served == 1
        if isinstance(ends, signal.Signals):
            os.kill(pid, ends)
            assert holder.status() == -ends
        else:
            holder.pipe.send(ends)
            assert holder.status() == ends
        os.kill(pid, 0)  # A zombie: its process id is nobody else's.
        holder.next()
    assert len(pids) == 5
    holder.pipe.recv()
    holder.pipe.send(0)
    assert holder.status() == 0


def test_where_nothing_can_be_forked_the_holder_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError

    monkeypatch.setattr(child_process, "fork", refuse)
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, pipe = Pipe()
    with control, theirs, ours, pipe:
        hold(theirs, pipe, lambda pipe: pipe.send("served"))
        assert ours.recv() == "served"


def test_what_is_loaded_in_a_thread_leaves_no_thread_of_openmp() -> None:
    """A product in parallel here, and then in a fork of this thread, which would wait for ever for
    a team that it does not have.
    """
    program = (
        "import os, sys, torch; from server.engine.holder import in_a_thread\n"
        "def product():\n"
        "    torch.set_num_threads(2)\n"
        "    return float((torch.ones(700, 700) @ torch.ones(700, 700)).exp().log().sum())\n"
        "expected = in_a_thread(product)\n"
        "for _ in range(20):\n"
        "    pid = os.fork()\n"
        "    if not pid: os._exit(product() != expected)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


def test_a_failure_in_the_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        in_a_thread(lambda: 1 // 0)
