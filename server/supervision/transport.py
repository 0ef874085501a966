"""EngineHolder starts the process that engines are forked from; EngineProcess sends and receives
the messages of an engine over a pipe.

The event loop reads. A thread writes, because writing to a stopped engine blocks; after the last
message it waits for the process to exit. Invariant: every message is delivered in order, then the
exit status, once. It knows nothing of requests.
"""

import asyncio
import contextlib
import errno
import logging
import os
import queue
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from server import protocol
from server.child_process import WORKING_DIRECTORY, child_command
from server.supervision.processors import engine_environment

log = logging.getLogger("onehead.supervisor")

EXIT_SECONDS = 1.0
"""Time for an engine that has closed its pipe to exit by itself; then it is killed."""
POLL_SECONDS = 0.01
"""Seconds from one look whether an engine has ended to the next."""
ENGINE_MODULE = "server.engine.worker"
NEXT = b"next"
"""What comes to the holder with the pipe of a new engine."""
FORK_SECONDS = 30.0
"""Time in which an engine has to be ready that is forked from one that was loaded; then it is
loaded again."""
READ_BYTES = 2**18
"""Bytes read before the event loop runs other tasks."""
_LENGTH = struct.Struct("!i")
"""The header that multiprocessing writes before a message of less than 2 GiB."""


