"""DiskCache: blocks of the prefix cache as files, for later servers and for others that run now.

Servers whose pages have the same bits share a folder, which the caller names after all that
decides these bits. A file holds one block, under the block's hash: a header, then its pages. A
thread writes blocks from the pool's own memory. Invariant: a file appears when it is complete, and
nothing of it is used before its checksum was verified; a page that is evicted while its block is
being written ends up in no file. Pages tell the prompts, so the folder is its owner's alone. It
knows nothing of sequences and tensors.
"""

import errno
import logging
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import reduce
from pathlib import Path

from cache.layout import CacheLayout
from cache.prefix import Block, Link
from cache.table import DROPPED

log = logging.getLogger("onehead.cache")

CHECK_BYTES = 4
"""Bytes of a checksum, a CRC-32."""
FILES = f"{'[0-9a-f]' * 32}/{'[0-9a-f]' * 64}*"
"""The files of all servers, below the folder that they share."""
READERS = 4
"""Threads that read."""
SCANS = 16
"""How often the folder is scanned while as much as it may hold is written."""


class DiskCache:
    """`parts` returns the memory of a page. `limit`: the most bytes of all files of the folder
    above `folder`, which servers with other pages use too; about, as each server counts for itself.
    """

    def __init__(
        self,
        folder: Path,
        limit: float,
        layout: CacheLayout,
        parts: Callable[[int], Sequence[memoryview]],
    ) -> None:
        self._folder, self._limit, self._parts = folder, limit, parts
        self._num_pages = layout.pages_per_block
        self._page_bytes = sum(part.nbytes for part in parts(0))
        self._bytes_to_scan = 0.0
        self._failure: int | None = 0
        """The number of the error for which the last block could not be written."""
        # They start threads when they are first used: in the process that serves.
        self._writer = ThreadPoolExecutor(1, "disk writer")
        self._readers = ThreadPoolExecutor(READERS, "disk reader")

    def make_folder(self) -> None:
        """Raises OSError."""
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def has(self, link: Link) -> bool:
        return self._path(link.name).exists()

    def touch(self, links: Sequence[Link]) -> None:
        """Has blocks that follow each other count as used now, the first ones last: without them
        the others are not found.
        """
        self._writer.submit(self._touch, [self._path(link.name) for link in reversed(links)])

    def _touch(self, paths: list[Path]) -> None:
        for path in paths:
            with suppress(OSError):  # Not all have to be here.
                os.utime(path)

    def read(self, wanted: Iterable[tuple[Link, Sequence[int]]]) -> Iterator[bool]:
        """Reads blocks into these of their pages, DROPPED for those that are not wanted. False for
        a block that is not there or damaged; then it is removed, and its pages may hold anything.
        Each result comes when it is there.
        """
        return self._readers.map(self._read, *zip(*wanted, strict=True))

    def _read(self, link: Link, pages: Sequence[int]) -> bool:
        num_fixed = len(link.name) + len(link.tokens)
        header_bytes = num_fixed + CHECK_BYTES * (self._num_pages + 1)
        try:
            with self._path(link.name).open("rb", buffering=0) as file:
                header = file.read(header_bytes)
                checks = header[num_fixed:-CHECK_BYTES]
                is_whole = header == _header(link, checks)
                for place, page in enumerate(pages):
                    if page != DROPPED and is_whole:
                        parts = self._parts(page)
                        os.preadv(file.fileno(), parts, header_bytes + place * self._page_bytes)
                        check = checks[place * CHECK_BYTES :][:CHECK_BYTES]
                        is_whole = _checksum(*parts) == check
        except OSError:
            return False
        if not is_whole:
            log.warning("cache.disk: a damaged block is removed, %s", self._path(link.name))
            self._remove(self._path(link.name))
        return is_whole

    def write(self, block: Block) -> None:
        """Has a block with all its pages written, soon, unless one of them is evicted before."""
        self._writer.submit(self._write, block)

    def remove(self, name: bytes) -> None:
        """Has a block removed, after all that is to be written."""
        self._writer.submit(self._remove, self._path(name))

    def close(self) -> None:
        """Waits until everything is written."""
        self._writer.shutdown()

    def _write(self, block: Block) -> None:
        path, pages = self._path(block.link.name), [*block.pages]
        new = path.with_suffix(f".{secrets.token_hex(8)}")
        try:
            if path.exists() or DROPPED in pages:
                return
            self.make_folder()  # Again, where it was deleted.
            # A copy, as other threads may hold this one up at each call that reads a part.
            contents = [b"".join(self._parts(page)) for page in pages]
            header = _header(block.link, b"".join(map(_checksum, contents)))
            num_bytes = len(header) + len(pages) * self._page_bytes
            with new.open("wb", buffering=0) as file:
                if os.writev(file.fileno(), [header, *contents]) < num_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Else what was written may be what another block computed into an evicted page.
            if block.pages == pages:
                new.replace(path)
            self._failure = 0
            self._bytes_to_scan -= num_bytes
            if self._bytes_to_scan <= 0:
                self._scan()
        except OSError as error:
            if self._failure != error.errno:
                log.warning("cache.disk: blocks cannot be written: %s", error.strerror)
            self._failure = error.errno
        finally:
            self._remove(new)

    def _scan(self) -> None:
        """Removes the files that were used least recently while they are too many bytes; what is
        written until the next scan has room then.
        """
        self._bytes_to_scan = self._limit / SCANS
        files, total = [], self._bytes_to_scan
        for path in self._folder.parent.glob(FILES):
            with suppress(OSError):  # Another server has removed it.
                state = path.stat()
                files.append((state.st_mtime_ns, state.st_size, path))
                total += state.st_size
        for _, size, path in sorted(files):
            if total <= self._limit:
                break
            self._remove(path)
            total -= size

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()

    def _path(self, name: bytes) -> Path:
        return self._folder / name.hex()


def _header(link: Link, checks: bytes) -> bytes:
    """What a block's file begins with: its hash and tokens, the checksums of its pages, and the
    checksum of all this.
    """
    fixed = link.name + link.tokens + checks
    return fixed + zlib.crc32(fixed).to_bytes(CHECK_BYTES)


def _checksum(*parts: bytes | memoryview) -> bytes:
    return reduce(lambda check, part: zlib.crc32(part, check), parts, 0).to_bytes(CHECK_BYTES)
