"""The prefix cache: which sequences share which blocks, which blocks are evicted first, and what is
never shared.
"""

import dataclasses
from collections.abc import Sequence

import pytest

from cache.layout import CacheLayout
from cache.pages import PageAllocator
from cache.prefix import Link, PrefixCache, add_link
from cache.table import DROPPED, PageTable
from model.step import SampleError, Sampling, StepResult
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from tests.support.hash_model import HashModel, one_group
from tests.support.integrity import allocator_problems, integrity, prefix_problems
from tests.support.processes import ServerProcess
from tests.support.submitting import submit

PAGE = 4


def links_of(tokens: Sequence[int], salt: str = "", size: int = PAGE) -> list[Link]:
    links = list[Link]()
    for first in range(0, len(tokens) // size * size, size):
        add_link(links, salt, tokens[first : first + size])
    return links


class Cache:
    """An allocator and a prefix cache, with methods to fill it."""

    def __init__(self, num_pages: int, layout: CacheLayout | None = None) -> None:
        self.layout = layout or one_group(PAGE)
        self.allocator = PageAllocator(num_pages)
        self.prefixes = PrefixCache(self.allocator, self.layout)

    def compute(self, tokens: list[int], salt: str = "") -> PageTable:
        """A page table of these tokens, with every block published."""
        table = PageTable(self.allocator, self.layout)
        table.grow(len(tokens), len(tokens))
        for index, link in enumerate(links_of(tokens, salt)):
            self.prefixes.publish(link, table, index)
        assert self.integrity() == []
        return table

    def found(self, tokens: list[int], salt: str = "") -> int:
        return len(self.prefixes.match(links_of(tokens, salt)))

    def integrity(self) -> list[str]:
        return allocator_problems(self.allocator) + prefix_problems(self.prefixes)


def test_whole_pages_are_found_by_their_tokens_and_all_before_them() -> None:
    cache = Cache(20)
    table = cache.compute([*range(12), 99])
    for _ in range(2):
        assert cache.found([*range(12), 7, 7, 7, 7]) == 3
        assert cache.found([*range(8), 7, 7, 7, 7]) == 2
        assert cache.found([*range(4, 12)]) == 0, "the same tokens after others"
        table.release()  # And when nobody owns them.
    assert cache.allocator.num_owned == 0 and len(cache.allocator.cached) == 3


def test_other_salts_find_nothing() -> None:
    cache = Cache(20)
    cache.compute(list(range(12)), "one")
    assert (
        cache.found(list(range(12)), "one"),
        cache.found(list(range(12)), "another"),
        cache.found(list(range(12))),
    ) == (3, 0, 0)


def test_a_name_alone_is_not_believed() -> None:
    cache = Cache(20)
    cache.compute(list(range(4)))
    (link,) = links_of(list(range(4)))
    forged = dataclasses.replace(link, tokens=links_of([9] * 4)[0].tokens)
    assert cache.prefixes.match([link]) and not cache.prefixes.match([forged])


def test_the_oldest_makes_way_first_and_of_each_its_end() -> None:
    cache = Cache(6)
    old, new = [1] * 12, [2] * 12
    for tokens in (old, new):
        cache.compute(tokens).release()
    for left in ((2, 3), (1, 3), (0, 3), (0, 2)):
        cache.allocator.allocate(1)
        assert (cache.found(old), cache.found(new)) == left and cache.integrity() == []


def test_what_was_used_again_stays_longer() -> None:
    cache = Cache(6)
    old, new = [1] * 12, [2] * 12
    for tokens in (old, new):
        cache.compute(tokens).release()
    again = PageTable(cache.allocator, cache.layout)
    again.share(cache.prefixes.prefix(cache.prefixes.match(links_of(old))))
    again.release()
    cache.allocator.allocate(3)
    assert (cache.found(old), cache.found(new)) == (3, 0)


def test_layers_with_a_window_need_only_its_pages() -> None:
    layout = CacheLayout.of(2, [None, 6], PAGE)
    cache = Cache(20, layout)
    tokens = list(range(16))
    table = cache.compute(tokens)
    table.drop(16)
    blocks = cache.prefixes.match(links_of(tokens))
    whole, windowed = cache.prefixes.prefix(blocks)
    assert DROPPED not in whole and windowed[:2] == [DROPPED] * 2 and DROPPED not in windowed[2:]
    table.release()
    # Until a page that the window needs is gone; an older one is of no use here.
    while cache.found(tokens) == 4:
        cache.allocator.allocate(1)
    assert cache.integrity() == [] and cache.found(tokens) < 4


def test_wrong_numbers_take_what_was_found_off_the_list_too() -> None:
    scheduler = Scheduler(
        Limits(num_pages=40, layout=one_group(4), max_context=100, max_running=2, step_tokens=64)
    )
    core = EngineCore(scheduler, HashModel(one_group(4)))
    submit(scheduler, 0, list(range(30)), 1, Sampling())
    run(scheduler, core)
    for code, found in (("grammar_error", 28), ("numerical_error", 28), ("", 0)):
        submit(scheduler, 1, list(range(30)), 1, Sampling())
        plan = scheduler.plan()
        assert plan.rows[0].start == found
        scheduler.commit(plan, StepResult((SampleError("why", code=code),)))
        assert integrity(scheduler) == []


def run(scheduler: Scheduler, core: EngineCore) -> None:
    while scheduler.has_work:
        core.step()
        assert integrity(scheduler) == []


def test_a_prompt_that_is_being_computed_is_waited_for_not_computed_again() -> None:
    scheduler = Scheduler(
        Limits(num_pages=400, layout=one_group(16), max_context=600, max_running=8, step_tokens=64)
    )
    core = EngineCore(scheduler, HashModel(one_group(16)))
    for id in range(8):
        submit(scheduler, id, [*range(160), id], 5, Sampling(seed=id))
    run(scheduler, core)
    assert scheduler.num_hit_tokens == 7 * 160 and scheduler.num_computed_tokens == 160 + 8 * 5


@pytest.mark.parametrize("how", ["cancelled", "preempted"])
def test_who_waits_for_one_that_leaves_computes_it(how: str) -> None:
    scheduler = Scheduler(
        Limits(num_pages=400, layout=one_group(16), max_context=600, max_running=8, step_tokens=16)
    )
    core = EngineCore(scheduler, HashModel(one_group(16)))
    for id in range(2):
        submit(scheduler, id, [*range(160), id], 5, Sampling(seed=id))
    core.step()
    assert list(scheduler.running) == [0]
    if how == "cancelled":
        scheduler.cancel(0)
    else:
        scheduler._preempt(scheduler.running[0], scheduler.running[0])
    run(scheduler, core)
    assert scheduler.num_hit_tokens == (16 if how == "cancelled" else 160)


def test_a_sequence_that_was_preempted_finds_its_own_pages() -> None:
    scheduler = Scheduler(
        Limits(num_pages=40, layout=one_group(4), max_context=100, max_running=2, step_tokens=64)
    )
    core = EngineCore(scheduler, HashModel(one_group(4)))
    submit(scheduler, 0, list(range(30)), 8, Sampling())
    core.step()
    scheduler._preempt(scheduler.running[0], scheduler.running[0])
    (row,) = scheduler.plan().rows
    assert (row.start, len(row.tokens)) == (28, 3)


def test_whoever_scores_its_prompt_computes_it() -> None:
    scheduler = Scheduler(
        Limits(num_pages=40, layout=one_group(4), max_context=100, max_running=2, step_tokens=64)
    )
    core = EngineCore(scheduler, HashModel(one_group(4)))
    for id in range(2):
        submit(scheduler, id, list(range(30)), 1, Sampling(), score_prompt=bool(id))
        run(scheduler, core)
    assert scheduler.num_computed_tokens == 60 and scheduler.num_hit_tokens == 0


def test_usage_says_what_was_cached_and_salts_keep_apart(embedded_server: ServerProcess) -> None:
    prompt = "".join(
        f"def function_{number}(argument):\n    return {number}\n" for number in range(40)
    )

    def cached(**more: str) -> int:
        status, answer = embedded_server.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0} | more
        )
        assert status == 200
        texts.add(answer["choices"][0]["text"])
        found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    texts: set[str] = set()
    hits = embedded_server.metric("onehead_prefix_cache_hits_total")
    assert cached(cache_salt="a") == 0
    again = cached(cache_salt="a")
    assert again > 0 and again % 64 == 0 and cached(cache_salt="b") == 0
    assert embedded_server.metric("onehead_prefix_cache_hits_total") - hits == again
    assert embedded_server.metric("onehead_kv_pages_cached") > 0 and len(texts) == 1
    infill = {"input_prefix": prompt, "input_suffix": "", "n_predict": 2}
    for cache_prompt, more in ((True, 0), (True, again), (False, 0)):
        before = embedded_server.metric("onehead_prefix_cache_hits_total")
        assert embedded_server.post("/infill", infill | {"cache_prompt": cache_prompt})[0] == 200
        assert embedded_server.metric("onehead_prefix_cache_hits_total") - before == more
    hits = embedded_server.metric("onehead_prefix_cache_hits_total") - again
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 4}, "cache_salt": "b"}
    assert embedded_server.post("/generate", body)[0] == 200
    assert embedded_server.metric("onehead_prefix_cache_hits_total") - hits == 2 * again


def test_integrity_names_a_prefix_that_is_not_kept() -> None:
    cache = Cache(20)
    cache.compute([*range(8)])
    cache.allocator.forget(cache.allocator.kept.index(1))
    assert prefix_problems(cache.prefixes) == [
        "the pages in the prefix cache and those that the allocator keeps differ"
    ]
