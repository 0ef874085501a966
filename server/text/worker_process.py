"""The forking process: it has a checkpoint's texts, and forks a child for each job, and for each
constraint that the engine follows.

Requests for children arrive over two channels, each as one descriptor: `jobs`, and `grammars` for
children that need the tokenizer of grammars. That takes seconds and as much memory as the texts, so
a process of its own prepares it at the first such request, and forks these children. A job's child
answers with its process id, receives the job over its descriptor, sends the outcome and ends; a
constraint's is server.text.mask_process. Children share the memory of what was read, and can be
killed at any point without harm to another. The forking process is a copy of the API process, which
has read the texts, and reads no files. Invariant: it has a single thread, and runs nothing whose
cost depends on a request. It knows no clients, queues or time limits.
"""

import contextlib
import gc
import logging
import os
import resource
import select
import socket
import time
from multiprocessing.connection import Connection

import msgspec

from server import child_process
from server.errors import ConfigurationError, InvalidRequest
from server.protocol import FOLLOW
from server.text.jobs import AnyJob, Texts

JOB, MESSAGE_BYTES = b"job", 8
"""What comes with the descriptor of a job, and more than the length of that or of
server.protocol.FOLLOW."""
JOB_MEMORY, CONSTRAINT_MEMORY = 128 * 2**20, 256 * 2**20
"""Bytes that a job, and a process that follows constraints, may allocate."""
LOAD_MEMORY, LOAD_SECONDS = 2**29, 3
"""Bytes and seconds of processor time for compiling and trying the chat template."""
GRAMMARS_MEMORY, GRAMMARS_SECONDS = 2**30, 20
"""The same for preparing the tokenizer of grammars: 2 s and 300 MB for a vocabulary of 262,144
tokens."""
MAX_PREPARED = 3
"""Times that this is begun without success before structured output is refused."""
JOB_NICE, CONSTRAINT_NICE = 10, 19
FORK_ATTEMPTS, FORK_PAUSE = 10, 0.1
"""Attempts to fork a child where the system has no process for it, and the seconds between them."""
LENGTH_BYTES = 4
"""Of a process id, and of the length that multiprocessing writes before a message."""


class Loaded(msgspec.Struct, frozen=True):
    """The first message of the forking process: why the chat template is refused, or empty; whether
    short conversations may be rendered in the API process; and the variables that the template
    reads.
    """

    error: str = ""
    cheap_template: bool = False
    turn_end: int | None = None
    """ChatTemplate.turn_end."""
    variables: list[str] = []


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a job: its result in msgpack, or a refusal, or the type of an unexpected
    error.
    """

    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    refusal: str = ""
    param: str | None = None
    code: str | None = None
    failure: str = ""


def outcome(job: AnyJob, texts: Texts) -> Outcome:
    """Carries out a job."""
    try:
        return Outcome(msgspec.Raw(msgspec.msgpack.encode(job.run(texts))))
    except InvalidRequest as error:
        return Outcome(refusal=error.message, param=error.param, code=error.code)
    except BaseException as error:  # Panics of libraries are not Exceptions.
        return Outcome(failure=type(error).__name__)


def _run_job(descriptor: int, texts: Texts) -> None:
    os.nice(JOB_NICE)
    # Libraries write about memory that they lack to standard error, in words of their own.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with Connection(descriptor) as pipe:
        os.write(descriptor, os.getpid().to_bytes(LENGTH_BYTES, "big"))
        job: AnyJob = msgspec.msgpack.decode(pipe.recv_bytes(), type=AnyJob)
        with child_process.ended_by_close(descriptor):
            done = outcome(job, texts)
        pipe.send_bytes(msgspec.msgpack.encode(done))


def _follow(descriptor: int, texts: Texts) -> None:
    from server.text.constraints import Grammars
    from server.text.mask_process import follow, limit_mask

    os.nice(CONSTRAINT_NICE)
    tokenizer = texts.compiler.tokenizer
    with contextlib.suppress(EOFError, OSError):
        follow(
            Connection(descriptor), None if tokenizer is None else Grammars(tokenizer, limit_mask)
        )


def _fork_child(channel: socket.socket, texts: Texts) -> None:
    """Forks the child that the next message of a channel asks for. Where the system has no process
    for it, that is said by closing its descriptor.
    """
    message, (descriptor, *_), _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
    work, memory = (_follow, CONSTRAINT_MEMORY) if message == FOLLOW else (_run_job, JOB_MEMORY)
    for _ in range(FORK_ATTEMPTS):
        try:
            child_process.fork(lambda: work(descriptor, texts), descriptor, most_bytes=memory)
            break
        except OSError:  # No more processes are allowed for the moment.
            time.sleep(FORK_PAUSE)
    os.close(descriptor)


class _GrammarProcess:
    """The process that forks children from the grammars' channel, while there is one."""

    def __init__(self, channel: socket.socket, texts: Texts) -> None:
        self._channel = channel
        self._texts = texts
        self._pipe: int | None = None
        """The process holds its other end, over which it says that the tokenizer is prepared."""
        self._num_failed = 0

    @property
    def awaited(self) -> int:
        """What becomes readable where there is something to do: the channel while there is no
        process, else the pipe.
        """
        return self._channel.fileno() if self._pipe is None else self._pipe

    def proceed(self) -> None:
        """Starts the process; or notes that it is prepared, or has ended."""
        if self._pipe is None:
            self._start()
        elif os.read(self._pipe, 1):
            self._num_failed = 0
        else:
            os.close(self._pipe)
            self._pipe = None

    def _start(self) -> None:
        self._pipe, pipe = os.pipe()
        self._num_failed += 1
        try:
            child_process.fork(lambda: self._serve(pipe), pipe, self._channel.fileno())
        except OSError:  # Its end is read from the pipe.
            time.sleep(FORK_PAUSE)
        os.close(pipe)

    def _serve(self, pipe: int) -> None:
        _prepare_grammars(self._texts, usable=self._num_failed <= MAX_PREPARED)
        os.write(pipe, b".")
        gc.freeze()
        while True:
            _fork_child(self._channel, self._texts)


