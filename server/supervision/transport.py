"""EngineProcess: starts an engine process, and sends and receives its messages over a pipe.

A TokenWriter reads where it is compiled, else the event loop. A thread writes, because writing to a stopped engine blocks; after the last
message it waits for the process to exit.
Invariant: every message is delivered in order, then the exit status, once. It knows nothing of requests.
"""

import asyncio
import contextlib
import errno
import logging
import queue
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe
from typing import Any

import msgspec

from server import protocol
from server.child_process import WORKING_DIRECTORY, child_command
from server.metrics import Counts
from server.supervision.engine import PlainStream
from server.supervision.processors import engine_environment
from server.supervision.token_writer import TokenTexts, TokenWriter, WrittenSequence

log = logging.getLogger("onehead.supervisor")

EXIT_SECONDS = 1.0
"""Time for an engine that has closed its pipe to exit by itself; then it is killed."""
POLL_SECONDS = 0.01
"""Seconds from one look whether an engine has ended to the next."""
ENGINE_MODULE = "server.engine.worker"
READ_BYTES = 2**18
"""Bytes read before the event loop runs other tasks."""
_LENGTH = struct.Struct("!i")
"""The header that multiprocessing writes before a message of less than 2 GiB."""


class Frames:
    """Splits the byte stream of a multiprocessing pipe into messages."""

    def __init__(self, decode: Callable[[bytes], Any] = protocol.decode_from_engine) -> None:
        self._data = bytearray()
        self._decode = decode

    def push(self, data: bytes) -> Iterator[Any]:
        """Adds bytes and yields the messages they complete. Raises MsgspecError for an invalid message, ValueError for one too long."""
        self._data += data
        begin = 0
        try:
            while len(self._data) >= begin + _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._data, begin)
                if not 0 <= length <= protocol.MAX_FRAME_BYTES:
                    raise ValueError(f"a message of {length} bytes, at most {protocol.MAX_FRAME_BYTES} are allowed")
                end = begin + _LENGTH.size + length
                if len(self._data) < end:
                    break
                frame = bytes(self._data[begin + _LENGTH.size : end])
                begin = end
                yield self._decode(frame)
        finally:
            del self._data[:begin]


def framed(data: bytes) -> bytes:
    """An encoded message with its header."""
    return _LENGTH.pack(len(data)) + data


class EngineProcess:
    """An engine process, which is sent its Start at once. `grammars`: the channel over which it asks for processes that follow constraints.
    Raises OSError.
    """

    def __init__(self, start: protocol.Start, grammars: socket.socket) -> None:
        self._outbox: queue.SimpleQueue[protocol.ToEngine | None] = queue.SimpleQueue()
        self._frames = Frames()
        self._writer: TokenWriter | None = None
        self._pipe, theirs = Pipe(duplex=True)
        with theirs:  # The child holds the only copy afterwards, so the pipe ends when the child does.
            descriptors = theirs.fileno(), grammars.fileno()
            # A process group of its own: Ctrl-C in a terminal must reach only this process, which drains first.
            self.process = subprocess.Popen(
                child_command(ENGINE_MODULE, *map(str, descriptors)),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                process_group=0,
                cwd=WORKING_DIRECTORY,
                env=engine_environment(),
            )
        with contextlib.suppress(OSError):  # It has exited, which `listen` finds.
            self._pipe.send_bytes(protocol.encode(start))

    def listen(
        self, on_message: Callable[[protocol.FromEngine], None], on_exit: Callable[[int], None], texts: TokenTexts | None = None
    ) -> None:
        """From now on `on_message` gets each message, then `on_exit` the exit status; both are called on the event loop. With `texts` a
        TokenWriter writes the tokens of plain streams. Raises OSError.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_exit = on_exit
        # A second descriptor for reading without blocking; the writing thread's own calls block.
        self._socket = socket.fromfd(self._pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._writer = None if texts is None else TokenWriter(self._socket, texts)
            threading.Thread(target=self._write, daemon=True).start()
        except (RuntimeError, OSError) as error:  # The thread limit is reached; reported like a process that cannot be spawned.
            self.process.kill()
            raise OSError(errno.EAGAIN, "no thread can be started") from error
        if self._writer is None:
            self._loop.add_reader(self._socket, self._read)
        else:
            self._loop.add_reader(self._writer.event, self._take, self._writer)

    def end(self) -> None:
        """Ends a process that is not listened to."""
        self._pipe.close()
        self.process.kill()
        self.process.wait()

    def send(self, message: protocol.ToEngine) -> None:
        """Queues a message; never blocks. Messages to an engine that has exited are dropped."""
        self._outbox.put(message)

    def kill(self) -> None:
        """Sends SIGKILL; `on_exit` is called when the process has ended."""
        if self._writer is not None:
            self._writer.discard()
        self.process.kill()

    def write_natively(self, id: int, next_index: int, plain: PlainStream) -> WrittenSequence | None:
        """Has the tokens of a sequence from `next_index` on written by the TokenWriter, if there is one and its client is connected."""
        return None if self._writer is None else self._writer.add(id, next_index, plain)

    def take_counts(self) -> Counts | None:
        """What the TokenWriter has counted since the last call; None if there is none."""
        return None if self._writer is None else self._writer.take_counts()

    async def ended(self, timeout: float) -> None:
        """Waits for the process to end; kills it after `timeout` seconds."""
        end = time.monotonic() + timeout
        while self.process.poll() is None:  # Without a thread, which may not be had any more.
            if time.monotonic() >= end:
                self.kill()
            await asyncio.sleep(POLL_SECONDS)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not self._deliver_all(self._frames.push(data)) or not data:
            self._loop.remove_reader(self._socket)
            self._end()

    def _take(self, writer: TokenWriter) -> None:
        messages = writer.take()
        if messages is None or not self._deliver_all(map(protocol.decode_from_engine, messages)):
            self._loop.remove_reader(writer.event)
            writer.discard()
            self._end()

    def _deliver_all(self, messages: Iterable[protocol.FromEngine]) -> bool:
        """Returns False for an engine that violates the protocol."""
        try:
            for message in messages:
                self._deliver(message)
        except (msgspec.MsgspecError, ValueError) as error:
            log.error("the engine sent an invalid message: %s", error)
            return False
        return True

    def _end(self) -> None:
        """It has exited or violates the protocol. An engine that is exiting gets EXIT_SECONDS to leave its own exit status."""
        self._socket.close()
        self._loop.call_later(EXIT_SECONDS, self.kill)
        self._outbox.put(None)

    def _deliver(self, message: protocol.FromEngine) -> None:
        try:
            self._on_message(message)
        except Exception:  # The messages after this one belong to other requests and are still delivered.
            log.exception("a message from the engine could not be handled")

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                with contextlib.suppress(OSError):  # The engine has exited; the reading side detects that.
                    self._pipe.send_bytes(protocol.encode(message))
        except Exception:
            log.exception("a message to the engine could not be sent")
            self.process.kill()  # The supervisor sends everything again to the next engine.
        finally:
            self._pipe.close()
            status = self.process.wait()
            with contextlib.suppress(RuntimeError):  # The event loop has been closed.
                self._loop.call_soon_threadsafe(self._on_exit, status)
