"""The simulated server: a thousand histories, every call of one history made to fail, and mutants,
each of which must be found.
"""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation import simulation
from tests.simulation.mutants import MUTANTS, Mutant, caught

SEEDS, PARTS = 1000, 8


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    level = logging.getLogger("onehead").level
    simulation.silence()
    yield
    logging.getLogger("onehead").setLevel(level)


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_goes_wrong_every_request_ends_once_and_rightly(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        try:
            seen += simulation.run(seed)
        except Exception:
            pytest.fail(f"seed {seed}: {simulation.failure(simulation.make(seed))}", pytrace=False)
    # The histories are worth something only if much goes wrong in them.
    assert len([name for name in simulation.common() if seen[name]]) > 40, seen


def test_a_seed_is_always_the_same_history() -> None:
    for seed in range(20):
        first, second = (simulation.make(seed, record=True) for _ in range(2))
        first.run()
        second.run()
        assert (
            first.history == second.history and len(first.history) > 5 and first.seen == second.seen
        )


@pytest.mark.parametrize("how", ["kill", "crash", "hang", "memory"])
def test_any_one_call_may_fail_and_nobody_notices(how: str) -> None:
    """Two exceptions: a request fails if its row alone does not fit into memory, and the server
    ends if the first engine cannot be spawned.
    """
    struck: Counter[str] = Counter()
    for _, world in simulation.sweep(how):
        wrong = simulation.failure(world)
        assert not wrong, wrong
        struck[world.struck] += 1
        outcomes = {request.outcome for request in world.requests}
        assert outcomes <= {"finished", "cancelled"} | (
            {"out_of_memory"} if how == "memory" else set()
        )
    assert struck.pop("") == 1, "the last history has fewer calls than were to fail, and no other"
    assert struck["spawn"] == 1 and set(struck) == {
        "spawn",
        "send to the engine",
        "receive",
        "send",
        "run",
        "ran",
        "allocate",
    }
    assert sum(struck.values()) > 80


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    result = caught(mutant)
    print(f"{mutant.what}: after {result.histories} histories, {result.found}")
    assert result.histories is not None


def test_a_violation_is_told_with_its_history() -> None:
    leak = next(mutant for mutant in MUTANTS if mutant.what == "a leaked page")
    result = caught(leak)
    assert result.histories is not None
    with leak.planted():
        text = simulation.failure(simulation.make(result.histories - 1))
    assert text.startswith("Violation: pages") and "faults: " in text and "state ready" in text
    assert simulation.failure(simulation.make(result.histories - 1)) == ""
