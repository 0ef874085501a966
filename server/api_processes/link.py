"""Link: one end of the socket between the front process and an API process.

Invariant: messages arrive in the order in which they were sent, then `on_end` is called, once. Sending never blocks. It knows nothing of
what the messages mean.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from server import protocol
from server.supervision.transport import Frames, framed

log = logging.getLogger("onehead")


class Link(asyncio.Protocol):
    """Sends structs, and calls `on_message` with each one that is received."""

    def __init__(self, decode: Callable[[bytes], Any], on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._frames = Frames(decode)
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.push(data):
                self._handle(message)
        except (msgspec.MsgspecError, ValueError) as error:
            log.error("an invalid message came over a link: %s", error)
            self._transport.abort()

    def _handle(self, message: Any) -> None:
        try:
            self._on_message(message)
        except Exception:  # The messages after this one belong to other requests.
            log.exception("a message of a link could not be handled")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._on_end()

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message; dropped if the other end is gone."""
        self.write(framed(protocol.encode(message)))

    def write(self, data: bytes | bytearray) -> None:
        """Sends messages that have been encoded and framed."""
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def num_unsent(self) -> int:
        """Bytes that the other end has not taken."""
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Closes the link when everything has been sent."""
        self._transport.close()
