"""F01-F06 and F08: the engine dies, stops or hangs, and the requests that were in it go on after
the tokens they have.
"""

import signal
import time

import pytest

from tests.faults.clients import Ask, Exchange
from tests.faults.rules import Rule
from tests.faults.scene import Case, Scene, recovery_within
from tests.support.processes import alive, wait_until

POISON = "POISON"
STALL = 1.5
PACE = Rule("pace", seconds=0.005)
KEEP_ALIVE = ("--server.keep_alive", "0.2")
QUICK_STALL = ("--server.stall_after", str(STALL))


def kill_mid_stream(scene: Scene, kills: int) -> None:
    """Each kill at a random token of a random stream."""
    scene.start("--engine.max_running", "32", rules=(PACE,))
    exchanges = scene.ask_all(scene.asks(32, 100))
    streamed = [exchange for exchange in exchanges if exchange.ask.stream]
    with scene.watched():
        for kill in range(kills):
            scene.rng.choice(streamed).reach(scene.rng.randint(1, 60 // kills) + kill * 60 // kills)
            scene.kill_engine()
            # Too short to be seen by who asks whether it is ready.
            replaced = "onehead_engine_recovery_seconds_count"
            wait_until(lambda: scene.server.metric(replaced) > kill, "replaced")  # noqa: B023
        scene.all_finished()
    assert scene.server.restarts == scene.server.metric(replaced) == kills


def kill_idle(scene: Scene) -> None:
    scene.start()
    with scene.watched():
        scene.kill_engine()
        scene.canary()
    assert scene.server.restarts == 1


def kill_with_a_queue(scene: Scene) -> None:
    scene.start("--engine.max_running", "1", rules=(PACE,))
    exchanges = scene.ask_all(scene.asks(6, 30, stream=True))
    with scene.watched():
        wait_until(lambda: any(exchange.ids for exchange in exchanges), "one runs")
        wait_until(lambda: scene.server.metric("onehead_requests_waiting") >= 4, "the others wait")
        scene.kill_engine()
        scene.all_finished()
    assert scene.server.restarts == 1


def kill_while_loading(scene: Scene) -> None:
    """The replacement is killed too; who came meanwhile just waits."""
    scene.start(rules=(Rule("slow_load", seconds=1.0, from_engine=2, times=1),))
    with scene.watched():
        first = scene.kill_engine()
        waiting = scene.ask_all(scene.asks(4, 20))
        assert scene.kill_engine() != first
        scene.all_finished()
    assert scene.server.restarts == 2 and len(waiting) == 4


def die_at_first_load(scene: Scene) -> None:
    scene.start(rules=(Rule("die_loading", times=1),))
    scene.canary()
    assert scene.server.restarts == 1


def kill_in_prefill(scene: Scene) -> None:
    scene.start(
        "--engine.step_tokens",
        "8",
        "--engine.max_running",
        "8",
        rules=(Rule("pace", seconds=0.01),),
    )
    long = [
        Ask(ask.prompt + "x" * 300, 20, ask.parameters, ask.dialect, canary=ask.canary)
        for ask in scene.asks(3)
    ]
    exchanges = scene.ask_all(long)
    with scene.watched():
        wait_until(
            lambda: scene.server.metric("onehead_kv_pages_used") >= 2, "a prompt is half computed"
        )
        assert not any(exchange.ids for exchange in exchanges)
        scene.kill_engine()
        scene.all_finished()
    assert scene.server.restarts == 1


def recovery_takes_too_long(scene: Scene) -> None:
    rules = (PACE, Rule("slow_load", seconds=3.5, from_engine=2, times=1))
    scene.start("--engine.max_running", "4", rules=rules, constants=recovery_within(1.0))
    started = scene.ask_all(scene.asks(4, 200, stream=True))
    for exchange in started:
        exchange.reach(3)
    # What is resumable has its status at once.
    queued = scene.ask_all(scene.asks(4, 200, extra={}))
    wait_until(lambda: scene.server.metric("onehead_requests_waiting") == 4, "the others wait")
    with scene.watched():
        scene.kill_engine()
        began = time.monotonic()
        for exchange in (*started, *queued):
            exchange.join()
        assert 0.5 < time.monotonic() - began < 3.0
        late = scene.ask(Ask("too late", 5, dialect="openai", stream=False)).join()
        unavailable(started, 200)
        unavailable([*queued, late], 503)
        scene.server.wait_ready()
        scene.canary()
    assert scene.server.restarts == 1


def unavailable(exchanges: list[Exchange], status: int) -> None:
    for exchange in exchanges:
        assert exchange.error is not None and exchange.status == status, (
            f"request {exchange.number}: {exchange.status} {exchange.error}"
        )
        assert exchange.ask.dialect == "tgi" or exchange.code == "engine_unavailable", (
            exchange.error
        )


def every_load_fails(scene: Scene) -> None:
    scene.start(rules=(PACE, Rule("die_loading", from_engine=2)), constants=recovery_within(2.0))
    exchanges = scene.ask_all(scene.asks(8, 200, stream=True))
    for exchange in exchanges:
        exchange.reach(3)
    scene.kill_engine()
    scene.outcomes()
    scene.ended(scene.server.process.wait(30), 70)
    unavailable(exchanges, 200)


def every_step_kills(scene: Scene) -> None:
    """No request gets a token, whichever is run: the engine is at fault, not one request."""
    scene.start(rules=(Rule("die"),))
    scene.ask_all(scene.asks(5, 30))
    scene.outcomes()
    scene.ended(scene.server.process.wait(60), 70)
    assert all(exchange.error is not None for exchange in scene.exchanges)


def short_pause(scene: Scene) -> None:
    scene.start("--server.stall_after", "6", rules=(PACE,))
    exchanges = scene.ask_all(scene.asks(8, 60))
    exchanges[0].reach(10)
    engine = scene.server.engine_pid
    with scene.watched():
        scene.strike(engine, signal.SIGSTOP, "stop engine")
        time.sleep(1.2)
        scene.strike(engine, signal.SIGCONT, "continue engine")
        scene.all_finished()
    assert scene.server.engine_pid == engine and scene.server.restarts == 0


def stopped_for_ever(scene: Scene, busy: bool) -> None:
    scene.start(*QUICK_STALL, *KEEP_ALIVE, rules=(PACE,))
    exchanges = scene.ask_all(scene.asks(8, 100, stream=True)) if busy else []
    for exchange in exchanges:
        exchange.reach(10)
    engine = scene.server.engine_pid
    with scene.watched() as watch:
        stopped = scene.strike(engine, signal.SIGSTOP, "stop engine")
        wait_until(lambda: not alive(engine), "the stopped engine is killed", STALL + 3)
        assert watch.not_ready_since(stopped) < STALL + 1.0
        scene.canary()
        scene.all_finished()
    assert all(exchange.comments for exchange in exchanges), "a stream was silent meanwhile"
    assert scene.server.restarts == 1 and scene.server.engine_pid != engine


def hangs_in_a_step(scene: Scene, how: str) -> None:
    """Its other threads live (a heartbeat alone proves nothing), or none does."""
    scene.start(*QUICK_STALL, rules=(PACE, Rule(how, after=10, times=1)))
    with scene.watched():
        scene.ask_all(scene.asks(8, 40))
        scene.all_finished()
    assert scene.server.restarts == 1


def poison(scene: Scene, count: int, after: int, how: str = "die") -> None:
    """The requests that run beside it finish; it is tried alone twice, and no third time."""
    scene.traces = how != "die"
    scene.start(rules=(Rule(how, marker=POISON, after=after),))
    sound = scene.ask_all(scene.asks(8, 60))
    poisonous = [
        Ask(f"{POISON}{number}", 60, dialect="openai", stream=number % 2 == 0)
        for number in range(count)
    ]
    engine = scene.server.engine_pid
    scene.strike(engine, signal.SIGSTOP, "stop engine")
    poisoned = scene.ask_all(poisonous)
    time.sleep(1.0)  # They are in the same crashes only where they arrive together.
    scene.strike(engine, signal.SIGCONT, "continue engine")
    with scene.watched():
        scene.outcomes()
        assert all(exchange.finished for exchange in sound)
        for exchange in poisoned:
            assert exchange.code == "request_quarantined" and len(exchange.ids) == (
                after if exchange.ask.stream else 0
            )
        scene.canary()
    assert scene.server.restarts <= 2 + 2 * count
    wait_until(
        lambda: scene.server.metric("onehead_requests_quarantined_total") == count,
        "it is counted, which is done once a second",
    )


def broken_device(scene: Scene) -> None:
    """After such an error nothing that the device says can be believed."""
    scene.traces = True
    scene.start(rules=(Rule("device", after=5, times=1),))
    engine = scene.server.engine_pid
    scene.ask_all(scene.asks(8, 40))
    scene.all_finished()
    assert scene.server.restarts == 1 and scene.server.engine_pid != engine


CASES = [
    Case("F01", "kill under 32 streams", kill_mid_stream, (1,)),
    Case("F01", "kill three times under 32 streams", kill_mid_stream, (3,)),
    Case("F02", "kill idle", kill_idle),
    Case("F02", "kill with a queue", kill_with_a_queue),
    Case("F02", "kill while the next is loading", kill_while_loading),
    Case("F02", "first engine dies while loading", die_at_first_load),
    Case("F02", "kill in prefill", kill_in_prefill),
    Case("F03", "recovery takes too long", recovery_takes_too_long),
    Case("F03", "no further engine can be loaded", every_load_fails),
    Case("F03", "every step kills", every_step_kills),
    Case("F04", "a pause below stall_after", short_pause),
    Case("F05", "stopped for ever at work", stopped_for_ever, (True,)),
    Case("F05", "stopped for ever idle", stopped_for_ever, (False,)),
    Case("F05", "hangs in a step", hangs_in_a_step, ("hang",)),
    Case("F05", "hangs with every thread", hangs_in_a_step, ("hang_with_lock",)),
    Case("F06", "a request that kills at once", poison, (1, 0)),
    Case("F06", "a request that kills after five tokens", poison, (1, 5)),
    Case("F06", "two of them", poison, (2, 0)),
    Case("F06", "a request whose sampling fails", poison, (1, 4, "sampling_fails")),
    Case("F08", "the device is broken", broken_device),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(scene: Scene, case: Case) -> None:
    scene.play(case)
