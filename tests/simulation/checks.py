"""Checks of a simulated history: of each request when it has ended, and of the server when there is
nothing left to do.

Every token is the oracle's; every failure has a planted cause; all pages and bytes are accounted
for.
"""

from heapq import heappop
from typing import TYPE_CHECKING, Any

from server.supervision.crash_policy import CRASHES_ALONE, MAX_BACKOFF_SECONDS
from server.supervision.supervisor import LIVE, State
from tests.server.engine.test_scheduler import forced_after
from tests.simulation.front import Choice, Follower, Request, Violation
from tests.simulation.model import DRIFT, chain, draw, next_token
from tests.simulation.plan import END_RATE, PATIENCE
from tests.support import hash_model

if TYPE_CHECKING:
    from tests.simulation.world import World

CODES = {
    "nan": "numerical_error",
    "excluded": "refused",
    "memory": "out_of_memory",
    "grammar": "grammar_error",
    "refuse": "refused",
    "admission": "admission_error",
}
AT_A_DRAW = ("nan", "excluded", "memory")


def oracle(choice: Choice, windows: bool) -> list[int]:
    """The output of a choice when it is served alone."""
    give = hash_model.next_token if windows else next_token
    output: list[int] = []
    while len(output) < choice.max_new:
        may_end = len(output) >= choice.min_new or 0 not in choice.stops
        output.append(give(choice.prompt + output, choice.seed, END_RATE, may_end))
        if output[-1] in choice.stops:
            break
        if choice.grammar == "force":
            output += forced_after(output)[: choice.max_new - len(output)]
    return output


def check_tokens(choice: Choice, windows: bool, drift: bool) -> int:
    """Checks that every token is right at its index. Returns the length of the whole output, if it
    can be known.
    """
    tokens = choice.tokens
    if drift:
        states = chain(tokens, choice.states[-1])
        before = choice.states[-1]
        for index, token in enumerate(tokens):
            may_end = index >= choice.min_new or 0 not in choice.stops
            if token not in (
                draw(before, choice.seed, END_RATE, may_end),
                draw(before, choice.seed + DRIFT, END_RATE, may_end),
            ):
                raise Violation(
                    f"sequence {choice.id}: token {index} of {tokens} does not follow from those "
                    "before it"
                )
            before = states[index]
        whole = len(tokens) if choice.finish else choice.max_new
    else:
        expected = oracle(choice, windows)
        whole = len(expected)
        if tokens != expected[: len(tokens)] or (choice.finish and len(tokens) != whole):
            raise Violation(
                f"sequence {choice.id} has {tokens}, finish {choice.finish}; expected {expected}"
            )
    if choice.finish and choice.finish != ("eos_token" if tokens[-1] in choice.stops else "length"):
        raise Violation(
            f"sequence {choice.id} ended as {choice.finish} with {tokens} of {choice.max_new}"
        )
    if choice.finish == "length" and len(tokens) != choice.max_new:
        raise Violation(f"sequence {choice.id} ended at {len(tokens)} tokens of {choice.max_new}")
    if (
        choice.scores
        and tokens
        and choice.scored != [-float(position) for position in range(1, len(choice.prompt))]
    ):
        raise Violation(
            f"sequence {choice.id} has scores {choice.scored} of a prompt of {len(choice.prompt)}"
        )
    return whole


def check_outcome(world: "World", request: Request) -> None:
    """Checks a request that has ended, or has not."""
    if not request.outcome:
        raise Violation("a request has no end")
    for choice in request.choices:
        if not choice.id:
            continue
        whole = check_tokens(choice, world.windows, world.drift)
        if choice.finish and _must_fail(choice, whole):
            raise Violation(
                f"sequence {choice.id} finished with {len(choice.tokens)} tokens in spite of: "
                f"{choice.fault}"
            )
    if request.outcome == "finished":
        if not all(choice.finish for choice in request.choices):
            raise Violation("a request has finished before its choices")
    elif request.outcome != "cancelled":
        assert request.blamed is not None
        if (
            world.scenario.only_requests_fail
            and not request.blamed.fault
            and not world.may_lack_memory
        ):
            raise Violation(
                f"sequence {request.blamed.id} has failed as {request.outcome} for another's fault"
            )
        _check_excuse(world, request.outcome, request.blamed)


