"""KvEventLog: the changes of the prefix cache as numbered messages in vLLM's format of KV events.
Sans-I/O: no clock, thread or socket.

Invariant: the changes of the messages, applied one after the other, give the blocks of the prefix
cache; each message's number is one above that of the message before. It keeps the last messages,
and the blocks before them, so that whatever was missed can be sent again. It knows nothing of
sequences and subscribers.
"""

from collections import deque
from typing import Any, TypeAlias

from cache.prefix import Link
from server.protocol import encode

KEPT = 512
"""Messages that are kept: half of what ZeroMQ holds for a subscriber, so that it has room for a
whole replay."""

Change: TypeAlias = Link | bytes | None
"""A block that is stored, the hash of one that is removed, or None: all are removed."""
Message: TypeAlias = tuple[int, float, list[Change]]
"""Its number, its time and its changes."""


class KvEventLog:
    """`number` is that of the last message. The first one to be taken says that there are no
    blocks.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.changes: list[Change] = [None]
        """Those since the last message, in order."""
        self._kept: deque[Message] = deque()
        self._before: dict[bytes, Change] = {}
        """The blocks before the messages that are kept."""

    def take(self, now: float) -> Message | None:
        """The message of the changes since the last one; None if there are none."""
        if not self.changes:
            return None
        self.number += 1
        self._kept.append((self.number, now, [*self.changes]))
        self.changes.clear()
        if len(self._kept) > KEPT:
            for change in self._kept.popleft()[-1]:
                if isinstance(change, Link):
                    self._before[change.name] = change
                elif change:
                    del self._before[change]
        return self._kept[-1]

    def since(self, number: int, now: float) -> list[Message]:
        """The messages from a number on; where one of them is no longer kept, all that are, after
        one with the blocks before them.
        """
        kept = [*self._kept]
        before = self.number - len(kept)
        return (
            kept[number - before - 1 :]
            if number > before
            else [(before, now, [None, *self._before.values()]), *kept]
        )


def frames(number: int, time: float, changes: list[Change]) -> tuple[bytes, bytes]:
    """The number, and the content in msgpack: time, events and, as vLLM has several engines, the
    rank of this one.
    """
    return number.to_bytes(8), encode([time, [*map(_event, changes)], 0])


def _event(change: Change) -> list[Any]:
    """An event as vLLM writes it. The first block of a prefix has the client's salt, without the
    caller that stands before it.
    """
    if not isinstance(change, Link):
        return ["BlockRemoved", [block_hash(change)]] if change else ["AllBlocksCleared"]
    before = change.before
    tokens = memoryview(change.tokens).cast("I").tolist()
    parent, salt = (
        (None, before.partition(":")[2]) if isinstance(before, str) else (block_hash(before), "")
    )
    return [
        "BlockStored",
        [block_hash(change.name)],
        parent,
        tokens,
        len(tokens),
        None,
        None,
        None,
        [[salt]] if salt else None,
    ]


def block_hash(name: bytes) -> int:
    """A block's hash in 64 bits, as subscribers take it."""
    return int.from_bytes(name[-8:])
