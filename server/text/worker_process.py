"""The worker processes' side: a process that has read the checkpoint's texts once, and forks a child for each job.

The parent sends one end of a socket pair for each job; the child answers with its process id, receives the job, sends the outcome and ends.
A child shares the memory of what was read, and can be killed at any point without harm to another job. Invariant: the forking process has
a single thread, and runs nothing whose cost depends on a request. It knows no clients, queues or time limits.
"""

import contextlib
import hashlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from model.spec import CheckpointError
from server import child_process
from server.errors import ConfigurationError, InvalidRequest
from server.text.codec import TextCodec
from server.text.jobs import AnyJob, Texts

JOB_MEMORY = 128 * 2**20
"""Bytes that a job may allocate."""
LOAD_MEMORY, LOAD_SECONDS = 2**29, 3
"""Bytes and seconds of processor time for compiling and trying the chat template."""
JOB_NICE = 5
LENGTH_BYTES = 4


class Start(msgspec.Struct, frozen=True):
    """The first message, from the parent: the checkpoint's folder, and server.open_objects."""

    folder: str
    open_objects: bool


class Loaded(msgspec.Struct, frozen=True):
    """The answer: why the checkpoint is refused, or empty; whether short conversations may be rendered in the API process; and a digest
    of what was read.
    """

    error: str = ""
    cheap_template: bool = False
    digest: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """What came of a job: its result in msgpack, or a refusal, or the type of an unexpected error."""

    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    refusal: str = ""
    param: str | None = None
    code: str | None = None
    failure: str = ""


def frame(message: Any) -> bytes:
    """A message with its length, as both sides send it."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def limit_memory(num_bytes: int) -> None:
    """Lets this process allocate so many more bytes; Linux only."""
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        most = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def outcome(job: AnyJob, texts: Texts) -> Outcome:
    """Carries out a job."""
    try:
        return Outcome(msgspec.Raw(msgspec.msgpack.encode(job.run(texts))))
    except InvalidRequest as error:
        return Outcome(refusal=error.message, param=error.param, code=error.code)
    except BaseException as error:  # Panics of libraries are not Exceptions.
        return Outcome(failure=type(error).__name__)


def _fork(work: Callable[[], None], memory: int) -> int:
    """Runs `work` in a child process with limits, which ends without returning."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        child_process.end_with_parent(parent)
        os.nice(JOB_NICE)
        limit_memory(memory)
        work()
    finally:
        os._exit(0)


def _run_job(channel: socket.socket, texts: Texts) -> None:
    # Libraries write about memory that they lack to standard error, in words of their own.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with channel, channel.makefile("rwb") as stream:
        stream.write(os.getpid().to_bytes(LENGTH_BYTES, "big"))
        stream.flush()
        length = int.from_bytes(stream.read(LENGTH_BYTES), "big")
        job: AnyJob = msgspec.msgpack.decode(stream.read(length), type=AnyJob)
        stream.write(frame(outcome(job, texts)))


def _try_template(texts: Texts) -> bool:
    """Compiles the chat template and renders conversations in a child process. Returns whether that was cheap. Raises ConfigurationError
    if it cannot be compiled within the limits.
    """
    if not texts.chat_template.exists:
        return True
    reader, writer = os.pipe()

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (LOAD_SECONDS, LOAD_SECONDS))
        try:
            _ = texts.chat_template.compiled
        except ConfigurationError as error:
            os.write(writer, f"refused {error}".encode(errors="replace"))
            return
        os.write(writer, b"compiled ")
        os.write(writer, b"cheap" if texts.chat_template.trial() else b"")

    child = _fork(work, LOAD_MEMORY)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode()
    os.waitpid(child, 0)
    if not said.startswith("compiled"):
        bound = f"{LOAD_SECONDS} s or {LOAD_MEMORY >> 20} MiB"
        reason = f"{texts.codec.files.chat_template_place}: the chat template takes more than {bound} to compile"
        raise ConfigurationError(said.removeprefix("refused ") or reason)
    # Children find it compiled. Within the limit, as before: Jinja computes constants only where there is memory for them.
    limit_memory(LOAD_MEMORY)
    _ = texts.chat_template.compiled
    return said.endswith("cheap")


def load(start: Start) -> tuple[Texts, bool]:
    """Reads the checkpoint's texts. Raises ConfigurationError."""
    texts = Texts(TextCodec(Path(start.folder)), start.open_objects)
    _ = texts.compiler  # Read here once.
    return texts, _try_template(texts)


def _reap() -> None:
    """Forgets the children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Entry point: ends where the parent has ended, and where the system has no process to fork, after which it is started again."""
    with contextlib.suppress(ConnectionError, BlockingIOError):
        _serve()


def _serve() -> NoReturn:
    """Receives Start, answers Loaded, then forks a child for each socket received, until the parent closes its end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The parent handles signals sent to the process group: it drains first.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=int(sys.argv[1])) as control:
        start = msgspec.msgpack.decode(control.recv(2**16), type=Start)
        try:
            texts, cheap = load(start)
        except (CheckpointError, ConfigurationError) as error:
            control.send(msgspec.msgpack.encode(Loaded(error=str(error)[:4096])))
            sys.exit(0)
        files = texts.codec.path.read_bytes() + (texts.codec.files.chat_template or "").encode(errors="replace")
        control.send(msgspec.msgpack.encode(Loaded("", cheap, hashlib.sha256(files).hexdigest())))
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                sys.exit(0)
            _reap()
            with socket.socket(fileno=descriptors[0]) as channel:
                _fork(lambda: _run_job(channel, texts), JOB_MEMORY)


if __name__ == "__main__":
    main()