class Frames:
    """Splits the byte stream of a multiprocessing pipe into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> Iterator[protocol.FromEngine]:
        """Adds bytes and yields the messages they complete. Raises MsgspecError for an invalid
        message, ValueError for one too long.
        """
        self._data += data
        begin = 0
        try:
            while len(self._data) >= begin + _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._data, begin)
                if not 0 <= length <= protocol.MAX_FRAME_BYTES:
                    raise ValueError(
                        f"a message of {length} bytes, at most {protocol.MAX_FRAME_BYTES} are "
                        "allowed"
                    )
                end = begin + _LENGTH.size + length
                if len(self._data) < end:
                    break
                frame = self._data[begin + _LENGTH.size : end]
                begin = end
                yield protocol.decode_from_engine(frame)
        finally:
            del self._data[:begin]


class EngineHolder:
    """The process that loads an engine, and forks one after another from itself; on a GPU it is the
    one engine itself. It is sent its Start at once. `grammars`: the channel over which an engine
    asks for processes that follow constraints. Raises OSError.
    """

    def __init__(self, start: protocol.Start, grammars: socket.socket) -> None:
        self._first: Connection | None
        self._first, pipe = Pipe()
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The child holds the only copies afterwards, so that they end when it does.
        with pipe, control:
            descriptors = pipe.fileno(), grammars.fileno(), control.fileno()
            # A process group of its own: Ctrl-C in a terminal must reach only this process, which
            # drains first.
            self.process = subprocess.Popen(
                child_command(ENGINE_MODULE, *map(str, descriptors)),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                process_group=0,
                cwd=WORKING_DIRECTORY,
                env=engine_environment(),
            )
        with contextlib.suppress(OSError):  # It has exited, which `listen` finds.
            self._first.send_bytes(protocol.encode(start))

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def has_loaded(self) -> bool:
        """Whether further engines are forked."""
        return self._first is None

    def engine(self) -> Connection:
        """The pipe to the engine that is being loaded or, if that was asked for before, to a new
        one. Raises OSError.
        """
        pipe, self._first = self._first, None
        if pipe is not None:
            return pipe
        ours, theirs = Pipe()
        with theirs:
            try:
                socket.send_fds(self._control, [NEXT], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def engine_status(self) -> int:
        """Waits until the engine has ended, and returns its exit status."""
        said = b""
        with contextlib.suppress(OSError):
            said = self._control.recv(protocol.STATUS_BYTES)
        if said:
            return int.from_bytes(said, "big", signed=True)
        self._control.close()
        return self.process.wait()

    def end(self) -> None:
        """Lets it end by itself, as it does without an engine."""
        self._control.close()

    def kill(self) -> None:
        """Ends it, and the engine with it."""
        self.process.kill()
        self.process.wait()


class EngineProcess:
    """An engine of a holder. Raises OSError."""

    def __init__(self, holder: EngineHolder) -> None:
        self._outbox: queue.SimpleQueue[protocol.ToEngine | None] = queue.SimpleQueue()
        self._frames = Frames()
        self._holder = holder
        self._is_forked = holder.has_loaded
        self._pipe = holder.engine()
        self._pid = 0
        """The engine's process id, once it is ready."""
        self._has_ended = False

    @property
    def pid(self) -> int:
        """The engine's process id; while it is loaded that of its holder."""
        return self._pid or self._holder.process.pid

    def listen(
        self, on_message: Callable[[protocol.FromEngine], None], on_exit: Callable[[int], None]
    ) -> None:
        """From now on `on_message` gets each message, then `on_exit` the exit status; both are
        called on the event loop. Raises OSError.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_exit = on_exit
        # A second descriptor for reading without blocking; the writing thread's own calls block.
        self._socket = socket.fromfd(self._pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            threading.Thread(target=self._write, daemon=True).start()
        except (
            RuntimeError
        ) as error:  # The thread limit is reached; reported like a process that cannot be spawned.
            self._holder.process.kill()
            raise OSError(errno.EAGAIN, "no thread can be started") from error
        self._loop.add_reader(self._socket, self._read)
        if self._is_forked:
            self._loop.call_later(FORK_SECONDS, self._end_if_not_ready)

    def end(self) -> None:
        """Ends an engine that is not listened to, and its holder."""
        self._pipe.close()
        self._holder.kill()

    def send(self, message: protocol.ToEngine) -> None:
        """Queues a message; never blocks. Messages to an engine that has exited are dropped."""
        self._outbox.put(message)

    def kill(self) -> None:
        """Sends SIGKILL; `on_exit` is called when the process has ended. One that is not ready ends
        with its holder.
        """
        if self._has_ended:
            return
        if self._pid in (0, self._holder.process.pid):
            self._holder.process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    async def ended(self, timeout: float) -> None:
        """Waits for the engine and its holder to end; kills them after `timeout` seconds."""
        end = time.monotonic() + timeout
        # Without a thread, which may not be had any more.
        while not self._holder.has_ended:
            if self._has_ended:
                self._holder.end()
            if time.monotonic() >= end:
                self._holder.process.kill()
            await asyncio.sleep(POLL_SECONDS)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for message in self._frames.push(data):
                self._deliver(message)
        except (msgspec.MsgspecError, ValueError) as error:
            log.error("the engine sent an invalid message: %s", error)
            data = b""
        if not data:
            # It has exited or violates the protocol. An engine that is exiting gets EXIT_SECONDS to
            # leave its own exit status.
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._loop.call_later(EXIT_SECONDS, self.kill)
            self._loop.call_later(2 * EXIT_SECONDS, self._end_holder)
            self._outbox.put(None)

    def _end_if_not_ready(self) -> None:
        if not self._pid:
            self.kill()

    def _end_holder(self) -> None:
        """A holder that has not said how its engine ended is stopped, or worse."""
        if not self._has_ended:
            self._holder.process.kill()

    def _deliver(self, message: protocol.FromEngine) -> None:
        if isinstance(message, protocol.Ready):
            self._pid = message.pid
        try:
            self._on_message(message)
        except Exception:
            # The messages after this one belong to other requests and are still delivered.
            log.exception("a message from the engine could not be handled")

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                # The engine has exited; the reading side detects that.
                with contextlib.suppress(OSError):
                    self._pipe.send_bytes(protocol.encode(message))
        except Exception:
            log.exception("a message to the engine could not be sent")
            self.kill()  # The supervisor sends everything again to the next engine.
        finally:
            self._pipe.close()
            status = self._holder.engine_status()
            self._has_ended = True
            with contextlib.suppress(RuntimeError):  # The event loop has been closed.
                self._loop.call_soon_threadsafe(self._on_exit, status)
