"""The share of the floor that is to be expected of the workload, piece by piece, from pieces that
were measured on a card.

    python -m bench.gpu.expected

Pieces: microseconds of a captured step of StarCoderBase-1B's shape in bfloat16 on an H100, by rows,
of docs/performance.md and of the trials after it. Between measured points they are straight lines;
attention's, by the keys of a step. A step is the sum of its pieces, or the host's time where that
is longer; what a host that is little shorter than a step loses, because it is late now and then, is
the difference to the measured time. Invariant: "rest and gaps" is what a measured step has beyond
its pieces, so that the model agrees with every step that was measured. Of an H200 nothing was
measured: a piece there takes what it takes on an H100, less its floor on an H100, and its floor on
an H200. Pure arithmetic, no torch.
"""

import sys
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.gpu.common import WORKLOADS
from bench.gpu.floor import Ceilings, Shape, Workload, nano_vllm, workload_seconds
from bench.gpu.pictures import table

SHAPE = Shape(1_120_430_080, 24, 16, 128)
HEAD = 49152 * 2048
"""Parameters of the head, which is a product of its own."""
H100 = Ceilings(3.03e12, 801e12)
"""Measured."""
H200 = replace(H100, bandwidth=H100.bandwidth * 4.8 / 3.35)
"""Inferred: the ratio of the vendor's bandwidths, and the same arithmetic."""
SIZES = 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256
"""Rows of captured steps."""
STEP_TOKENS = 4096
Points = Mapping[int, float]

# At one row with the sums of split-K, 45.
PRODUCTS: Points = {
    1: 1033,
    64: 1111,
    128: 1184,
    256: 1305,
}
HEADS: Points = {1: 72, 64: 75, 128: 80, 256: 89}
MEASURED_ROWS = 1, 32, 64, 128, 256
KEYS = {1: 1024} | {rows: rows * 840 for rows in MEASURED_ROWS[1:]}
"""Keys of the steps that were measured as a whole, by rows."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One state of the engine: its pieces, measured steps as a whole with the draw, a prefill step,
    and tokens per second as measured.
    """

    name: str
    attention: Points
    """By keys of the step: attention, storing and joining."""
    norms: Points
    """Norms, additions and the activation, where this is no part of the product."""
    draw: Points
    steps: Points
    """Of the measured whole, by rows."""
    prefill: float
    """A step of STEP_TOKENS."""
    measured: tuple[float, float]
    """Tokens per second of the workload, the least and the most of some rounds."""


TODAY = Engine(
    "as shipped",
    attention={1024: 284, 53760: 499, 107520: 802, 215040: 1356, 524288: 2798},
    norms={1: 335, 64: 364, 128: 382, 256: 436},
    draw={1: 66, 64: 115, 256: 289},
    steps={1: 1929, 32: 2160, 64: 2307, 128: 2760, 256: 3605},  # 128: 2,672 was measured greedily.
    prefill=20_600,
    measured=(34_009, 35_109),
)
CHANGED = Engine(
    "five changes",
    attention={1024: 245, 26880: 329, 53760: 422, 107520: 638, 215040: 1099, 524288: 2398},
    norms={1: 86, 256: 123},
    draw={1: 5, 32: 11, 64: 17, 128: 30, 256: 55},
    steps={1: 1556, 32: 1751, 64: 1841, 128: 2117, 256: 2727},
    prefill=14_400,
    measured=(39_347, 42_599),
)
ENGINES = TODAY, CHANGED
HOST = 600.0
"""Of a step of 256 rows, as it is to become; with fewer rows it takes as much less."""
PIECES = "products", "head", "attention with store and join", "add + norm", "draw", "rest and gaps"


def at(points: Points, x: float) -> float:
    """On straight lines between the points, and on the last line beyond them."""
    xs = sorted(points)
    place = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    (x0, y0), (x1, y1) = ((xs[i], points[xs[i]]) for i in (place - 1, place))
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def floors(rows: int, keys: float, ceilings: Ceilings) -> dict[str, float]:
    """Microseconds that products, head and attention take at least; what else there is is bound by
    neither bytes nor arithmetic.
    """
    sizes = {"products": SHAPE.streamed - HEAD, "head": HEAD}
    found = {
        name: max(2 * size / ceilings.bandwidth, 2 * size * rows / ceilings.flops) * 1e6
        for name, size in sizes.items()
    }
    return found | {
        "attention with store and join": max(
            keys * SHAPE.key_bytes / ceilings.bandwidth, keys * SHAPE.key_flops / ceilings.flops
        )
        * 1e6
    }


