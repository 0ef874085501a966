"""KV events without sockets: a router that takes every message knows the engine's blocks, as does
one that asks for those it has lost.
"""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from cache.pages import PageAllocator
from cache.prefix import PrefixCache
from cache.table import PageTable
from server.engine import kv_event_log
from server.engine.kv_event_log import KvEventLog, frames
from server.engine.scheduler import Scheduler
from tests.server.engine.test_core import OverlappedHistory
from tests.server.engine.test_prefix_reuse import links_of
from tests.server.engine.test_scheduler import History, run_histories
from tests.support.block_index import BlockIndex
from tests.support.hash_model import one_group

SEEDS, MANY = 300, 10_000
"""Histories of every run of the tests, and of `-m slow`, of each kind."""
FEW = 4
"""Messages that are kept: fewer than some routers lose."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_log, "KEPT", FEW)


class Router:
    """Takes the messages of a log but for those that it loses, and asks for these when it sees that
    they are missing.
    """

    def __init__(self, log: KvEventLog, loses: float) -> None:
        self.log, self.loses = log, loses
        self.index = BlockIndex()

    def send(self, number: int, content: bytes, rng: random.Random) -> None:
        if rng.random() >= self.loses:
            if number > self.index.number + 1:
                self.catch_up()
            if number > self.index.number:
                self.index.take(number, content)

    def catch_up(self) -> None:
        messages = [frames(*message) for message in self.log.since(self.index.number + 1, 0.5)]
        self.index.seen["replays"] += 1
        self.index.seen["replays of the whole"] += (
            len(messages) > 0 and int.from_bytes(messages[0][0]) != self.index.number + 1
        )
        for number, content in messages:
            self.index.take(int.from_bytes(number), content)
        assert self.index.number == self.log.number


class Watcher:
    """Publishes a scheduler's events after each step, and compares what routers know with its
    prefix cache.
    """

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.scheduler, self.rng = scheduler, random.Random(seed)
        self.log = KvEventLog(self.rng.choice([-1, 10**18]))
        scheduler.prefixes.on_change = self.log.changes.append
        self.routers = [Router(self.log, loses) for loses in (0.0, 0.3, 0.9)]
        self.seen: Counter[str] = Counter()
        self.publish()

    def publish(self) -> None:
        number = self.log.number
        message = self.log.take(0.5)
        assert (message is None) == (self.log.number == number) and self.log.take(0.5) is None
        if message is not None:
            assert (self.log.number, message[0]) == (number + 1, number + 1)
            for router in self.routers:
                head, content = frames(*message)
                router.send(int.from_bytes(head), content, self.rng)
        self.compare(self.routers[0])
        if self.rng.random() < 0.1:
            for router in self.routers[1:]:
                router.catch_up()
                self.compare(router)

    def compare(self, router: Router) -> None:
        blocks = self.scheduler.prefixes.blocks
        assert router.index.problems(blocks) == []
        self.seen["compared"] += bool(blocks)

    def predict(self, prompt: list[int]) -> None:
        """What a router expects of a prompt is what the engine finds. With windows the engine may
        also need pages that are gone.
        """
        layout = self.scheduler.limits.layout
        links = links_of(prompt, size=layout.page_size)
        found = len(self.scheduler.prefixes.match(links))
        expected = self.routers[0].index.num_cached(prompt, layout.page_size)
        has_windows = any(group.window is not None for group in layout.groups)
        assert found <= expected if has_windows else found == expected
        self.seen["predicted hits"] += found > 0

    def end(self) -> Counter[str]:
        for router in self.routers:
            router.catch_up()
            self.compare(router)
            self.seen += router.index.seen
        return self.seen


def watched(kind: type[History]) -> Callable[[int], History]:
    """Histories of a kind whose events are published after each step, as the worker does."""

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.watcher = Watcher(self.scheduler, seed)

        def submit(self) -> None:
            super().submit()
            self.watcher.predict(self.requests[len(self.requests) - 1][0])

        def step(self) -> None:
            super().step()
            self.watcher.publish()

        def run(self) -> Counter[str]:
            super().run()
            return self.watcher.end()

    return Watched


KINDS = (
    "compared",
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "predicted hits",
    "replays",
    "replays of the whole",
)


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", [History, OverlappedHistory])
def test_routers_know_the_blocks_of_the_engine(kind: type[History], part: int) -> None:
    seen = run_histories(range(part, SEEDS, 2), watched(kind))
    assert min(seen[name] for name in KINDS) > 50, seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", [History, OverlappedHistory])
def test_routers_know_the_blocks_of_the_engine_in_many_histories(kind: type[History]) -> None:
    run_histories(range(SEEDS, MANY), watched(kind))


def cache_with(tokens: list[int], salt: str, log: KvEventLog) -> PrefixCache:
    allocator, layout = PageAllocator(8), one_group(4)
    prefixes = PrefixCache(allocator, layout)
    table = PageTable(allocator, layout)
    prefixes.on_change = log.changes.append
    table.grow(len(tokens), len(tokens))
    for index, link in enumerate(links_of(tokens, salt)):
        prefixes.publish(link, table, index)
    return prefixes


@pytest.mark.parametrize("salt", ["", "se:cret"])
def test_the_first_block_names_the_salt_but_not_the_caller(salt: str) -> None:
    log, index = KvEventLog(0), BlockIndex("caller:")
    cache_with([1, 2, 3, 4, 5, 6, 7, 8], f"caller:{salt}", log)
    message = log.take(0.5)
    assert message is not None
    number, content = frames(*message)
    assert number == (1).to_bytes(8, "big") and b"caller" not in content
    index.take(1, content)
    assert [place[1:] for place in index.blocks.values()] == [
        ((1, 2, 3, 4), salt),
        ((5, 6, 7, 8), ""),
    ]
    assert (
        index.num_cached([1, 2, 3, 4, 5, 6, 7, 8, 9], 4, salt) == 2
        and index.num_cached([1, 2, 3, 4], 4, "other") == 0
    )


def test_a_block_that_is_stored_again_in_the_same_step_is_removed_before() -> None:
    """Events of one message keep their order."""
    log, index = KvEventLog(0), BlockIndex("")
    prefixes = cache_with([1, 2, 3, 4], "", log)
    (block,) = prefixes.blocks.values()
    prefixes.retract(block)
    prefixes.retract(block)
    cache_with([1, 2, 3, 4], "", log)
    message = log.take(0.5)
    assert message is not None
    index.take(1, frames(*message)[1])
    assert len(index.blocks) == 1 and index.seen == {
        "AllBlocksCleared": 1,
        "BlockStored": 2,
        "BlockRemoved": 1,
    }


def test_a_new_log_is_above_an_old_one_and_says_that_nothing_is_there() -> None:
    """A subscriber that has only the old engine's messages sees a gap, and gets the new engine's
    state whatever number it asks for.
    """
    old, new, index = KvEventLog(0), KvEventLog(100), BlockIndex("")
    for log in (old, new):
        assert log.since(0, 0.5) == [(log.number, 0.5, [None])], (
            "asked before anything was published"
        )
    cache_with([1, 2, 3, 4], "", old)
    cache_with([5, 6, 7, 8], "", new)
    old_message, new_message = old.take(0.5), new.take(0.5)
    assert old_message is not None and new_message is not None
    index.take(1, frames(*old_message)[1])
    with pytest.raises(ValueError, match="after 1"):
        index.take(102, frames(102, 0.5, new_message[2][1:])[1])
    for message in new.since(index.number + 1, 0.5):
        index.take(message[0], frames(*message)[1])
    assert [place[1] for place in index.blocks.values()] == [(5, 6, 7, 8)]
    assert new.since(102, 0.5) == [] and new.since(2**64 - 1, 0.5) == []
