"""EngineProcess: an engine's process and its pipe. What has come is read on the event loop; a thread writes, as an engine that is stopped
takes nothing, and in the end waits for the process. It knows nothing of requests.
"""

import asyncio
import contextlib
import errno
import logging
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe

import msgspec

from server import protocol
from server.supervision.processors import engine_environment

log = logging.getLogger("onehead.supervisor")

EXIT_SECONDS = 1.0
ENGINE_MODULE = "server.engine.worker"
READ_BYTES = 2**18
"""At once, before others get their turn."""
_LENGTH = struct.Struct("!i")
"""What multiprocessing puts before every message of less than 2 GiB."""


class Frames:
    """Bytes of a multiprocessing pipe, as they come, to messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def push(self, data: bytes) -> Iterator[protocol.FromEngine]:
        """The messages that are complete now. Raises MsgspecError for what is none, ValueError for one that is too long."""
        self._data += data
        begin = 0
        try:
            while len(self._data) >= begin + _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._data, begin)
                if not 0 <= length <= protocol.MAX_FRAME_BYTES:
                    raise ValueError(f"a message of {length} bytes; the most is {protocol.MAX_FRAME_BYTES}")
                end = begin + _LENGTH.size + length
                if len(self._data) < end:
                    break
                frame = bytes(self._data[begin + _LENGTH.size : end])
                begin = end
                yield protocol.decode_from_engine(frame)
        finally:
            del self._data[:begin]


class EngineProcess:
    """A spawned engine. `on_message` gets every message in order, then `on_exit` the exit status, once; both on the event loop."""

    def __init__(
        self,
        start: protocol.Start,
        on_message: Callable[[protocol.FromEngine], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_exit = on_exit
        self._outbox: queue.SimpleQueue[protocol.ToEngine | None] = queue.SimpleQueue()
        self._frames = Frames()
        self._pipe, theirs = Pipe(duplex=True)
        fd = theirs.fileno()
        # The pipe itself blocks, for the thread that writes.
        self._socket = socket.fromfd(self._pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        # What a terminal says to its group is for us alone (we drain first), so the engine is in a group of its own.
        command = [sys.executable, "-P", "-m", ENGINE_MODULE, str(fd)]
        self.process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL, process_group=0, env=engine_environment())
        theirs.close()  # The child has the only copy now, so its death is an EOF here.
        try:
            threading.Thread(target=self._write, daemon=True).start()
        except RuntimeError as error:  # No more threads: as little of an engine as no process.
            self.process.kill()
            raise OSError(errno.EAGAIN, "no thread can be started") from error
        self._loop.add_reader(self._socket, self._read)
        self.send(start)

    def send(self, message: protocol.ToEngine) -> None:
        """Queues a message; never blocks. To a dead engine it goes nowhere, and `on_exit` says so."""
        self._outbox.put(message)

    def kill(self) -> None:
        """SIGKILL; `on_exit` follows."""
        self.process.kill()

    async def ended(self, patience: float) -> None:
        """Waits for the process to end; kills it after `patience` seconds."""
        try:
            await asyncio.to_thread(self.process.wait, patience)
        except subprocess.TimeoutExpired:
            self.kill()
            await asyncio.to_thread(self.process.wait)

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
            log.error("the engine broke the protocol: %s", error)
            data = b""
        if not data:
            # Gone, or no longer speaking the protocol: either way its state is lost. One that is going leaves its own status.
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._loop.call_later(EXIT_SECONDS, self.kill)
            self._outbox.put(None)

    def _deliver(self, message: protocol.FromEngine) -> None:
        try:
            self._on_message(message)
        except Exception:  # Of one message: those behind it are for others.
            log.exception("a message of the engine's could not be taken")

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                with contextlib.suppress(OSError):  # The reader sees the EOF and reports it.
                    self._pipe.send_bytes(protocol.encode(message))
        except Exception:
            log.exception("a message to the engine could not be written")
            self.process.kill()  # What it has not been told, the next one will be.
        finally:
            self._pipe.close()
            status = self.process.wait()
            with contextlib.suppress(RuntimeError):  # The loop has closed: nobody is left to tell.
                self._loop.call_soon_threadsafe(self._on_exit, status)
