"""Deterministic simulation of a whole server in one thread under a simulated clock: the real
Supervisor, Worker, EngineCore, Scheduler and StreamStore, with seeded faults between and inside
them, and every invariant checked throughout.

`run(seed)` runs one history, always the same one, and counts what occurred in it. A Violation, or
any exception that was not planted, is a bug: `failure(seed)` shows it with the history before it.
`sweep` makes the n-th call of one standard history fail, for every n. Invariants (numbered as in
the design): one end for each request (I1), event numbers without gap or repeat for each reader
(I2), tokens equal to the oracle's (I3, I7), nothing after the end (I5), every page free or owned,
and free when idle (I6), an end within a computed bound once faults stop (I8), not READY while
nothing progresses (I10); and no request fails without a fault that explains it.

    python -m tests.simulation.simulation SEED...   the histories of these seeds
"""

import logging
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from unittest import mock

from server.engine import fair_shares
from tests.simulation.clients import QUANTUM, give_clients
from tests.simulation.front import Violation
from tests.simulation.plan import PATIENCE, plan, standard
from tests.simulation.world import FailNth, World

REAL_MODEL_EVERY = 10
"""One seed in this many runs hash_model's model, with sliding windows."""
SPECULATION_EVERY = 3
"""One seed in this many uses speculative decoding."""
OVERLAP_EVERY = 3
"""One seed in this many launches a step before the previous one has finished."""
ONE_CLIENT_EVERY = 4
"""One seed in this many has a single client."""
MASK_SECONDS = (0.0, 0.5, 2.0 * PATIENCE.stall, 0.0, 0.1)
"""The longest that constraints take to answer, by turns of the seed."""
COMMON = """
clock: a jump; frame: a submission left out; frame: garbage; frame: held back,
and more after it; frame: later than the exit;
frame: left out; frame: twice; hung: and beats; hung: and is silent; killed: at receive; killed: at run; killed: at ran; killed: at send;
killed: between two operations; killed: over several; killed: twice; killed: while loading; load: die; load: hang; load: refused;
load: slow; mask: waited for; memory: a step row by row; outcome: admission_error; outcome: cancelled;
outcome: engine_unavailable; outcome: finished;
outcome: grammar_error; outcome: numerical_error; outcome: out_of_memory; outcome: refused; outcome: request_quarantined;
outcome: server_shutting_down; path: a gap; path: a suspect alone; path: an event from the future;
path: killed, it showed no progress; path: killed, it skipped tokens of; path: killed,
it was not loaded; path: expired;
path: given up; path: preempted for another client;
path: layers with windows; path: lost; path: pages shared; path: preempted; path: read again at the end;
path: recalled,
and sent again; path: replayed after its tokens; path: resumed; path: scores; path: stopped;
path: stopped by its client; path: stopped for want of a reader; path: superseded; poison: crashes;
poison: enters; poison: hangs; poison: kills;
path: two steps in flight; path: a guess came true; path: a guess was wrong; spawn: failed; transport: an engine killed for garbage
"""  # noqa: E501
"""What must occur at least once in a hundred histories for them to be a useful test."""


def common() -> list[str]:
    return [name.strip() for name in COMMON.replace("\n", " ").split(";")]


def make(seed: int, record: bool = False) -> World:
    """The world of a seed."""
    windows = seed % REAL_MODEL_EVERY == 0
    scenario = plan(random.Random(seed).random, windows)
    scenario.speculates = seed % SPECULATION_EVERY == 1
    scenario.mask_seconds = MASK_SECONDS[seed % len(MASK_SECONDS)]
    scenario.overlaps = seed % OVERLAP_EVERY == 2
    if seed % ONE_CLIENT_EVERY:
        give_clients(scenario, seed)
    return World(scenario, windows, record=record)


def run(seed: int) -> Counter[str]:
    """Runs one history and returns what occurred in it. Raises on a violation."""
    world = make(seed)
    _run(world)
    return world.seen


def _run(world: World) -> None:
    with mock.patch.object(fair_shares, "QUANTUM", QUANTUM):
        world.run()


def failure(world: World) -> str:
    """The violation in a world's history and the events before it; empty if there is none."""
    world.record = True
    try:
        _run(world)
    except Exception as error:
        where = "" if isinstance(error, Violation) else traceback.format_exc()
        return "\n".join(
            [f"{type(error).__name__}: {error}", *world.describe(), *world.history, where]
        )
    return ""


def sweep(how: str) -> Iterator[tuple[str, World]]:
    """The standard history with its first, second, ... call failing, until no call is left: yields
    the call, and the world before it runs.
    """
    number, struck = 1, "something"
    while struck:
        fail = FailNth(number, how)
        world = World(standard(random.Random(0).random), fail_nth=fail)
        yield how, world
        number, struck = number + 1, fail.struck


def silence() -> None:
    """Silences the log, as histories are full of engine crashes."""
    logging.getLogger("onehead").setLevel(logging.CRITICAL + 1)


def main() -> None:
    silence()
    for seed in map(int, sys.argv[1:]):
        world = make(seed)
        print(
            f"seed {seed}:",
            failure(world) or "\n".join(["all is well", *world.describe(), *world.history]),
        )


if __name__ == "__main__":
    main()
