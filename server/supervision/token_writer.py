"""TokenWriter: reads an engine's messages on a thread in native code, which writes plain tokens of plain streams to their clients itself.

Such a token costs no turn of the event loop, and a busy event loop does not delay it. All other messages, and tokens that are not plain,
are taken by Python (token_writer.cpp says which). Invariant: to one client's socket either Python or the thread may write, never both: the
thread only between ClientSocket.release and ClientSocket.hold. It knows no requests, tokenizers or dialects.
"""

import ctypes
import logging
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec
from typing import Any

import msgspec

from server.metrics import LATENCY_BOUNDS, Counts
from server.protocol import Gauges
from server.supervision.engine import PlainStream

log = logging.getLogger("onehead.supervisor")

INTERFACE = 1
"""Version of the functions, the same as in token_writer.cpp."""
TOKEN_ID, TEXT, LOGPROB, COUNT = (msgspec.Raw(b"\0" + letter) for letter in (b"I", b"T", b"L", b"N"))
"""JSON values of a template in place of a token's id, its text, its log-probability, and the number of its sequence's tokens so far."""
MESSAGE, UNSENT = 0, 1
_HEAD = struct.Struct("=bI")
"""Kind and length of what was queued for Python."""
_CLIENT = struct.Struct("=q")
_COLLECTED_IDS = 1024
_ADDRESS, _HANDLE = POINTER(c_void_p), c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "token_texts_open": (c_void_p, c_int64),
    "token_texts_close": (None, _HANDLE),
    "token_texts_set": (None, _HANDLE, c_int64, c_char_p, c_int64, c_char_p, c_int64),
    "token_writer_open": (c_void_p, c_int64, c_int64, _HANDLE, POINTER(c_double), c_int64),
    "token_writer_close": (None, _HANDLE),
    "token_writer_take": (c_int64, _HANDLE, _ADDRESS),
    "token_writer_connect": (c_int64, _HANDLE, c_int64),
    "token_writer_hold": (c_int64, _HANDLE, c_int64, _ADDRESS),
    "token_writer_release": (None, _HANDLE, c_int64),
    "token_writer_disconnect": (None, _HANDLE, c_int64),
    "token_writer_last_write": (c_double, _HANDLE, c_int64),
    "token_writer_add": (None, _HANDLE, c_int64, c_int64, c_int64, c_int64, c_double, c_char_p, c_int64, c_char_p, c_int64),
    "token_writer_remove": (None, _HANDLE, c_int64),
    "token_writer_collect": (c_int64, _HANDLE, c_int64, POINTER(c_int32), c_int64, POINTER(c_double)),
    "token_writer_take_counts": (c_int64, _HANDLE, POINTER(c_int64), POINTER(c_double), POINTER(c_int64), _ADDRESS),
    "token_writer_discard": (None, _HANDLE),
}
"""Result and arguments of each function."""


@cache
def library() -> Any:
    """The compiled functions; None where they were not compiled, and Python writes all tokens."""
    spec = find_spec("server.supervision.token_writer_native")
    if spec is None or spec.origin is None or not hasattr(os, "eventfd"):
        return None
    try:
        found = ctypes.PyDLL(spec.origin)  # No call waits for longer than the thread takes for a few writes.
        if found.token_writer_interface() != INTERFACE:
            log.warning("%s was compiled from another version; install onehead again (streams are written by Python)", spec.origin)
            return None
    except (OSError, AttributeError) as error:
        log.warning("streams are written by Python: %s", error)
        return None
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


class TokenTexts:
    """What each token of a vocabulary adds to a text, for all writers of a process."""

    def __init__(self, num_tokens: int) -> None:
        self.handle = library().token_texts_open(num_tokens)
        weakref.finalize(self, library().token_texts_close, self.handle)

    def set(self, token: int, text: str) -> None:
        """Declares a token as one that adds this text, whatever tokens are before it. The first text of a token stays."""
        json, raw = msgspec.json.encode(text), text.encode()
        library().token_texts_set(self.handle, token, json, len(json), raw, len(raw))


class ClientSocket:
    """A client's socket. `write` writes for Python, after what the thread could not write."""

    def __init__(self, descriptor: int, write: Callable[[bytes], object]) -> None:
        self._descriptor = descriptor
        self._write = write
        self._writer: TokenWriter | None = None
        self._number = 0
        self._is_closed = False

    def number_at(self, writer: "TokenWriter") -> int:
        """Its number at a writer, which does not write to it before `release`; 0 once the socket is closed."""
        if self._is_closed:
            return 0
        if self._writer is not writer:
            self._disconnect()
            self._writer, self._number = writer, writer.connect(self, self._descriptor)
        return self._number

    def hold(self) -> None:
        """From now on only Python writes."""
        if self._writer is not None:
            unsent = c_void_p()
            length = library().token_writer_hold(self._writer.handle, self._number, byref(unsent))
            if length:
                self._write(ctypes.string_at(unsent, length))

    def release(self) -> None:
        """From now on the thread may write. All that Python has written has been sent."""
        if self._writer is not None:
            library().token_writer_release(self._writer.handle, self._number)

    @property
    def last_write(self) -> float:
        """Monotonic time of the thread's last write; 0 if there was none."""
        return 0.0 if self._writer is None else float(library().token_writer_last_write(self._writer.handle, self._number))

    def close(self) -> None:
        """Called before the socket is closed: its descriptor may belong to another client afterwards."""
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.disconnect(self._number)
            self._writer = None


