"""What the ledger gives back is what was recorded, whatever became of its writer and its memory."""

import random
from collections.abc import Iterator

import pytest

from cache.layout import CacheLayout
from cache.ledger import PageLedger, Recorded
from cache.pages import TAKEN
from cache.prefix import root_of
from cache.table import DROPPED

LAYOUTS = [
    CacheLayout.of(1, (), 4),
    CacheLayout.of(3, (8, None, 8), 4),
    CacheLayout.of(2, (5, 5), 4),
]
PAGES = 60


class Writer:
    """Random blocks in a ledger, as an engine writes them, and what is true of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.layout = LAYOUTS[seed % len(LAYOUTS)]
        self.ledger = PageLedger(PAGES, self.layout, lambda pages: [True] * len(pages))
        self.blocks: list[tuple[bytes | str, list[int], list[int]]] = []
        """What is before, pages and tokens of each block, in order."""
        self.free = list(range(PAGES))

    def begin(self) -> None:
        rng, count = self.rng, self.layout.pages_per_block
        if len(self.free) < count:
            return self.reuse()
        pages = [self.free.pop(rng.randrange(len(self.free))) for _ in range(count)]
        before: bytes | str = rng.choice(["", "a salt"])
        if rng.random() < 0.5:
            before = rng.randbytes(32)
        self.ledger.begin(before, pages)
        self.blocks.append((before, pages, []))

    def append(self) -> None:
        growing = [block for block in self.blocks if len(block[2]) < self.layout.page_size]
        if growing:
            _, pages, tokens = self.rng.choice(growing)
            more = self.rng.choices(range(2**18), k=self.rng.randint(1, 4 - len(tokens)))
            self.ledger.append(pages, more)
            tokens.extend(more)

    def reuse(self) -> None:
        """The allocator gives the pages of a block to somebody else."""
        _, pages, _ = self.blocks.pop(self.rng.randrange(len(self.blocks)))
        for page in pages:
            self.ledger.marks[page] = TAKEN
        self.free += pages

    def write(self) -> None:
        self.rng.choice([self.begin, self.append, self.append])()

    @property
    def true(self) -> list[Recorded]:
        return [
            Recorded(root_of(before), isinstance(before, str), _bytes(tokens), pages)
            for before, pages, tokens in self.blocks
            if tokens
        ]


def _bytes(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


@pytest.mark.parametrize("seed", range(30))
def test_what_was_recorded_is_found_in_its_order(seed: int) -> None:
    writer = Writer(seed)
    for _ in range(writer.rng.randint(1, 200)):
        writer.write()
    assert writer.ledger.blocks() == writer.true
    writer.begin()
    writer.append()
    assert writer.ledger.blocks() == writer.true, "another engine goes on"


def test_pages_that_are_used_otherwise_are_left_out() -> None:
    layout = LAYOUTS[1]
    ledger = PageLedger(9, layout, lambda pages: [True] * len(pages))
    ledger.begin("", [0, 1, 2])
    ledger.append([0, 1, 2], [7])
    ledger.marks[0] = TAKEN
    ((_, first),) = [(block.tokens, block.pages) for block in ledger.blocks()]
    assert first == [DROPPED, 1, 2], "a page of layers with a window"
    ledger.begin("", [0, 3, 4])
    ledger.append([0, 3, 4], [8])
    assert [block.pages for block in ledger.blocks()] == [[DROPPED, 1, 2], [0, 3, 4]]
    ledger.marks[1 if ledger._heads[1] == 1 else 2] = TAKEN
    assert [block.pages for block in ledger.blocks()] == [[0, 3, 4]], "without its record"
    ledger.append([0, 1, 2], [9])
    assert [block.tokens for block in ledger.blocks()] == [_bytes([8])]


def is_of(found: Recorded, block: Recorded) -> bool:
    """Whether this is that block, of whose pages some may be lost."""
    pages = zip(found.pages, block.pages, strict=True)
    same = (found.root, found.tokens) == (block.root, block.tokens)
    return same and all(page in (DROPPED, other) for page, other in pages)


def stores(before: bytes, after: bytes, rng: random.Random) -> Iterator[bytes]:
    """Memory in which a writer that died has changed some of the bytes that it meant to change."""
    changed = [at for at in range(len(before)) if before[at] != after[at]]
    for cut in range(len(changed)):
        for order in (changed, rng.sample(changed, len(changed))):
            torn = bytearray(before)
            for at in order[:cut]:
                torn[at] = after[at]
            yield bytes(torn)


def test_a_writer_that_dies_within_a_record_leaves_the_old_one_or_none() -> None:
    seen = 0
    for seed in range(6):
        writer = Writer(seed)
        for _ in range(30):
            memory, true = bytes(writer.ledger._memory), writer.true
            writer.write()
            after = bytes(writer.ledger._memory)
            for torn in stores(memory, after, writer.rng):
                writer.ledger._memory[:] = torn
                for found in writer.ledger.blocks():
                    assert any(is_of(found, other) for other in writer.true + true)
                    seen += 1
            writer.ledger._memory[:] = after
    assert seen > 10_000


def test_flipped_bytes_of_records_are_never_believed() -> None:
    rng, lost = random.Random(1), 0
    writer = Writer(4)
    for _ in range(120):
        writer.write()
    memory, true = bytes(writer.ledger._memory), writer.true
    for _ in range(2000):
        at = rng.randrange(len(memory))
        writer.ledger._memory[at] ^= rng.randrange(1, 256)
        found = writer.ledger.blocks()
        for block in found:
            assert any(is_of(block, other) for other in true)
        lost += len(found) < len(true)
        writer.ledger._memory[at] = memory[at]
    assert lost > 100
