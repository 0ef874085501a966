"""The supervisor as a state machine: no token is lost or repeated through engine crashes, and
hopeless restarts end.
"""

import random
from collections.abc import Callable

import pytest

from server import protocol
from server.supervision.crash_policy import (
    BACKOFF_SECONDS,
    CRASHES_ALONE,
    MAX_BACKOFF_SECONDS,
    MAX_QUARANTINES,
    MAX_UNATTRIBUTED_CRASHES,
    MIN_LOADS,
    MIN_RECOVERY,
    SUSPECT_CRASHES,
    Timeouts,
)
from server.supervision.engine import EngineEvent
from server.supervision.journal import SequenceEvent
from server.supervision.supervisor import STABLE_SECONDS, State, Supervisor
from tests.support.fake_engine import READY
from tests.support.hash_model import next_token, oracle

RECOVERY = 60.0
PATIENCE = Timeouts(stall=10.0, start=600.0, recovery=RECOVERY)


class ScriptedEngine:
    """An engine whose messages and exit the test decides."""

    def __init__(
        self, on_message: Callable[[protocol.FromEngine], None], on_exit: Callable[[int], None]
    ) -> None:
        self.on_message = on_message
        self.on_exit = on_exit
        self.sent: list[protocol.ToEngine] = []
        self.open: dict[int, protocol.Submit] = {}

    def send(self, message: protocol.ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, protocol.Submit):
            assert message.id not in self.open
            self.open[message.id] = protocol.decode_to_engine(protocol.encode(message))  # type: ignore[assignment]
        elif isinstance(message, protocol.Cancel):
            self.open.pop(message.id, None)

    def kill(self) -> None:
        self.on_exit(-9)

    def step(self) -> None:
        """Sends one token for every open sequence."""
        self.on_message(started(list(self.open)))
        tokens = []
        for submit in list(self.open.values()):
            ends = 0 in submit.stop_token_ids
            token = next_token(
                submit.prompt + submit.output,
                submit.sampling.seed,
                0.1 if ends else 0.0,
                may_end=ends,
            )
            submit.output.append(token)
            finish = (
                "eos_token"
                if token == 0
                else "length"
                if len(submit.output) >= submit.max_new_tokens
                else None
            )
            tokens.append(protocol.Token(submit.id, len(submit.output) - 1, token, -1.0, finish))
            if finish:
                del self.open[submit.id]
        self.on_message(protocol.Tokens(tokens, protocol.Gauges(len(self.open), 0, 0, 0, 0.0)))


def started(ids: list[int]) -> protocol.Started:
    return protocol.Started(ids, [0] * len(ids))


class Bench:
    """A supervisor, its engines so far, and every event it delivered."""

    def __init__(self, timeouts: Timeouts = PATIENCE) -> None:
        self.engines: list[ScriptedEngine] = []
        self.states: list[State] = []
        self.events: list[EngineEvent] = []
        self.delivered: dict[int, list[SequenceEvent]] = {}
        self.fail_spawns = 0
        self.supervisor = Supervisor(self._spawn, self.states.append, self.events.append, timeouts)
        self.supervisor.start()

    def _spawn(self, *callbacks: Callable[..., None]) -> ScriptedEngine:
        if self.fail_spawns:
            self.fail_spawns -= 1
            raise OSError(11, "no more processes")
        self.engines.append(ScriptedEngine(*callbacks))
        return self.engines[-1]

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[-1]

    def submit(self, seed: int = 0, max_new: int = 10, ends: bool = True) -> int:
        inbox: list[SequenceEvent] = []
        stops = [0] if ends else []
        submit = protocol.Submit(
            0, [1, 2, seed], [], max_new, 0, stops, protocol.Sampling(seed=seed)
        )
        id = self.supervisor.submit(submit, inbox.append)
        self.delivered[id] = inbox
        return id

    def check(self, id: int, request: tuple[int, int], is_cancelled: bool) -> None:
        """A request (seed, max_new) has had its tokens and one end, or some of its tokens if it was
        cancelled.
        """
        seed, max_new = request
        expected = oracle([1, 2, seed], max_new, 0, frozenset({0}), seed, 0.1)
        ends = [
            event
            for event in self.delivered[id]
            if isinstance(event, protocol.Failed) or event.finish is not None
        ]
        if is_cancelled:
            assert self.tokens(id) == expected[: len(self.tokens(id))]
        else:
            assert (
                self.tokens(id) == expected and len(ends) == 1 and ends[0] is self.delivered[id][-1]
            ), seed

    def tokens(self, id: int) -> list[int]:
        return [event.token for event in self.delivered[id] if isinstance(event, protocol.Token)]


