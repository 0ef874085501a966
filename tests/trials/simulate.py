"""A million histories of a simulated server (tests/simulation): everything that can go wrong, and
what must hold all the same.

    python -m tests.trials.simulate [--seeds 1000000] [--first 0] [--workers 2] [--output DIR]

Each seed is one history of the real supervisor, engine loop, scheduler and stream store under a
virtual clock, with up to three kinds of fault. Prints how often each fault and each rare path came
up, and writes simulate.json into DIR; a seed that fails is printed with its history. Exit status 1
if a history breaks an invariant, or if something came up in less than one of a hundred histories.
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.simulation import simulation
from tests.support.report import Check, conclude, progress, show

CHUNK = 500
TOLD = 20
"""Failing seeds whose history is told."""
SHARE = 0.01
"""Of all histories, those in which each thing must have come up."""


def run_chunk(seeds: range) -> tuple[Counter[str], list[int], float]:
    """What came up in these histories, those that failed, and the processor's seconds."""
    simulation.silence()
    seen: Counter[str] = Counter()
    failed = []
    began = time.process_time()
    for seed in seeds:
        try:
            seen.update(simulation.run(seed))
        except Exception:
            failed.append(seed)
    return seen, failed, time.process_time() - began


def run_all(seeds: range, workers: int) -> tuple[Counter[str], list[int], float]:
    """As `run_chunk`, in so many processes."""
    seen: Counter[str] = Counter()
    failed: list[int] = []
    seconds = 0.0
    chunks = [seeds[first : first + CHUNK] for first in range(0, len(seeds), CHUNK)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool, progress() as bar:
        task = bar.add_task("histories", total=len(seeds))
        for more, also_failed, took in pool.imap_unordered(run_chunk, chunks):
            seen.update(more)
            failed += also_failed
            seconds += took
            bar.advance(task, min(CHUNK, len(seeds) - int(bar.tasks[0].completed)))
    return seen, sorted(failed), seconds


def tell(seeds: list[int]) -> list[dict[str, Any]]:
    """The failing seeds with their histories; the first of them printed too."""
    simulation.silence()
    told = []
    for seed in seeds[:TOLD]:
        history = simulation.failure(simulation.make(seed)).splitlines()
        print("\n".join([f"seed {seed}: {history[0]}", *history[1:], ""]))
        told.append({"seed": seed, "history": history})
    return told


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    seen, failed, cpu = run_all(
        range(options.first, options.first + options.seeds), options.workers
    )
    seconds = time.perf_counter() - began
    show(
        ("what came up", "times", "of 100,000 histories"),
        ((what, n, round(n * 1e5 / options.seeds)) for what, n in sorted(seen.items())),
    )
    told = tell(failed)
    common = simulation.common()
    rarest = min(common, key=lambda name: seen[name])
    checks = [
        Check(
            "every invariant holds in every history",
            not failed,
            f"{len(failed)} of {options.seeds:,} fail: {failed[:10]}",
        ),
        Check(
            "everything comes up in one of a hundred",
            seen[rarest] >= SHARE * options.seeds,
            f"least of all: {rarest}, {seen[rarest]}",
        ),
    ]
    each = cpu * 1e3 / options.seeds
    print(f"{options.seeds:,} histories in {seconds:.0f} s, {each:.2f} ms of a processor each")
    result = {
        "first": options.first,
        "seeds": options.seeds,
        "workers": options.workers,
        "seconds": seconds,
        "ms_per_seed": each,
        "seen": dict(sorted(seen.items())),
        "num_failures": len(failed),
        "failed": failed[:1000],
        "failures": told,
    }
    return conclude("simulate", options.output, {}, result, checks)


if __name__ == "__main__":
    sys.exit(main())
