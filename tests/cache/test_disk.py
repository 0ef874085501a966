"""What the disk gives is what was computed, whatever became of its files and of the pages."""

import logging
import os
import random
import stat
import struct
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from cache.disk import DiskCache
from cache.layout import CacheLayout
from cache.ledger import PageLedger
from cache.pages import TAKEN
from cache.prefix import Block, Link
from cache.table import DROPPED
from model.step import Sampling
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.protocol import Token
from tests.server.engine.test_prefix_reuse import links_of
from tests.support.hash_model import HashModel, oracle
from tests.support.integrity import integrity
from tests.support.submitting import submit

LAYOUTS = [
    CacheLayout.of(1, (), 4),
    CacheLayout.of(3, (6, None, 6), 4),
    CacheLayout.of(2, (9, 9), 4),
    CacheLayout.of(4, (1, 20, None, None), 2),
]
_SLOT = struct.Struct("=?QqII")


class SlotMemory(MutableMapping[tuple[int, int], Any]):
    """The slots of a HashModel in bytes, of which each page has its own."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.bytes_per_page = page_size * _SLOT.size
        self.memory = bytearray(num_pages * self.bytes_per_page)

    def parts(self, page: int) -> list[memoryview]:
        begin = page * self.bytes_per_page
        whole = memoryview(self.memory)[begin : begin + self.bytes_per_page]
        return [whole[: _SLOT.size], whole[_SLOT.size :]]

    def _at(self, slot: tuple[int, int]) -> int:
        return slot[0] * self.bytes_per_page + slot[1] * _SLOT.size

    def __getitem__(self, slot: tuple[int, int]) -> Any:
        is_set, position, state, *kind = _SLOT.unpack_from(self.memory, self._at(slot))
        if not is_set:
            raise KeyError(slot)
        return position, state, tuple(kind)

    def __setitem__(self, slot: tuple[int, int], value: Any) -> None:
        position, state, kind = value
        _SLOT.pack_into(self.memory, self._at(slot), True, position, state, *kind)

    def __delitem__(self, slot: tuple[int, int]) -> None:
        _SLOT.pack_into(self.memory, self._at(slot), False, 0, 0, 0, 0)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class Servers:
    """One server after another over the same folder, each with empty pages."""

    def __init__(self, folder: Path, seed: int, blocks_per_sequence: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.layout = LAYOUTS[seed % len(LAYOUTS)]
        num_pages = 4 * blocks_per_sequence * self.layout.pages_per_block
        self.limits = Limits(num_pages, self.layout, 60, 4, self.rng.randint(4, 40))
        begin = [self.rng.randrange(30) for _ in range(12)]
        self.prompts = [
            begin[: self.rng.randint(0, 12)]
            + [self.rng.randrange(30) for _ in range(self.rng.randint(1, 20))]
            for _ in range(8)
        ]
        self.start()

    def start(self, limit: float = 1e9) -> None:
        self.slots = SlotMemory(self.limits.num_pages, self.layout.page_size)
        self.disk = DiskCache(self.folder / "pages", limit, self.layout, self.slots.parts)
        self.scheduler = Scheduler(self.limits, disk=self.disk)
        model = HashModel(self.layout)
        model.slots = self.slots  # type: ignore[assignment]
        self.core = EngineCore(self.scheduler, model)

    def serve(self, numbers: list[int]) -> None:
        """Serves these prompts, each with another seed every time, and checks the outputs."""
        outputs: dict[int, list[int]] = {}
        waiting = list(enumerate(numbers))
        while waiting or self.scheduler.has_work:
            if waiting and self.rng.random() < 0.5:
                id, number = waiting.pop()
                outputs[id] = []
                submit(self.scheduler, id, self.prompts[number], 10, Sampling(seed=id))
            for event in self.core.step():
                assert isinstance(event, Token)
                outputs[event.id].append(event.token)
            assert integrity(self.scheduler) == []
        for id, number in enumerate(numbers):
            assert outputs[id] == oracle(self.prompts[number], 10, 0, frozenset(), id, 0.0)

    @property
    def files(self) -> list[Path]:
        return sorted((self.folder / "pages").iterdir())


@pytest.mark.parametrize("seed", range(24))
def test_a_later_server_finds_the_prompts_of_an_earlier_one(tmp_path: Path, seed: int) -> None:
    servers = Servers(tmp_path, seed, blocks_per_sequence=30)
    servers.serve([*range(8)])
    servers.disk.close()
    known = servers.scheduler.num_hit_tokens
    servers.start()
    servers.serve([*range(8)])
    page_size = servers.layout.page_size
    most = sum((len(prompt) - 1) // page_size * page_size for prompt in servers.prompts)
    assert known < servers.scheduler.num_hit_tokens == most
    assert servers.scheduler.prefixes.num_loaded


@pytest.mark.parametrize("seed", range(24))
def test_damaged_files_and_short_pages_change_no_output(tmp_path: Path, seed: int) -> None:
    servers, damaged = Servers(tmp_path, seed, blocks_per_sequence=6), 0
    for _ in range(4):
        servers.serve(servers.rng.choices(range(8), k=12))
        servers.disk.close()
        for path in servers.files:
            if servers.rng.random() < 0.3:
                data = bytearray(path.read_bytes())
                data[servers.rng.randrange(len(data))] ^= servers.rng.randrange(1, 256)
                path.write_bytes(data[: servers.rng.choice([None, len(data) // 2])])
                damaged += 1
        servers.start(limit=servers.rng.choice([3e3, 1e9]))
    assert damaged


@pytest.mark.parametrize("seed", range(12))
def test_what_was_read_is_not_cleared_with_what_an_engine_left(tmp_path: Path, seed: int) -> None:
    """Engines one after the other over the same pages: those that were read have no record, so that
    the next engine does not know what they hold.
    """
    servers = Servers(tmp_path, seed, blocks_per_sequence=30)
    ledger = PageLedger(servers.limits.num_pages, servers.layout, lambda pages: [True] * len(pages))
    servers.serve([*range(8)])
    servers.disk.close()
    servers.start()
    for _ in range(3):
        servers.scheduler = Scheduler(servers.limits, None, ledger, servers.disk)
        servers.scheduler.prefixes.adopt()
        model = HashModel(servers.layout)
        model.slots = servers.slots  # type: ignore[assignment]
        servers.core = EngineCore(servers.scheduler, model)
        servers.serve([*range(8)])
        # As an engine that died would have left them.
        for page in range(servers.limits.num_pages):
            ledger.marks[page] = TAKEN
    assert servers.scheduler.prefixes.num_loaded


def _link(layout: CacheLayout) -> Link:
    return links_of(range(layout.page_size), "salt", layout.page_size)[0]


def test_no_flipped_byte_is_served(tmp_path: Path) -> None:
    layout, rng = LAYOUTS[1], random.Random(3)
    slots, link = SlotMemory(6, 4), _link(layout)
    slots.memory[:] = rng.randbytes(len(slots.memory))
    disk, whole = DiskCache(tmp_path / "key", 1e9, layout, slots.parts), bytes(slots.memory)
    disk.write(Block(link, [0, 1, 2]))
    disk.close()
    (path,) = (tmp_path / "key").iterdir()
    data = path.read_bytes()
    assert [*disk.read([(link, [3, 4, 5])])] == [True]
    assert slots.memory[len(whole) // 2 :] == whole[: len(whole) // 2]
    for _ in range(2000):
        torn = bytearray(data)
        torn[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        path.write_bytes(torn)
        assert [*disk.read([(link, [3, 4, 5])])] == [False]
        assert not path.exists(), "a damaged file is removed"
    path.write_bytes(data)
    (other,) = links_of(range(4), "another salt")
    path.rename(path.with_name(other.name.hex()))
    assert [*disk.read([(other, [3, 4, 5])])] == [False], "under another's name"


def test_a_page_that_is_evicted_while_its_block_is_written_ends_up_in_no_file(
    tmp_path: Path,
) -> None:
    layout = LAYOUTS[1]
    slots, link = SlotMemory(6, 4), _link(layout)
    block = Block(link, [0, 1, 2])

    def parts(page: int) -> list[memoryview]:
        if page == 2:  # After the memory of the first two was named.
            block.pages[0] = DROPPED
        return slots.parts(page)

    disk = DiskCache(tmp_path / "key", 1e9, layout, parts)
    disk.write(block)
    disk.close()
    assert [*(tmp_path / "key").iterdir()] == []


def test_what_was_used_least_recently_leaves_first(tmp_path: Path) -> None:
    layout = LAYOUTS[0]
    slots = SlotMemory(1, 4)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(10**6))
    links = links_of(range(160))
    size = 32 + 16 + 4 + 4 + slots.bytes_per_page
    for number, link in enumerate(links):
        disk = DiskCache(tmp_path / f"{number % 2:032}", 20 * size, layout, slots.parts)
        disk.write(Block(link, [0]))
        disk.touch(links[:1])  # It is used again and again.
        disk.close()
    assert (tmp_path / "model" / "model.safetensors").exists(), "it is not the cache's own"
    left = {path.name for path in tmp_path.glob("0*/*")}
    assert 15 <= len(left) <= 20
    names = [link.name.hex() for link in links]
    assert left == {names[0], *names[41 - len(left) :]}


def test_a_disk_that_is_full_is_said_once_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, slots = LAYOUTS[0], SlotMemory(1, 4)
    disk = DiskCache(tmp_path / "key", 1e9, layout, slots.parts)
    monkeypatch.setattr(os, "writev", lambda file, parts: 7)
    with caplog.at_level(logging.WARNING):
        for link in links_of(range(12)):
            disk.write(Block(link, [0]))
        disk.close()
    assert [record.message for record in caplog.records] == [
        "cache.disk: blocks cannot be written: No space left on device"
    ]
    assert [*(tmp_path / "key").iterdir()] == []


def test_nobody_else_can_read_the_folder(tmp_path: Path) -> None:
    DiskCache(tmp_path / "disk" / "key", 1e9, LAYOUTS[0], SlotMemory(1, 4).parts).make_folder()
    for folder in (tmp_path / "disk", tmp_path / "disk" / "key"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
