"""Workers: runs jobs in worker processes, with limits of time and memory, in turns for all clients.

Each job gets a process of its own, forked from one that has read the checkpoint's texts (server.text.worker_process); a job over a limit
is killed. Invariant: no job can delay or end another one of another client by more than its turn, and no process outlives its job or this
process. It does not know what jobs compute.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from typing import Any

import msgspec

from server.child_process import WORKING_DIRECTORY, child_command
from server.errors import InvalidRequest, Overloaded, Unavailable
from server.text.job_queue import QUANTUM, RETRY_SECONDS, JobQueue, Ticket
from server.text.jobs import AnyJob
from server.text.worker_process import JOB_MEMORY, LENGTH_BYTES, Loaded, Outcome, Start, frame

log = logging.getLogger("onehead.workers")

WORKER_MODULE = "server.text.worker_process"
SLOW_NICE = 15
FORK_SECONDS = 10.0
"""Seconds after which a forking process that does not answer is replaced."""
MAX_NOT_FORKED, FORK_PAUSE = 2, 0.1
"""Times that a job is tried again because no process was forked for it, and the seconds before the first of them."""
LOAD_SECONDS = 120.0
"""Seconds that it may take to read the checkpoint's texts."""
WAIT_FACTOR = 4
"""A job that has not ended after so many times its limit of processor time, because it waited, is refused as overload."""


_MEMORY = f"{JOB_MEMORY >> 20} MiB of memory"


class _Lost(Exception):
    """The process of a job ended without an outcome."""


class _NotForked(_Lost):
    """No process was forked for a job."""


class _Forker:
    """The process that forks. `loaded` is its answer when it has read the checkpoint's texts."""

    def __init__(self, start: Start) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = child_command(WORKER_MODULE, str(theirs.fileno()))
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=null, stdout=null, process_group=0, cwd=WORKING_DIRECTORY
            )
        self._control.setblocking(False)
        self._control.send(msgspec.msgpack.encode(start))
        self.loaded: asyncio.Task[Loaded] = asyncio.create_task(self._load())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def _load(self) -> Loaded:
        async with asyncio.timeout(LOAD_SECONDS):
            data = await asyncio.get_running_loop().sock_recv(self._control, 2**16)
        if not data:
            raise BrokenPipeError
        return msgspec.msgpack.decode(data, type=Loaded)

    def fork(self, channel: socket.socket) -> None:
        """Has a child forked that receives a job by `channel`. Raises OSError."""
        socket.send_fds(self._control, [b"."], [channel.fileno()])

    def close(self) -> None:
        """Ends the process and its children."""
        self.loaded.cancel()
        self._control.close()
        self._process.kill()
        self._process.wait()


