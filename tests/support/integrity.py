"""Consistency checks of a scheduler between two steps: pages, claims, token counts and queues agree
with each other.
"""

from collections import Counter
from itertools import chain

from cache.pages import PageAllocator
from cache.prefix import PrefixCache
from cache.table import DROPPED
from model.decode import NO_LINE
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence


def integrity(scheduler: Scheduler) -> list[str]:
    """Inconsistencies, in words; empty if there are none."""
    allocator = scheduler.allocator
    reuse = scheduler._prefix_reuse
    waiting = scheduler.waiting.values()
    problems = allocator_problems(allocator) + prefix_problems(reuse.prefixes)
    holders = [*scheduler.running.values(), *scheduler.ended_in_flight]
    owners = Counter(page for sequence in holders for page in sequence.table.owned)
    if len(owners) != allocator.num_owned or any(
        allocator.owners[page] != number for page, number in owners.items()
    ):
        problems.append(
            f"page tables list {len(owners)} pages and {allocator.num_owned} are owned, or the "
            "numbers of a page's owners differ"
        )
    if {
        name: sequence.id for sequence in scheduler.running.values() for name in sequence.claims
    } != reuse._claims:
        problems.append("claims and running sequences differ")
    if any(sequence.num_tokens != num_tokens(sequence) for sequence in (*holders, *waiting)):
        problems.append("num_tokens of a sequence is wrong")
    if any(sequence.table.owned or sequence.num_in_flight for sequence in waiting):
        problems.append("a waiting sequence holds pages or has a row in flight")
    if not all(sequence.num_in_flight for sequence in scheduler.ended_in_flight):
        problems.append("a sequence that has ended holds pages without a step in flight")
    return problems + _decoding(scheduler)


def allocator_problems(allocator: PageAllocator) -> list[str]:
    """What is inconsistent in an allocator, in words; empty when all is well."""
    problems = []
    free, cached = allocator._free, allocator.cached
    if len(set(free)) != len(free):
        problems.append("a page is on the free list twice")
    for page, owners in enumerate(allocator.owners):
        if owners < 0:
            problems.append(f"page {page} has {owners} owners")
    unowned = {page for page, owners in enumerate(allocator.owners) if owners == 0}
    if unowned != {*free, *cached} or not cached.keys().isdisjoint(free):
        wrong = sorted(unowned ^ {*free, *cached})
        problems.append(f"pages {wrong} are owned, cached or free, but not exactly one of these")
    if cached.keys() != {page for page in unowned if allocator.kept[page]}:
        problems.append("a page is cached and not worth keeping, or the other way round")
    return problems


def prefix_problems(cache: PrefixCache) -> list[str]:
    """What is inconsistent in a prefix cache, in words; empty when all is well."""
    blocks = chain(cache.blocks.values(), *cache.tails.values())
    listed = {page: block for block in blocks for page in block.pages if page != DROPPED}
    if listed != cache._block_of or listed.keys() != {
        page for page, kept in enumerate(cache._allocator.kept) if kept
    }:
        return ["the pages in the prefix cache and those that the allocator keeps differ"]
    return (
        ["a block in the prefix cache has no pages"]
        if any(set(block.pages) == {DROPPED} for block in cache.blocks.values())
        else []
    )


def _decoding(scheduler: Scheduler) -> list[str]:
    """What is wrong with the lines of the sequences that decode."""
    decoding = scheduler._decoding
    table, problems = decoding._table, []
    if sorted(s.id for s in decoding.sequences) != sorted(
        s.id for s in scheduler.running.values() if s.line >= 0
    ):
        problems.append("the sequences that decode are not those that have a line")
    if not (table.positions_R[len(decoding) :] == NO_LINE).all():
        problems.append("a line of no sequence has a position")
    for line, sequence in enumerate(decoding.sequences):
        limit = min(sequence.table.room, sequence.most_tokens - 1)
        found = (
            sequence.line,
            table.ids[line],
            int(table.positions_R[line]),
            int(decoding._limits_R[line]),
            table.pages[line],
        )
        if found != (line, sequence.id, sequence.num_tokens - 1, limit, sequence.table.pages):
            problems.append(f"line {line} of sequence {sequence.id} is {found}")
        if (
            table.settings_RN[line, -1] != len(sequence.output) + sequence.num_unseen
            or table.samples[line].output is not sequence.output
        ):
            problems.append(
                f"line {line} of sequence {sequence.id} draws output {table.settings_RN[line, -1]}"
            )
        if not sequence.can_decode and sequence.num_tokens < sequence.most_tokens:
            problems.append(f"sequence {sequence.id} decodes and cannot")
        if any(
            DROPPED != page != int(listed[line, place])
            for listed, pages in zip(table.tables, sequence.table.pages, strict=True)
            for place, page in enumerate(pages)
        ):
            problems.append(f"line {line} has other pages than its sequence {sequence.id}")
    return problems


def num_tokens(sequence: Sequence) -> int:
    """The value that `sequence.num_tokens` must have."""
    return len(sequence.prompt) + len(sequence.output) + len(sequence.forced) + sequence.num_unseen