def pieces(engine: Engine, rows: int, keys: float, ceilings: Ceilings = H100) -> dict[str, float]:
    """Microseconds of each piece of a step of so many rows and keys."""

    def measured(rows: int, keys: float) -> dict[str, float]:
        times = (
            at(PRODUCTS, rows),
            at(HEADS, rows),
            at(engine.attention, keys),
            at(engine.norms, rows),
            at(engine.draw, rows),
        )
        return dict(zip(PIECES, times, strict=False))

    size = next(size for size in SIZES if size >= rows)
    found = measured(size, keys)
    rest = {
        rows: engine.steps[rows] - sum(measured(rows, KEYS[rows]).values())
        for rows in MEASURED_ROWS
    }
    here, there = floors(size, keys, H100), floors(size, keys, ceilings)
    return {
        name: time + there.get(name, 0.0) - here.get(name, 0.0) for name, time in found.items()
    } | {PIECES[-1]: at(rest, size)}


def workload_of(
    engine: Engine, workload: Workload, ceilings: Ceilings
) -> tuple[dict[str, float], float]:
    """Seconds of the workload on the device by piece, the prompts last; and those by which HOST is
    longer than its steps.
    """
    totals, lost = dict.fromkeys(PIECES, 0.0), 0.0
    for step in range(1, max(workload.outputs) + 1):
        contexts = [
            len(p) + step - 1
            for p, count in zip(workload.prompts, workload.outputs, strict=True)
            if count >= step
        ]
        found = pieces(engine, len(contexts), sum(contexts), ceilings)
        for name, time in found.items():
            totals[name] += time / 1e6
        lost += max(0.0, HOST * len(contexts) / 256 - sum(found.values())) / 1e6
    return totals | {
        "prefill": sum(map(len, workload.prompts)) / STEP_TOKENS * engine.prefill / 1e6
    }, lost


def report() -> str:
    """The tables: a step of 256 rows, and the workload."""
    cards, workload = {"H100": H100, "H200": H200}, nano_vllm(*WORKLOADS[False])
    columns = [(card, limits, engine) for card, limits in cards.items() for engine in ENGINES]
    names = [f"{card}, {engine.name}" for card, _, engine in columns]
    steps = [pieces(engine, 256, 256 * 840, limits) for _, limits, engine in columns]
    rows = [(name, *(f"{step[name]:,.0f}" for step in steps)) for name in PIECES]
    text = table(
        ("us of a step, 256 x 840", *names),
        [*rows, ("sum", *(f"{sum(step.values()):,.0f}" for step in steps))],
    )
    found = [workload_of(engine, workload, limits) for _, limits, engine in columns]
    rows = [
        (name, *(f"{totals[name]:.2f}" for totals, _ in found)) for name in (*PIECES, "prefill")
    ]
    lengths, count = [len(prompt) for prompt in workload.prompts], workload.num_tokens
    floor = [workload_seconds(SHAPE, lengths, workload.outputs, limits) for _, limits, _ in columns]
    seconds = [sum(totals.values()) + lost for totals, lost in found]
    # Of the best round and of the worst.
    measured = [
        [count / rate for rate in engine.measured[::-1]] if limits is H100 else []
        for _, limits, engine in columns
    ]
    shares = [
        " to ".join(f"{limit / each:.0%}" for each in times[::-1]) or "-"
        for limit, times in zip(floor, measured, strict=True)
    ]
    losses = [
        " to ".join(f"{each - device:.2f}" for each in times) or "-"
        for device, times in zip(seconds, measured, strict=True)
    ]
    rows += [
        (f"lost to a host of {HOST / 1e3} ms", *(f"{lost:.2f}" for _, lost in found)),
        ("sum", *(f"{each:.2f}" for each in seconds)),
        ("floor", *(f"{each:.2f}" for each in floor)),
        ("expected: tokens/s", *(f"{count / each:,.0f}" for each in seconds)),
        (
            "expected: share of the floor",
            *(f"{each / whole:.0%}" for each, whole in zip(floor, seconds, strict=True)),
        ),
        ("measured: share of the floor", *shares),
        ("so lost to the host that it had", *losses),
    ]
    return text + table(("seconds of the workload", *names), rows)


if __name__ == "__main__":
    sys.stdout.write(report())