class WrittenSequence:
    """A sequence whose tokens a writer may write."""

    def __init__(self, writer: "TokenWriter", id: int) -> None:
        self._writer, self._id = writer, id

    def collect(self) -> tuple[list[int], float]:
        """The tokens that were written since the last call, and the time of the last one."""
        found, last = list[int](), c_double()
        ids = (c_int32 * _COLLECTED_IDS)()
        while (count := library().token_writer_collect(self._writer.handle, self._id, ids, _COLLECTED_IDS, byref(last))) > 0:
            found += ids[:count]
        return found, last.value

    def remove(self) -> None:
        """From now on Python gets all tokens of the sequence."""
        self._writer.remove(self._id)


class TokenWriter:
    """The writer of one engine. `event` is readable when there is something to take. Raises OSError if no thread can be started."""

    def __init__(self, pipe: socket.socket, texts: TokenTexts) -> None:
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._clients: dict[int, ClientSocket] = {}
        self._ids: set[int] = set()
        """The sequences that were added and not removed."""
        descriptor = os.dup(pipe.fileno())
        bounds = (c_double * len(LATENCY_BOUNDS))(*LATENCY_BOUNDS)
        self.handle = library().token_writer_open(descriptor, self.event, texts.handle, bounds, len(bounds))
        if self.handle is None:
            os.close(descriptor)
            os.close(self.event)
            raise OSError("no thread can be started")
        # What was written can be collected after the end of the pipe, with which the thread ends.
        weakref.finalize(self, _close, self.handle, self.event).atexit = False

    def take(self) -> Iterator[bytes] | None:
        """The messages that have come for Python; None after the end of the pipe. Clients with unsent bytes are dealt with."""
        data = c_void_p()
        length = library().token_writer_take(self.handle, byref(data))
        return None if length < 0 else self._messages(ctypes.string_at(data, length))

    def _messages(self, data: bytes) -> Iterator[bytes]:
        begin = 0
        while begin < len(data):
            kind, length = _HEAD.unpack_from(data, begin)
            begin += _HEAD.size + length
            content = data[begin - length : begin]
            if kind == MESSAGE:
                yield content
            elif (client := self._clients.get(_CLIENT.unpack(content)[0])) is not None:
                client.hold()

    def connect(self, client: ClientSocket, descriptor: int) -> int:
        number = int(library().token_writer_connect(self.handle, descriptor))
        self._clients[number] = client
        return number

    def disconnect(self, number: int) -> None:
        del self._clients[number]
        library().token_writer_disconnect(self.handle, number)

    def add(self, id: int, next_index: int, plain: PlainStream) -> WrittenSequence | None:
        """Has the thread write the tokens of a sequence from `next_index` on, once its client is released; None if its socket is closed."""
        number = plain.client.number_at(self)
        if not number:
            return None
        # It has the template of a sequence that was added before.
        template, stops = (b"", b"") if id in self._ids else (plain.template, plain.stop_bytes)
        self._ids.add(id)
        library().token_writer_add(
            self.handle, id, number, next_index, plain.num_tokens, plain.last, template, len(template), stops, len(stops)
        )
        return WrittenSequence(self, id)

    def remove(self, id: int) -> None:
        self._ids.discard(id)
        library().token_writer_remove(self.handle, id)

    def take_counts(self) -> Counts:
        """What was counted since the last call."""
        num_counts = len(LATENCY_BOUNDS) + 1
        counts, sums, num_tokens, address = (c_int64 * (2 * num_counts))(), (c_double * 2)(), c_int64(), c_void_p()
        length = library().token_writer_take_counts(self.handle, counts, sums, byref(num_tokens), byref(address))
        gauges = msgspec.msgpack.decode(ctypes.string_at(address, length), type=Gauges) if length else None
        return Counts(list(counts[:num_counts]), sums[0], list(counts[num_counts:]), sums[1], num_tokens.value, gauges)

    def discard(self) -> None:
        """From now on messages are dropped, and nothing is written."""
        library().token_writer_discard(self.handle)


def _close(handle: int, event: int) -> None:
    library().token_writer_close(handle)
    os.close(event)