@pytest.mark.parametrize("part", range(4))
def test_streams_go_on_exactly_through_deaths(part: int) -> None:
    for seed in range(part, 2000, 4):
        rng = random.Random(seed)
        bench = Bench()
        bench.engine.on_message(READY)
        asked: dict[int, tuple[int, int]] = {}
        cancelled: set[int] = set()
        progress = True
        for _ in range(rng.randint(5, 80)):
            event = rng.random()
            if event < 0.2:
                request = rng.randrange(1000), rng.randint(1, 15)
                asked[bench.submit(*request)] = request
            elif event < 0.25 and asked:
                id = rng.choice(list(asked))
                bench.supervisor.cancel(id)
                cancelled.add(id)
            elif event < 0.35 and progress:
                old = bench.engine
                old.kill()
                assert bench.engine is not old
                if rng.random() < 0.5:
                    old.step()  # A late word of the dead epoch changes nothing.
                bench.engine.on_message(READY)
                progress = False
            else:
                progress = progress or bool(bench.engine.open)
                bench.engine.step()
        while bench.supervisor.open:
            bench.engine.step()
        for id, request in asked.items():
            bench.check(id, request, id in cancelled)


def test_the_last_words_of_a_dead_engine_count_for_nothing() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    id = bench.submit()
    old = bench.engine
    old.kill()
    bench.engine.on_message(READY)
    old.on_message(protocol.Failed(id, "late"))
    old.on_message(protocol.Refused("late"))
    old.on_exit(1)
    assert (
        bench.delivered[id] == []
        and bench.supervisor.state is State.READY
        and len(bench.engines) == 2
    )


def test_its_status_says_how_far_an_engine_is_and_why_it_replaces_another() -> None:
    bench = Bench()
    supervisor = bench.supervisor
    assert supervisor.status == "starting"
    bench.engine.on_message(protocol.Loading("loading weights 40 %"))
    assert supervisor.status == "loading weights 40 %"
    bench.engine.on_message(READY)
    assert supervisor.status == "ready"
    bench.submit()
    bench.engine.kill()
    assert supervisor.status == "restarting after the engine ended with status -9: starting"
    bench.engine.on_message(protocol.Loading("measuring memory"))
    assert supervisor.status == "restarting after the engine ended with status -9: measuring memory"
    bench.engine.on_message(READY)
    assert supervisor.status == "ready"
    bench.engine.on_exit = lambda status: None  # What is killed now takes its time to end.
    supervisor.tick(PATIENCE.stall)
    assert supervisor.status == "restarting after the engine showed no progress for 10 s: starting"
    supervisor.stop()
    assert supervisor.status == "stopped"


def refuse(bench: Bench) -> None:
    """The current engine cannot be loaded."""
    bench.engine.on_message(protocol.Refused("config.json: no such file"))


def die_loading(bench: Bench) -> None:
    bench.engine.on_exit(1)


FAILED_LOADS: dict[Callable[[Bench], None], tuple[State, str]] = {
    refuse: (State.REFUSED, "could not be loaded: config.json: no such file"),
    die_loading: (State.GAVE_UP, "ended with status 1 while it was loaded"),
}


