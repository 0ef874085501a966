"""EngineProcess: an engine's process and its pipe. Two threads move bytes, so neither a busy engine nor a stopped one holds the
event loop; callbacks arrive on the loop. It knows nothing of requests.
"""

import asyncio
import contextlib
import errno
import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import TypeVar

import msgspec

from server import protocol

Value = TypeVar("Value")
log = logging.getLogger("onehead.supervisor")

EXIT_SECONDS = 1.0
ENGINE_MODULE = "server.engine.worker"


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
        self._pipe, theirs = Pipe(duplex=True)
        fd = theirs.fileno()
        # What a terminal says to its group is for us alone (we drain first), so the engine is in a group of its own.
        command = [sys.executable, "-P", "-m", ENGINE_MODULE, str(fd)]
        self.process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL, process_group=0)
        theirs.close()  # The child has the only copy now, so its death is an EOF here.
        try:
            for target in (self._read, self._write):
                threading.Thread(target=target, daemon=True).start()
        except RuntimeError as error:  # No more threads: as little of an engine as no process.
            self.process.kill()
            raise OSError(errno.EAGAIN, "no thread can be started") from error
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
            while True:
                message = protocol.decode_from_engine(self._pipe.recv_bytes(protocol.MAX_FRAME_BYTES))
                self._call(self._on_message, message)
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            if not isinstance(error, EOFError):
                log.error("the engine broke the protocol: %s", error)
            # Gone, or no longer speaking the protocol: either way its state is lost. One that is going leaves its own status.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_SECONDS)
            self.process.kill()
        status = self.process.wait()
        self._outbox.put(None)
        self._call(self._on_exit, status)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            with contextlib.suppress(OSError):  # The reader sees the EOF and reports it.
                self._pipe.send_bytes(protocol.encode(message))
        self._pipe.close()

    def _call(self, callback: Callable[[Value], None], value: Value) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has closed: nobody is left to tell.
            self._loop.call_soon_threadsafe(callback, value)
