"""What a look at the KV cache costs the engine between two steps, by pages and running sequences, without a model.

    python -m bench.looks [--pages 512,10000,100000] [--sequences 256] [--looks 200]

The pool is nearly full of pages of running sequences, all of which advance between two looks. "whole" are the
changes and a whole state beside them, as when a viewer joins. Milliseconds, medians and the least; bytes of the message.
"""

import argparse
import statistics
import time

from cache.layout import CacheLayout
from model.step import Sampling
from server import protocol
from server.engine.cache_view import CacheViews
from server.engine.limits import Limits
from server.engine.scheduler import Scheduler
from tests.support.report import show

PAGE_SIZE = 64


def full(num_pages: int, num_sequences: int) -> Scheduler:
    """A scheduler whose running sequences hold nearly all pages."""
    tokens = num_pages // num_sequences * PAGE_SIZE
    scheduler = Scheduler(Limits(num_pages, CacheLayout.of(1, (), PAGE_SIZE), tokens + 1, num_sequences, num_sequences))
    for id in range(1, num_sequences + 1):
        scheduler.submit(id, [1] * 8, tokens - 8, Sampling(), request=f"request-{id}")
        sequence = scheduler.running[id] = scheduler.waiting.pop(id)
        sequence.table.grow(tokens, tokens)
    return scheduler


def times(scheduler: Scheduler, is_whole: bool, count: int) -> tuple[float, float, int]:
    """Median and least milliseconds of a look, and the bytes of its answer."""
    views, seconds, size = CacheViews(scheduler), list[float](), 0
    for _ in range(count):
        for sequence in scheduler.running.values():
            sequence.num_computed += 1
        began = time.perf_counter()
        view = views.answer(protocol.Look(is_whole, dump=False))
        size = len(protocol.encode(view))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3, min(seconds) * 1e3, size


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.looks", description="what a look at the KV cache costs the engine")
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    parser.add_argument("--pages", default=[512, 10_000, 100_000], **numbers)  # type: ignore[arg-type]
    parser.add_argument("--sequences", default=[256], **numbers)  # type: ignore[arg-type]
    parser.add_argument("--looks", type=int, default=200)
    options = parser.parse_args()
    rows = []
    for num_pages in options.pages:
        for num_sequences in options.sequences:
            scheduler = full(num_pages, num_sequences)
            for is_whole in (False, True):
                median, least, size = times(scheduler, is_whole, options.looks)
                rows.append([f"{num_pages:,}", num_sequences, "whole" if is_whole else "changes", median, least, f"{size:,}"])
    show(["pages", "sequences", "view", "median ms", "least ms", "bytes"], rows)


if __name__ == "__main__":
    main()