@pytest.mark.parametrize("fail", FAILED_LOADS, ids=lambda fail: fail.__name__)
def test_a_reload_that_fails_is_tried_until_requests_wait_no_more_and_says_its_reason(
    fail: Callable[[Bench], None],
) -> None:
    state, reason = FAILED_LOADS[fail]
    bench = Bench()
    supervisor = bench.supervisor
    bench.engine.on_message(READY)
    id = bench.submit(max_new=100)
    bench.engine.step()
    bench.engine.kill()
    waited, pauses = 0.0, []
    while supervisor.state is State.STARTING:
        number = len(bench.engines)
        fail(bench)
        pause = 0.0
        while supervisor.state is State.STARTING and len(bench.engines) == number:
            assert supervisor.status == f"restarting after the engine {reason}: starting"
            supervisor.tick(BACKOFF_SECONDS)
            pause += BACKOFF_SECONDS
        pauses.append(pause)
        waited += pause
        assert waited < RECOVERY + 2 * MAX_BACKOFF_SECONDS
    assert supervisor.state is state and supervisor.reason.endswith(f"the last one {reason}")
    assert waited >= RECOVERY and pauses[:6] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0], (
        "with pauses that grow"
    )
    *_, failed = bench.delivered[id]
    assert (
        isinstance(failed, protocol.Failed)
        and failed.code == "engine_unavailable"
        and reason in failed.reason
    )
    (late,) = bench.delivered[bench.submit()]
    assert isinstance(late, protocol.Failed) and reason in late.reason


@pytest.mark.parametrize("fail", FAILED_LOADS, ids=lambda fail: fail.__name__)
def test_a_reload_that_fails_for_a_while_costs_no_request_anything(
    fail: Callable[[Bench], None],
) -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    id = bench.submit(seed=5, ends=False)
    bench.engine.step()
    bench.engine.kill()
    for _ in range(3 * MAX_UNATTRIBUTED_CRASHES - 4):
        fail(bench)
        bench.supervisor.tick(MAX_BACKOFF_SECONDS)
    bench.engine.on_message(READY)
    assert bench.supervisor.crash_policy.failed_loads == 0 and list(bench.engine.open) == [id], (
        "and none is sent by itself"
    )
    while bench.supervisor.open:
        bench.engine.step()
    assert bench.tokens(id) == oracle([1, 2, 5], 10, 0, frozenset(), 5, 0.0)


def test_a_slow_load_is_tried_more_than_once_although_requests_wait_no_more() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    bench.engine.kill()
    for number in range(2, 2 + MIN_LOADS):
        assert bench.supervisor.state is State.STARTING and len(bench.engines) == number
        bench.supervisor.tick(2 * RECOVERY)
        refuse(bench)
        bench.supervisor.tick(MAX_BACKOFF_SECONDS)
    assert bench.supervisor.state is State.REFUSED


def test_a_first_engine_that_ends_while_it_loads_is_tried_again_and_then_given_up_and_everyone_told() -> (  # noqa: E501
    None
):
    bench = Bench()
    id = bench.submit()
    for _ in range(MIN_LOADS):
        assert bench.supervisor.state is State.STARTING
        die_loading(bench)
        bench.supervisor.tick(MAX_BACKOFF_SECONDS)
    assert bench.supervisor.state is State.GAVE_UP and len(bench.engines) == MIN_LOADS
    (failed,) = bench.delivered[id]
    assert isinstance(failed, protocol.Failed) and failed.code == "engine_unavailable"


@pytest.mark.parametrize("ending", ["stop", "refuse"])
def test_a_submission_after_the_end_fails_at_once(ending: str) -> None:
    bench = Bench()
    if ending == "stop":
        bench.supervisor.stop()
    else:
        bench.engine.on_message(protocol.Refused("no"))
    (failed,) = bench.delivered[bench.submit()]
    assert isinstance(failed, protocol.Failed) and bench.supervisor.open == {}