def _must_fail(choice: Choice, whole: int) -> bool:
    """Whether a choice whose whole output is that long reaches the token at which it fails."""
    if choice.fault == "admission":
        return True
    if choice.fault in ("grammar", "refuse"):
        return choice.fails_at + 1 < whole
    return bool(choice.fault) and choice.fails_at < whole


def _check_excuse(world: "World", outcome: str, choice: Choice) -> None:
    """Checks that there is a cause for a failure."""
    state = world.supervisor.state
    if outcome == "request_quarantined":
        deaths = (
            sum(engine.dead for engine in world.engines)
            if world.harmed
            else sum(number == 1 for number in choice.deaths)
        )
        excused = choice.fault.startswith("poison") or deaths >= CRASHES_ALONE
    elif outcome == "engine_unavailable":
        excused = bool(world.seen["path: lost"]) or state not in LIVE
    elif outcome == "server_shutting_down":
        excused = world.stopped
    elif outcome == "out_of_memory" and world.may_lack_memory:
        excused = True
    else:
        # A grammar fails over the token after which it cannot continue, which has been delivered.
        at = (
            0
            if choice.fault == "admission"
            else choice.fails_at + (choice.fault in ("grammar", "refuse"))
        )
        # Its last tokens before may have been left out, or have been those of a run that was called
        # off.
        early = len(choice.tokens) < at and (world.harmed or choice.recalled)
        excused = CODES.get(choice.fault) == outcome and (len(choice.tokens) == at or early)
    if not excused:
        what = (
            f"{choice.fault or 'nothing'} at {choice.fails_at}, {len(choice.tokens)} tokens, "
            f"deaths {choice.deaths}"
        )
        raise Violation(f"sequence {choice.id} failed as {outcome} without a reason: {what}")


def check_idle(world: "World", heap: list[Any]) -> None:
    """With every request ended, the engine becomes idle and owns no page, or is gone for good."""
    most = world.now + 2 * (PATIENCE.start + PATIENCE.stall) + MAX_BACKOFF_SECONDS
    while not _at_rest(world):
        world.now, _, callback, argument = heappop(heap)
        callback(argument)
        if world.now > most:
            raise Violation(f"the server does not come to rest: {world.supervisor.state}")
    if world.supervisor.state is not State.READY:
        return
    scheduler = world.engines[-1].core.scheduler
    if not world.engines[-1].hung and (
        scheduler.allocator.num_owned or scheduler.allocator.num_available != world.scenario.pages
    ):
        raise Violation(f"{scheduler.allocator.num_owned} pages are owned by no sequence")


def _at_rest(world: "World") -> bool:
    engine = world.engines[-1]
    if world.supervisor.state not in LIVE:
        return engine.dead
    if engine.hung and engine.script.beats_when_hung and world.supervisor.state is State.READY:
        return True  # An idle engine that beats: nothing shows that it hangs before there is work.
    return world.supervisor.state is State.READY and not world.supervisor.open and engine.quiet


def check_ends(world: "World") -> None:
    """Streams at the end: their owner can still read what is kept, other owners cannot, and the
    byte count is right.
    """
    store = world.store
    kept = [
        r.buffer for r in world.requests if r.buffer is not None and r.buffer.id in store._streams
    ]
    if store.num_bytes != sum(buffer.num_bytes for buffer in kept):
        raise Violation(
            f"the store counts {store.num_bytes} bytes for {[buffer.num_bytes for buffer in kept]}"
        )
    if (
        any(buffer.num_bytes > store.retention.stream_bytes for buffer in kept)
        or store.num_bytes > store.retention.total_bytes
    ):
        raise Violation(f"the store keeps {store.num_bytes} bytes")
    for request in world.requests:
        if request.buffer is None:
            continue
        if request.find("somebody else") is not None:
            raise Violation("a stream is given to somebody else")
        left = [
            follower for follower in request.followers if not follower.gone and follower.superseded
        ]
        if left:
            raise Violation(f"{len(left)} readers do not know that they are superseded")
        follower = Follower(request, int(world.random() * (len(request.log) + 1)))
        if not follower.gone:
            world.seen["path: read again at the end"] += 1
            follower.take()
            if not follower.gone:
                raise Violation("a stream that has ended keeps its reader")