def _prepare_grammars(texts: Texts, usable: bool) -> None:
    """Prepares the tokenizer of grammars, within limits that end this process. Where it is not
    usable, grammars are refused.
    """
    from server.text.grammar import GrammarCompiler

    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (GRAMMARS_SECONDS, hard))
    child_process.limit_memory(GRAMMARS_MEMORY)
    try:
        if usable:
            _ = texts.compiler
    except ValueError:
        usable = False
    if not usable:
        texts.compiler = GrammarCompiler(None)
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _try_template(texts: Texts) -> Loaded:
    """Compiles the chat template and renders conversations in a child process. Raises
    ConfigurationError if it cannot be compiled within the limits.
    """
    if not texts.chat_template.exists:
        return Loaded(cheap_template=True)
    reader, writer = os.pipe()

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (LOAD_SECONDS, LOAD_SECONDS))
        try:
            _ = texts.chat_template.variables
        except ConfigurationError as error:
            os.write(writer, f"refused {error}".encode(errors="replace"))
            return
        os.write(writer, b"compiled ")
        end = texts.chat_template.turn_end()
        os.write(writer, b"" if end is None else b"%d " % end)
        os.write(writer, b"cheap" if texts.chat_template.trial() else b"")

    child_process.fork(work, writer, most_bytes=LOAD_MEMORY)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode()
    if not said.startswith("compiled"):
        bound = f"{LOAD_SECONDS} s or {LOAD_MEMORY >> 20} MiB"
        reason = (
            f"{texts.codec.files.chat_template_place}: the chat template takes more than "
            f"{bound} to compile"
        )
        raise ConfigurationError(said.removeprefix("refused ") or reason)
    # Children find it compiled. Within the limit, as before: Jinja computes constants only where
    # there is memory for them.
    child_process.limit_memory(LOAD_MEMORY)
    variables = texts.chat_template.variables
    end = next((int(word) for word in said.split() if word.isdigit()), None)
    texts.codec.end_at(end)
    return Loaded(cheap_template=said.endswith("cheap"), turn_end=end, variables=variables)


def run(texts: Texts, control: socket.socket, jobs: socket.socket, grammars: socket.socket) -> None:
    """The life of the forking process: says Loaded over `control`, then forks children until it is
    ended.
    """
    # The API process's are written by a thread of it.
    logging.getLogger().handlers = [logging.NullHandler()]
    try:
        loaded = _try_template(texts)
    except ConfigurationError as error:
        loaded = Loaded(error=str(error)[:4096])
    with contextlib.suppress(BlockingIOError):  # Only the first one is read.
        control.send(msgspec.msgpack.encode(loaded), socket.MSG_DONTWAIT)
    gc.freeze()  # Collections in the forked processes would copy the pages that they share.
    grammar_process = _GrammarProcess(grammars, texts)
    while True:
        readable, _, _ = select.select([jobs.fileno(), grammar_process.awaited], [], [])
        if grammar_process.awaited in readable:
            grammar_process.proceed()
        if jobs.fileno() in readable:
            _fork_child(jobs, texts)