def test_requests_wait_for_the_first_engine() -> None:
    bench = Bench()
    id = bench.submit(max_new=2)
    assert bench.engine.sent == [] and bench.supervisor.state is State.STARTING
    bench.engine.on_message(READY)
    bench.engine.step()
    assert bench.states == [State.READY] and len(bench.delivered[id]) == 1


def test_cancelled_before_the_engine_is_ready_is_never_sent() -> None:
    bench = Bench()
    bench.supervisor.cancel(bench.submit())
    bench.engine.on_message(READY)
    assert bench.engine.sent == []


def test_a_repeated_token_is_dropped_and_one_left_out_costs_the_engine_its_life() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    id = bench.submit()
    gauges = protocol.Gauges(1, 0, 0, 0, 0.0)
    old = bench.engine
    for index in (0, 0, 1, 3, 2):
        old.on_message(protocol.Tokens([protocol.Token(id, index, 10 + index, -1.0)], gauges))
    assert bench.tokens(id) == [10, 11] and bench.engine is not old
    bench.engine.on_message(READY)
    assert bench.engine.open[id].output == [10, 11]


def test_it_gives_up_after_deaths_without_a_token() -> None:
    bench = Bench()
    for _ in range(MAX_UNATTRIBUTED_CRASHES):
        bench.supervisor.tick(BACKOFF_SECONDS)
        bench.engine.on_message(READY)
        bench.engine.kill()
    assert (
        bench.supervisor.state is State.GAVE_UP and len(bench.engines) == MAX_UNATTRIBUTED_CRASHES
    )


@pytest.mark.parametrize("place", [0, 3, 6])
def test_the_request_that_no_engine_survives_taking_in_is_found_and_the_others_finish(
    place: int,
) -> None:
    """Seven sequences, one of which crashes every engine that it is sent to, before anything is
    computed.
    """
    bench = Bench()
    ids = [bench.submit(seed=i, ends=False) for i in range(7)]
    bench.engine.on_message(READY)
    while bench.supervisor.open and len(bench.engines) < 20:
        if ids[place] in bench.engine.open:
            bench.engine.kill()
            bench.supervisor.tick(MAX_BACKOFF_SECONDS)
            bench.engine.on_message(READY)
        else:
            bench.engine.step()
    *_, failed = bench.delivered[ids[place]]
    assert isinstance(failed, protocol.Failed) and failed.code == "request_quarantined"
    assert bench.supervisor.crash_policy.num_quarantined == 1
    for i, id in enumerate(ids):
        assert bench.tokens(id) == (
            [] if i == place else oracle([1, 2, i], 10, 0, frozenset(), i, 0.0)
        )
    later = [bench.submit(), bench.submit()]
    assert all(id in bench.engine.open for id in later), "with nothing left to be careful of"


def test_a_death_of_what_was_called_off_meanwhile_is_not_one_of_nobody() -> None:
    bench = Bench()
    for _ in range(MAX_UNATTRIBUTED_CRASHES):
        bench.engine.on_message(READY)
        bench.supervisor.cancel(bench.submit())
        bench.engine.kill()
        bench.supervisor.tick(MAX_BACKOFF_SECONDS)
    assert bench.supervisor.state is not State.GAVE_UP


def test_an_engine_that_lived_long_owes_nothing_to_those_before_it() -> None:
    bench = Bench()
    for _ in range(3 * MAX_UNATTRIBUTED_CRASHES):
        bench.engine.on_message(READY)
        for _ in range(int(STABLE_SECONDS + PATIENCE.stall)):
            bench.supervisor.tick(1.0)
            bench.engine.on_message(protocol.Heartbeat(0))
        bench.engine.kill()
    assert (
        bench.supervisor.state is State.STARTING
        and len(bench.engines) == 1 + 3 * MAX_UNATTRIBUTED_CRASHES
    )


def test_an_idle_engine_tells_of_its_device() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    bench.engine.on_message(protocol.Heartbeat(0, 5 * 2**30))
    assert bench.events == [protocol.Heartbeat(0, 5 * 2**30)]


