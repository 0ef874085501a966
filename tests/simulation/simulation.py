"""A whole server in one thread, under a clock that nobody has to wait for: the real Supervisor, Worker, EngineCore, Scheduler and
StreamStore, with seeded faults between and inside them, and every invariant checked as it goes.

`run(seed)` is one history, always the same one; what came up in it is counted. A Violation, or any exception that nobody planted, is a
bug: `failure(seed)` tells it with the history that led there. `sweep` fails the n-th call of one and the same history, for every n.
Invariants (numbered as in the design): one end for each request (I1), event numbers without gap or repeat for each reader (I2), tokens as
the oracle has them (I3, I7), nothing behind the end (I5), every page free or owned, and free when idle (I6), an end within a computed
bound once faults stop (I8), not READY where nothing moves (I10); and nobody fails without a fault that explains it.

    python -m tests.simulation.simulation SEED...   the histories of these seeds
"""

import logging
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator

from tests.simulation.front import Violation
from tests.simulation.plan import plan, standard
from tests.simulation.world import FailNth, World

REAL_MODEL_EVERY = 10
"""One seed in so many runs hash_model's model, over layers with windows."""
SPECULATION_EVERY = 3
"""One in so many guesses tokens."""
OVERLAP_EVERY = 3
"""In how many histories once a step is launched before the one before it is there."""
COMMON = """
clock: a jump; frame: a submission left out; frame: garbage; frame: held back, and more behind it; frame: later than the exit;
frame: left out; frame: twice; hung: and beats; hung: and is silent; killed: at receive; killed: at run; killed: at ran; killed: at send;
killed: between two operations; killed: over several; killed: twice; killed: while loading; load: die; load: hang; load: refused;
load: slow; memory: a step in halves; outcome: admission_error; outcome: cancelled; outcome: engine_unavailable; outcome: finished;
outcome: grammar_error; outcome: numerical_error; outcome: out_of_memory; outcome: refused; outcome: request_quarantined;
outcome: sampling_error; outcome: server_shutting_down; path: a gap; path: a suspect alone; path: an event from the future;
path: killed, it showed no progress; path: killed, it skipped tokens of; path: killed, it was not loaded; path: expired;
path: given up; path: layers with windows; path: lost; path: pages shared; path: preempted; path: read again at the end;
path: recalled, and sent again; path: replayed behind its tokens; path: resumed; path: scores; path: stopped;
path: stopped by its client; path: stopped for want of a reader; path: superseded; poison: crashes;
poison: enters; poison: hangs; poison: kills;
path: two steps in flight; path: a guess came true; path: a guess was wrong; spawn: failed; transport: an engine killed for garbage
"""
"""What must come up at least once in a hundred histories, or they are worth little."""


def common() -> list[str]:
    return [name.strip() for name in COMMON.replace("\n", " ").split(";")]


def make(seed: int, record: bool = False) -> World:
    """The world of a seed."""
    windows = seed % REAL_MODEL_EVERY == 0
    scenario = plan(random.Random(seed).random, windows)
    scenario.speculates = seed % SPECULATION_EVERY == 1
    scenario.overlaps = seed % OVERLAP_EVERY == 2
    return World(scenario, windows, record=record)


def run(seed: int) -> Counter[str]:
    """One history; what came up in it. Raises whatever is wrong."""
    world = make(seed)
    world.run()
    return world.seen


def failure(world: World) -> str:
    """What is wrong with a world's history, and how it came to that; empty where all is well."""
    world.record = True
    try:
        world.run()
    except Exception as error:
        where = "" if isinstance(error, Violation) else traceback.format_exc()
        return "\n".join([f"{type(error).__name__}: {error}", *world.describe(), *world.history, where])
    return ""


def sweep(how: str) -> Iterator[tuple[str, World]]:
    """The standard history with its first, second, ... call failing, until there is none left to fail: which call it was, and the world
    before it runs.
    """
    number, struck = 1, "something"
    while struck:
        fail = FailNth(number, how)
        world = World(standard(random.Random(0).random), fail_nth=fail)
        yield how, world
        number, struck = number + 1, fail.struck


def silence() -> None:
    """The histories are full of engines' deaths, which the log need not tell of."""
    logging.getLogger("onehead").setLevel(logging.CRITICAL + 1)


def main() -> None:
    silence()
    for seed in map(int, sys.argv[1:]):
        world = make(seed)
        print(f"seed {seed}:", failure(world) or "\n".join(["all is well", *world.describe(), *world.history]))


if __name__ == "__main__":
    main()
