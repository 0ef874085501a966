"""A router's knowledge of the prefixes that one replica has cached, from its KV events.

Invariant: it takes messages as a router does, one after the other, and raises ValueError for one
that cannot follow the one before. What a block is called is computed from its tokens and checked.
It imports nothing of the server.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

Place = tuple[int | None, tuple[int, ...], str]
CLEARED = ["AllBlocksCleared"]


class BlockIndex:
    """Blocks by their hashes of 64 bits. `caller`: what stands before a client's salt where the
    server computes hashes.
    """

    def __init__(self, caller: str = "") -> None:
        self.number = -1
        """Of the last message."""
        self.blocks: dict[int, Place] = {}
        self.seen: Counter[str] = Counter()
        self._caller = caller
        self._at: dict[Place, int] = {}
        self._names: dict[int, bytes] = {}
        """Full hashes, also of blocks that are gone: others may follow them."""

    def take(self, number: int, content: bytes) -> None:
        """The number and content of a message."""
        time, events, rank = msgspec.msgpack.decode(content)
        if not events or not isinstance(time, float) or rank != 0:
            raise ValueError(f"message {number}: {time}, {events}, {rank}")
        if number != self.number + 1 and events[0] != CLEARED:
            raise ValueError(f"message {number} after {self.number}")
        self.number = number
        for event in events:
            self.seen[event[0]] += 1
            self._apply(event)

    def _apply(self, event: list[Any]) -> None:
        kind, *fields = event
        if kind == "BlockStored":
            self._store(*fields)
        elif kind == "BlockRemoved":
            for block in fields[0]:
                if block not in self.blocks:
                    raise ValueError(f"block {block} is removed, and was not there")
                del self._at[self.blocks.pop(block)]
        elif event == CLEARED:
            self.blocks.clear()
            self._at.clear()
        else:
            raise ValueError(f"an event {event}")

    def _store(
        self,
        hashes: list[int],
        parent: int | None,
        tokens: list[int],
        block_size: int,
        lora_id: None,
        medium: None,
        lora_name: None,
        extra_keys: list[list[str]] | None,
    ) -> None:
        if (
            len(hashes) != 1
            or len(tokens) != block_size
            or (lora_id, medium, lora_name) != (None, None, None)
        ):
            raise ValueError(
                f"a block of {block_size} with {hashes}, {tokens}, {lora_id}, {medium}, {lora_name}"
            )
        ((salt,),) = extra_keys or [[""]]
        if hashes[0] in self.blocks or (salt and parent is not None):
            raise ValueError(f"block {hashes[0]} is stored twice, or has a salt after {parent}")
        self.blocks[hashes[0]] = place = parent, tuple(tokens), salt
        self._at[place] = hashes[0]
        before = (
            hashlib.sha256((self._caller + salt).encode()).digest()
            if parent is None
            else self._names.get(parent)
        )
        if before is None:
            self.seen["blocks whose parent was never seen"] += 1
            return
        name = hashlib.sha256(before + array("I", tokens).tobytes()).digest()
        if int.from_bytes(name[-8:]) != hashes[0]:
            raise ValueError(f"block {hashes[0]} does not have the hash of its tokens")
        self._names[hashes[0]] = name

    def num_cached(self, tokens: Sequence[int], page_size: int, salt: str = "") -> int:
        """How many blocks at the beginning of a prompt are cached: what a router compares between
        replicas.
        """
        parent: int | None = None
        for start in range(0, len(tokens) - page_size + 1, page_size):
            parent = self._at.get(
                (parent, tuple(tokens[start : start + page_size]), salt if start == 0 else "")
            )
            if parent is None:
                return start // page_size
        return len(tokens) // page_size

    def problems(self, names: Iterable[bytes]) -> list[str]:
        """How the blocks differ from those of these full hashes."""
        right = {int.from_bytes(name[-8:]) for name in names}
        missing, added = right - self.blocks.keys(), self.blocks.keys() - right
        return (
            [f"{len(missing)} of {len(right)} blocks are not known, {len(added)} are gone"]
            if missing or added
            else []
        )