def test_silence_is_death_and_so_is_work_without_progress() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    for _ in range(100):
        bench.supervisor.tick(PATIENCE.stall / 2)
        bench.engine.on_message(protocol.Heartbeat(7))
    assert len(bench.engines) == 1, "idle, and beating"
    bench.supervisor.tick(PATIENCE.stall)
    assert len(bench.engines) == 2, "idle, and silent"
    bench.engine.on_message(READY)
    bench.submit()
    for progress in range(100):
        bench.supervisor.tick(PATIENCE.stall / 2)
        bench.engine.on_message(protocol.Heartbeat(progress))
    assert len(bench.engines) == 2, "at a long step"
    bench.supervisor.tick(PATIENCE.stall / 2)
    bench.engine.on_message(protocol.Heartbeat(99))
    bench.supervisor.tick(PATIENCE.stall / 2)
    assert len(bench.engines) == 3, "beating, and stuck"


def test_an_engine_that_never_loads_is_replaced_and_the_waiting_are_told_in_time() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    id = bench.submit()
    bench.engine.kill()
    bench.supervisor.tick(RECOVERY - 1)
    assert bench.delivered[id] == [] and not bench.supervisor.recovery_overdue
    bench.supervisor.tick(1)
    (failed,) = bench.delivered[id]
    assert (
        isinstance(failed, protocol.Failed)
        and failed.code == "engine_unavailable"
        and bench.supervisor.recovery_overdue
    )
    assert len(bench.engines) == 2
    bench.supervisor.tick(PATIENCE.start)
    bench.supervisor.tick(MAX_BACKOFF_SECONDS)
    assert len(bench.engines) == 3
    bench.engine.on_message(READY)
    assert not bench.supervisor.recovery_overdue and bench.supervisor.state is State.READY


def test_requests_wait_for_an_engine_as_long_as_two_loads_take() -> None:
    """Of the first engine; a later one that takes longer does not change it."""
    timeouts = Timeouts(stall=10.0, start=600.0, recovery=None)
    assert (
        timeouts.recovery_after(4.0) == MIN_RECOVERY == RECOVERY
        and timeouts.recovery_after(50.0) == 100.0
    )
    bench = Bench(timeouts)
    bench.supervisor.tick(50.0)
    bench.engine.on_message(READY)
    for seconds in (20.0, 1.0, 20.0):
        bench.submit()
        bench.engine.step()
        bench.engine.kill()
        bench.supervisor.tick(90.0)
        assert not bench.supervisor.recovery_overdue
        bench.supervisor.tick(seconds)
        assert bench.supervisor.recovery_overdue is (seconds > 10.0)
        bench.engine.on_message(READY)


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("at", [0, 4])
def test_the_request_that_kills_engines_is_found_and_the_others_finish(place: int, at: int) -> None:
    """Seven sequences, one of which crashes every engine that computes its token number `at`."""
    bench = Bench()
    ids = [bench.submit(seed=i, max_new=30, ends=False) for i in range(7)]
    poison = ids[place]
    bench.engine.on_message(READY)
    deaths = 0
    while bench.supervisor.open and deaths < 10:
        submit = bench.engine.open.get(poison)
        if submit is not None and len(submit.output) == at:
            bench.engine.on_message(started(list(bench.engine.open)))
            bench.engine.kill()
            deaths += 1
            bench.supervisor.tick(MAX_BACKOFF_SECONDS)
            bench.engine.on_message(READY)
        else:
            bench.engine.step()
    assert (
        deaths == SUSPECT_CRASHES + CRASHES_ALONE
        and bench.supervisor.crash_policy.num_quarantined == 1
    )
    *_, failed = bench.delivered[poison]
    assert isinstance(failed, protocol.Failed) and failed.code == "request_quarantined"
    for i, id in enumerate(ids):
        expected = oracle([1, 2, i], 30, 0, frozenset(), i, 0.0)
        assert bench.tokens(id) == (expected if id != poison else expected[:at])


