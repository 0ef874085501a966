"""Workers: runs jobs in worker processes, with limits of time and memory, in turns for all clients.

Each job gets a process of its own, forked from one that has the checkpoint's texts
(server.text.worker_process); a job over a limit is killed. Invariant: no job can delay or end
another one of another client by more than its turn, and no process outlives its job or this
process. It does not know what jobs compute.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from typing import Any

import msgspec

from server import child_process
from server.errors import InvalidRequest, Overloaded, Unavailable
from server.text import worker_process
from server.text.job_queue import QUANTUM, RETRY_SECONDS, JobQueue, Ticket
from server.text.jobs import AnyJob, Texts
from server.text.worker_process import JOB, JOB_MEMORY, LENGTH_BYTES, Loaded, Outcome

log = logging.getLogger("onehead.workers")

SLOW_NICE = 15
FORK_SECONDS = 10.0
"""Seconds after which a forking process that does not answer is replaced."""
MAX_NOT_FORKED, FORK_PAUSE = 2, 0.1
"""Times that a job is tried again because no process was forked for it, and the seconds before the
first of them."""
LOAD_SECONDS = 120.0
"""Seconds that it may take to try the chat template."""
WAIT_FACTOR = 4
"""A job that has not ended after so many times its limit of processor time, because it waited, is
refused as overload."""


_MEMORY = f"{JOB_MEMORY >> 20} MiB of memory"


class _Lost(Exception):
    """The process of a job ended without an outcome."""


class _NotForked(_Lost):
    """No process was forked for a job."""


class Workers:
    """The worker processes of one server, with the process that forks them. `quick`, `slow`: jobs
    that run at once in each lane of the queue.
    """

    def __init__(self, quick: int = 2, slow: int = 1) -> None:
        # This process holds both ends of each, so that what was sent waits while the process that
        # receives it is replaced.
        self._channels = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)
        ]
        self._said, self._jobs, self.grammars = (ours for ours, _ in self._channels)
        self._said.setblocking(False)
        self._texts: Texts | None = None
        self._forker: int | None = None
        """The process id of the forking process; None while there is none. No other process can
        have it before it has been waited for here.
        """
        self._queue = JobQueue(quick, slow)
        self._turns: dict[Ticket, asyncio.Event] = {}

    def start(self, texts: Texts) -> None:
        """Forks the process that forks the others. Raises OSError."""
        self._texts = texts
        self.keep_running()

    def keep_running(self) -> None:
        """Replaces the forking process if it has ended. Raises OSError."""
        assert self._texts is not None, "start was called"
        before = self._forker
        if self._has_ended():
            if before is not None:
                log.warning("the process that forks workers ended; it is replaced")
            texts, ends = self._texts, [theirs for _, theirs in self._channels]
            try:
                self._forker = child_process.fork(
                    lambda: worker_process.run(texts, *ends), *(end.fileno() for end in ends)
                )
            except OSError as error:
                if before is not None:
                    log.error(
                        "no process can be forked, so long texts and grammars are refused: %s",
                        error.strerror,
                    )
                raise

    def _has_ended(self, options: int = os.WNOHANG) -> bool:
        """Whether there is no forking process; forgets one that has ended."""
        if self._forker is not None:
            try:
                ended = os.waitpid(self._forker, options)[0] != 0
            except ChildProcessError:
                # Where SIGCHLD is ignored, nothing is left of a process that has ended.
                ended = True
            if ended:
                self._forker = None
        return self._forker is None

    def _kill(self) -> None:
        """Kills the forking process, if there is one."""
        if not self._has_ended() and self._forker is not None:
            os.kill(self._forker, signal.SIGKILL)

    async def loaded(self) -> Loaded:
        """The first message of the first forking process. Raises Unavailable if none arrives within
        LOAD_SECONDS.
        """
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                return msgspec.msgpack.decode(
                    await asyncio.get_running_loop().sock_recv(self._said, 2**16), type=Loaded
                )
        except TimeoutError:
            raise _unavailable() from None

    def close(self) -> None:
        """Ends all processes."""
        self._kill()
        self._has_ended(0)
        for end in itertools.chain(*self._channels):
            end.close()

    async def run(self, job: AnyJob, client: str) -> Any:
        """The result of a job. Raises InvalidRequest if it refuses, or takes more than its limit of
        processor time or too much memory; Overloaded or Unavailable if it could not be done for
        other reasons.
        """
        ticket = self._queue.add(client, job.num_chars)
        self._turns[ticket] = asyncio.Event()
        try:
            async with asyncio.timeout(WAIT_FACTOR * job.max_seconds):
                outcome = await self._outcome(ticket, job)
        except TimeoutError:
            text = "too many texts and grammars are being processed; try again later"
            raise Overloaded(text, max(1, round(job.max_seconds)), code="too_many_jobs") from None
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

    async def _outcome(self, ticket: Ticket, job: AnyJob) -> Outcome:
        """Runs a job in its turns. One whose process was lost is begun again once."""
        losses = 0
        while True:
            self._pass_turns()
            await self._turns[ticket].wait()
            try:
                outcome = await self._attempt(ticket, job)
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
                # What allocates too much is ended by its library, without an outcome.
                if losses > 1:
                    raise job.refusal(_MEMORY) from None

    async def _attempt(self, ticket: Ticket, job: AnyJob) -> Outcome | None:
        """Runs a job in a child process; None if it lost its place to another job."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.keep_running()
                channel = self.grammars if job.needs_grammars else self._jobs
                socket.send_fds(channel, [JOB], [theirs.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                ours.close()
                raise _NotForked from None
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            pid = await self._child(reader)
            data = msgspec.msgpack.encode(job)
            writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
            reading = asyncio.create_task(_read_outcome(reader))
            try:
                return await self._watched(ticket, reading, pid, job)
            finally:
                reading.cancel()
        finally:
            # Which ends a process that still computes (child_process.ended_by_close). It is not
            # killed by its id: that may be another process's by now.
            writer.transport.abort()

    async def _child(self, reader: asyncio.StreamReader) -> int:
        """The process id of a forked child. A forking process that ends meanwhile is replaced: what
        was sent to it waits for the next one. Raises _NotForked.
        """
        reading = asyncio.create_task(reader.readexactly(LENGTH_BYTES))
        try:
            async with asyncio.timeout(FORK_SECONDS):
                while not (await asyncio.wait([reading], timeout=FORK_PAUSE))[0]:
                    self.keep_running()
                return int.from_bytes(reading.result(), "big")
        except TimeoutError:
            log.warning("the process that forks workers does not answer; it is replaced")
            self._kill()
            raise _NotForked from None
        except (OSError, EOFError):
            raise _NotForked from None
        finally:
            reading.cancel()

    async def _watched(
        self, ticket: Ticket, reading: asyncio.Task[Outcome], pid: int, job: AnyJob
    ) -> Outcome | None:
        """The outcome of a job that runs in process `pid`, if it comes within its time. The caller
        ends the process if not.
        """
        while not reading.done():
            limit = job.max_seconds if self._queue.is_slow(ticket) else QUANTUM
            left = limit - _processor_seconds(pid)
            if left > 0:
                await asyncio.wait([reading], timeout=max(left, 0.01))
            elif limit >= job.max_seconds:
                raise job.refusal(f"{job.max_seconds:g} s of processor time")
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
        # Linux's clock of a process, as clock_getcpuclockid gives it.
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def _unavailable() -> Unavailable:
    return Unavailable("no worker process can be started; try again later", RETRY_SECONDS)
