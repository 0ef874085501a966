"""The process that forks a process for each constraint, which follows it and computes its masks.

`python -m server.engine.mask_process FD TOKENIZER ENDS`: a descriptor that arrives over the socket FD is one end of the pipe of a new
process. Invariant: a mask that takes more than MASK_SECONDS of processor time, or memory beyond MEMORY_BYTES, ends its own process alone;
all of them yield the processors to the engine and end with it. It knows nothing of sequences.
"""

import contextlib
import fcntl
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from server.child_process import end_with_parent
from server.engine.grammar import Grammars
from server.engine.masks import SLOW_SECONDS, Advance, Answer, Begin, decode_request, encode
from server.engine.sequence import ConstraintFailed, Guidance

MASK_SECONDS = 4.0
MEMORY_BYTES = 256 * 2**20
NICENESS = 19


def limit_mask() -> None:
    """Ends this process if the next mask takes more than MASK_SECONDS of processor time, by the default action of SIGPROF."""
    signal.setitimer(signal.ITIMER_PROF, MASK_SECONDS)


def follow(pipe: Connection, grammars: Grammars) -> None:
    """Answers requests until the pipe is closed."""
    constraint: Any = None
    flags = fcntl.fcntl(pipe.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(pipe.fileno(), fcntl.F_SETOWN, os.getpid())
    while True:
        request = decode_request(pipe.recv_bytes())
        # The engine sends nothing while it waits for an answer. If it closes the pipe, SIGIO ends this process amid the computation.
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETFL, flags | os.O_ASYNC)
        began = time.process_time()
        try:
            if isinstance(request, Begin):
                constraint = grammars.constraint(request)
            else:
                constraint.advance(request.token)
            answer = Answer(Guidance(constraint.mask, constraint.forced), time.process_time() - began)
        except ConstraintFailed as error:
            answer = Answer(None, failure=str(error), refused=True)
        except BaseException:  # A panic of a Rust library is not an Exception.
            answer = Answer(None, failure=traceback.format_exc())
        fcntl.fcntl(pipe.fileno(), fcntl.F_SETFL, flags)
        pipe.send_bytes(encode(answer))
        if answer.seconds > SLOW_SECONDS and isinstance(request, Advance) and sys.platform == "linux":
            # Runs from now on only where a processor is idle, so that any number of slow constraints takes nothing from the others.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def run(descriptor: int, grammars: Grammars, parent: int, memory: int) -> None:
    """The life of a process for one constraint, or for several in turn."""
    end_with_parent(parent)
    if sys.platform == "linux":  # Elsewhere the limit is not supported.
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, OSError):  # The engine has no more use for this process.
        follow(Connection(descriptor), grammars)


def serve(channel: socket.socket, grammars: Grammars) -> None:
    """Forks a process for each descriptor that arrives. Returns when the channel is closed."""
    parent, memory = os.getpid(), MEMORY_BYTES + _address_space()
    while descriptors := socket.recv_fds(channel, 4, 1)[1]:
        while True:
            try:
                is_child = os.fork() == 0
                break
            except OSError:  # No more tasks are allowed for the moment.
                time.sleep(0.1)
        if is_child:
            try:
                channel.close()
                run(descriptors[0], grammars, parent, memory)
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _address_space() -> int:
    """The address space of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0


def main() -> None:
    """Entry point: reads the tokenizer, says ready or what is wrong with it, then serves."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The engine's process group gets signals that are meant for the API process.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Ended children need no wait.
    channel = socket.socket(fileno=int(sys.argv[1]))
    try:
        grammars = Grammars(Path(sys.argv[2]), json.loads(sys.argv[3]), limit_mask)
        _ = grammars.tokenizer
    except ValueError as error:
        channel.send(str(error).encode())
        return
    os.nice(NICENESS)
    gc.freeze()  # Collections in the forked processes would copy the pages that they share.
    channel.send(b"ready")
    serve(channel, grammars)


if __name__ == "__main__":
    main()
