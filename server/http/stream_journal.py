"""StreamJournal: resumable streams as files, with which a later server goes on after a kill.

A stream has a file: what was asked for, then, as they come, the tokens that its events were made of
and the events, each part in a frame with a checksum. Invariant: a frame is written before a client
gets its events, and a part that was torn by the writer's death is as if it had not been. Requests
reach the disk within moments (fsync); tokens need not, as a server that lost some generates the
same again. Files hold prompts and answers, so the folder is its owner's alone; a server has it for
itself. It knows nothing of engines, and nothing of what the bodies and events mean.
"""

import errno
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from server import protocol
from server.errors import ConfigurationError

log = logging.getLogger("onehead.api")

FILES = f"{'[A-Za-z0-9_-]' * 32}.stream1"
"""The names of files: a stream's id, and the format of what is in them."""
_HEAD = struct.Struct(">II")
"""The head of a frame: the length of what it holds, and the checksum of that, a CRC-32."""


class Asked(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What a stream is an answer to, and whose it is."""

    stream_id: str
    caller: str
    client: str
    key: bytes | None
    """Its Idempotency-Key."""
    request_id: str
    reply_id: str
    created: int
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    submits: list[protocol.Submit]
    model: str
    """The model and the arithmetic of its answers."""
    is_named: bool
    """Whether its events have names."""
    last: bytes
    """The event that ends it."""


class Part(msgspec.Struct, array_like=True, frozen=True):
    """More of a stream: tokens with the index of their choice, and the events made of them. One of
    nothing stands where a server began to go on with it.
    """

    tokens: Sequence[tuple[int, protocol.Token]] = ()
    events: Sequence[bytes] = ()
    has_ended: bool = False


@dataclass(slots=True)
class StreamFile:
    """The file of one stream, open only while it is written. Where it cannot be written, it is
    removed: the stream goes on, and ends with the server.
    """

    path: Path
    is_kept: bool = True

    def write(self, part: Asked | Part) -> None:
        """Adds a part; the first one makes the file."""
        if not self.is_kept:
            return
        data = msgspec.msgpack.encode(part)
        frame = _HEAD.pack(len(data), zlib.crc32(data)) + data
        flags = os.O_CREAT | os.O_EXCL if isinstance(part, Asked) else 0
        try:
            with open(
                os.open(self.path, os.O_WRONLY | os.O_APPEND | flags, 0o600), "wb", 0
            ) as file:
                # Nothing after a part of a frame would be read.
                if file.write(frame) < len(frame):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            log.warning("server.journal: a stream is not kept: %s", error.strerror)
            self.remove()

    def sync(self) -> None:
        """Waits until what was written is on the disk."""
        for path in (self.path, self.path.parent):
            with suppress(OSError), open(os.open(path, os.O_RDONLY)) as file:
                os.fsync(file.fileno())

    def remove(self) -> None:
        self.is_kept = False
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


class StreamJournal:
    """The files of a folder. Raises ConfigurationError if it cannot be used, or another server uses
    it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Until this process ends.
            self._lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"server.journal {folder}: another server uses it; give each its own folder"
            raise ConfigurationError(text) from None
        except OSError as error:
            raise ConfigurationError(f"server.journal {folder}: {error.strerror}") from None
        self._syncing = ThreadPoolExecutor(1, "journal")

    def open(self, asked: Asked) -> StreamFile:
        """A file for a new stream."""
        stream = StreamFile((self._folder / asked.stream_id).with_suffix(Path(FILES).suffix))
        stream.write(asked)
        self._syncing.submit(stream.sync)
        return stream

    def read(self) -> Iterator[tuple[Asked, list[Part], StreamFile]]:
        """The streams of servers before, the oldest first; a file of which nothing is whole is
        removed.
        """
        for path in sorted(self._folder.glob(FILES), key=lambda path: path.stat().st_mtime):
            stream = StreamFile(path)
            try:
                frames = [*_frames(path.read_bytes())]
                os.truncate(path, sum(_HEAD.size + len(frame) for frame in frames))
                asked, *parts = frames
                yield (
                    msgspec.msgpack.decode(asked, type=Asked),
                    [msgspec.msgpack.decode(part, type=Part) for part in parts],
                    stream,
                )
            except OSError as error:
                log.warning("server.journal: a stream cannot be read: %s", error.strerror)
            except (ValueError, msgspec.MsgspecError):
                log.warning("server.journal: a file holds no stream, and is removed")
                stream.remove()


def _frames(data: bytes) -> Iterator[bytes]:
    """The contents of the whole frames that data begins with."""
    at = 0
    while at + _HEAD.size <= len(data):
        num_bytes, checksum = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        frame = data[at : at + num_bytes]
        # Zeros, which a power cut may leave at the end of a file, are the head of nothing.
        if not frame or len(frame) < num_bytes or zlib.crc32(frame) != checksum:
            return
        yield frame
        at += num_bytes