class Workers:
    """The worker processes of one server. `quick`, `slow`: jobs that run at once in each lane of the queue."""

    def __init__(self, start: Start, quick: int = 2, slow: int = 1) -> None:
        self._start = start
        self._forker: _Forker | None = None
        self._digest = ""
        """Of the texts of the first process that forks; another must have read the same."""
        self._queue = JobQueue(quick, slow)
        self._turns: dict[Ticket, asyncio.Event] = {}

    def start(self) -> None:
        """Starts the process that forks, if it does not run. Raises OSError."""
        if self._forker is not None and not self._forker.alive:
            log.warning("the process that forks workers ended; it is started again")
            self.close()
        self._forker = self._forker or _Forker(self._start)

    async def loaded(self) -> Loaded:
        """Waits until the checkpoint's texts have been read. Raises Unavailable if there is no process that reads them."""
        try:
            self.start()
            assert self._forker is not None
            await asyncio.wait([loading := self._forker.loaded])
            if not loading.cancelled():
                return loading.result()
        except (OSError, TimeoutError):
            log.warning("no worker process could be started")
        self.close()
        raise _unavailable()

    def close(self) -> None:
        """Ends all processes."""
        if self._forker is not None:
            self._forker.close()
            self._forker = None

    async def run(self, job: AnyJob, client: str, seconds: float) -> Any:
        """The result of a job. Raises InvalidRequest if it refuses, or takes more than `seconds` of processor time or too much
        memory; Overloaded or Unavailable if it could not be done for other reasons.
        """
        await self.loaded()
        ticket = self._queue.add(client, job.num_chars)
        self._turns[ticket] = asyncio.Event()
        try:
            async with asyncio.timeout(WAIT_FACTOR * seconds):
                outcome = await self._outcome(ticket, job, seconds)
        except TimeoutError:
            text = "too many texts and grammars are being processed; try again later"
            raise Overloaded(text, max(1, round(seconds)), code="too_many_jobs") from None
        finally:
            del self._turns[ticket]
            self._queue.remove(ticket)
            self._pass_turns()
        if outcome.refusal:
            raise InvalidRequest(outcome.refusal, param=outcome.param, code=outcome.code)
        if outcome.failure == "MemoryError":
            raise job.refusal(_MEMORY)
        if outcome.failure:
            raise RuntimeError(f"a {type(job).__name__} job failed with {outcome.failure}")
        return msgspec.msgpack.decode(outcome.result, type=job.Result)

    def _pass_turns(self) -> None:
        for ticket in self._queue.start():
            self._turns[ticket].set()

    async def _outcome(self, ticket: Ticket, job: AnyJob, seconds: float) -> Outcome:
        """Runs a job in its turns. One whose process was lost is begun again once."""
        losses = 0
        while True:
            self._pass_turns()
            await self._turns[ticket].wait()
            try:
                outcome = await self._attempt(ticket, job, seconds)
                if outcome is not None:
                    return outcome
                self._turns[ticket].clear()
            except _NotForked:
                losses += 1
                if losses > MAX_NOT_FORKED:
                    raise _unavailable() from None
                # A process that is ending closes its sockets a little before its end can be seen.
                await asyncio.sleep(FORK_PAUSE * losses)
            except _Lost:
                losses += 1
                if losses > 1:  # What allocates too much is ended by its library, without an outcome.
                    raise job.refusal(_MEMORY) from None

    async def _attempt(self, ticket: Ticket, job: AnyJob, seconds: float) -> Outcome | None:
        """Runs a job in a child process; None if it lost its place to another job."""
        loaded = await self.loaded()
        self._digest = self._digest or loaded.digest
        if loaded.error or loaded.digest != self._digest:  # The files have changed since the start.
            log.error("workers cannot be started: %s", loaded.error or "the tokenizer or the chat template is another one now")
            self.close()
        if self._forker is None:
            raise _unavailable()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._forker.fork(theirs)
            except OSError:
                ours.close()
                raise _NotForked from None
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            pid = await self._child(reader)
            writer.write(frame(job))
            reading = asyncio.create_task(_read_outcome(reader))
            try:
                return await self._watched(ticket, reading, pid, seconds, job)
            finally:
                if not reading.done():
                    reading.cancel()
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
        finally:
            writer.close()

    async def _child(self, reader: asyncio.StreamReader) -> int:
        """The process id of a forked child. Raises _NotForked."""
        try:
            async with asyncio.timeout(FORK_SECONDS):
                return int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        except TimeoutError:
            log.warning("the process that forks workers does not answer; it is replaced")
            self.close()
            raise _NotForked from None
        except (OSError, EOFError):
            raise _NotForked from None

    async def _watched(self, ticket: Ticket, reading: asyncio.Task[Outcome], pid: int, seconds: float, job: AnyJob) -> Outcome | None:
        """The outcome of a job that runs in process `pid`, if it comes within its time. The caller kills the process if not."""
        while not reading.done():
            limit = seconds if self._queue.is_slow(ticket) else min(QUANTUM, seconds)
            left = limit - _processor_seconds(pid)
            if left > 0:
                await asyncio.wait([reading], timeout=max(left, 0.01))
            elif limit >= seconds:
                raise job.refusal(f"{seconds:g} s of processor time (server.{job.option})")
            else:
                self._queue.slow_down(ticket)
                self._pass_turns()
                if not ticket.running:
                    return None
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, pid, SLOW_NICE)
        return reading.result()


async def _read_outcome(reader: asyncio.StreamReader) -> Outcome:
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
        return msgspec.msgpack.decode(await reader.readexactly(length), type=Outcome)
    except (OSError, EOFError):
        raise _Lost from None


def _processor_seconds(pid: int) -> float:
    """Processor time that a process has used; 0 if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # Linux's clock of a process, as clock_getcpuclockid gives it.
    except OSError:
        return 0.0


def _unavailable() -> Unavailable:
    return Unavailable("no worker process can be started; try again later", RETRY_SECONDS)
