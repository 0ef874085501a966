"""The holder: the process that has loaded an engine, and forks every engine that serves from it.

It computes nothing itself, so each engine finds the weights, torch and the scheduler as they were
when they had been loaded, and shares their memory until it writes to it: what an engine wrote
before it died has changed nothing here. A descriptor that arrives over `control` is the pipe of the
next engine; the exit status of each is sent back. Invariant: one engine at a time; one that has
ended stays a zombie until the next one is there, so that its process id belongs to no other
process while the API process may still signal it. It knows no messages of the protocol.
"""

import ctypes
import os
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

from server import child_process
from server.protocol import STATUS_BYTES

OMP_PAUSE_HARD = 2
"""OpenMP 5.0's argument that frees all that OpenMP holds."""
_Loaded = TypeVar("_Loaded")


def in_a_thread(load: Callable[[], _Loaded]) -> _Loaded:
    """What `load` returns or raises, called in a thread that has ended when this returns, and with
    it the threads of its OpenMP team.

    OpenMP keeps a team for each thread that has computed in parallel. The thread that forks must
    have none: its copy in the child would wait for threads that only the parent has. A team that is
    still ending may hold a lock of the libraries, which no thread of the child would release.
    """
    with ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(load).result()
        finally:
            pool.submit(_end_team).result()


def _end_team() -> None:
    with suppress(OSError, AttributeError):  # Another OpenMP than GNU's.
        ctypes.CDLL("libgomp.so.1").omp_pause_resource_all(OMP_PAUSE_HARD)


def hold(
    control: socket.socket,
    pipe: Connection,
    serve: Callable[[Connection], None],
    *descriptors: int,
) -> None:
    """Forks an engine that serves on `pipe`, and after its end another one for each pipe that
    arrives over `control`, until that is closed. Engines keep `descriptors`. Where the system has
    no process or memory for a fork, this process becomes the engine.
    """
    dead = 0
    while True:
        try:
            pid = child_process.fork(partial(_serve, serve, pipe), pipe.fileno(), *descriptors)
        except OSError:
            return serve(pipe)
        pipe.close()
        if dead:
            os.waitpid(dead, 0)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        control.send(status.to_bytes(STATUS_BYTES, "big", signed=True))
        _, received, _, _ = socket.recv_fds(control, STATUS_BYTES, 1)
        if not received:
            return None
        dead, pipe = pid, Connection(received[0])


def _serve(serve: Callable[[Connection], None], pipe: Connection) -> None:
    """In a forked engine. Another thread may have held the lock of standard error's buffer when it
    was forked, so it has one of its own.
    """
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        serve(pipe)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