def test_an_engine_that_dies_of_every_request_is_given_up() -> None:
    bench = Bench()
    for _ in range(100):
        if bench.supervisor.state is State.GAVE_UP:
            break
        if not bench.supervisor.open:
            bench.submit()
        bench.supervisor.tick(MAX_BACKOFF_SECONDS)
        bench.engine.on_message(READY)
        bench.engine.on_message(started(list(bench.engine.open)))
        bench.engine.kill()
    assert (
        bench.supervisor.state is State.GAVE_UP
        and bench.supervisor.crash_policy.num_quarantined == MAX_QUARANTINES
    )


def test_a_suspect_that_its_client_cancels_frees_the_others() -> None:
    bench = Bench()
    first, second = bench.submit(), bench.submit()
    for _ in range(SUSPECT_CRASHES):
        bench.supervisor.tick(MAX_BACKOFF_SECONDS)
        bench.engine.on_message(READY)
        bench.engine.on_message(started([first, second]))
        bench.engine.kill()
    bench.supervisor.tick(MAX_BACKOFF_SECONDS)
    bench.engine.on_message(READY)
    assert list(bench.engine.open) == [first]
    bench.supervisor.cancel(first)
    assert list(bench.engine.open) == [second]
    bench.engine.step()
    assert bench.tokens(second) and third_runs(bench)


def third_runs(bench: Bench) -> bool:
    """Whether a new sequence is sent at once: no suspect runs alone."""
    return bench.submit() in bench.engine.open


def test_an_engine_that_cannot_be_spawned_is_tried_again() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    bench.fail_spawns = 1
    bench.engine.kill()
    assert bench.supervisor.state is State.STARTING and len(bench.engines) == 1
    bench.supervisor.tick(MAX_BACKOFF_SECONDS)
    bench.engine.on_message(READY)
    assert bench.supervisor.state is State.READY and len(bench.engines) == 2


def test_progress_resets_the_count_of_deaths() -> None:
    bench = Bench()
    bench.submit(seed=3, max_new=1000)
    for _ in range(3 * MAX_UNATTRIBUTED_CRASHES):
        bench.engine.on_message(READY)
        bench.submit(seed=3, max_new=1000)
        bench.engine.step()
        bench.engine.kill()
    assert (
        bench.supervisor.state is State.STARTING
        and len(bench.engines) == 1 + 3 * MAX_UNATTRIBUTED_CRASHES
    )


def test_a_refusal_is_final() -> None:
    bench = Bench()
    bench.engine.on_message(protocol.Refused("config.json: no"))
    bench.engine.on_exit(0)
    assert (
        bench.supervisor.state is State.REFUSED
        and bench.supervisor.reason == "config.json: no"
        and len(bench.engines) == 1
    )


def test_stopping_ends_open_sequences_once() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    id = bench.submit()
    bench.supervisor.stop()
    bench.supervisor.stop()
    bench.engine.on_exit(0)
    assert len(bench.delivered[id]) == 1 and isinstance(bench.engine.sent[-1], protocol.Shutdown)


def test_an_engine_may_fail_one_sequence() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    first, second = bench.submit(max_new=1), bench.submit(max_new=1)
    bench.engine.open.pop(first)
    bench.engine.on_message(protocol.Failed(first, "no"))
    bench.engine.on_message(protocol.Failed(first, "no"))
    bench.engine.step()
    assert len(bench.delivered[first]) == 1 and len(bench.tokens(second)) == 1


def test_stopping_while_no_engine_could_be_spawned_ends_open_sequences() -> None:
    bench = Bench()
    bench.engine.on_message(READY)
    bench.fail_spawns = 1
    bench.engine.on_exit(1)
    id = bench.submit()
    bench.supervisor.stop()
    assert bench.supervisor.state is State.STOPPED and len(bench.delivered[id]) == 1
