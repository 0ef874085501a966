"""F31: an API process dies or stops, and the streams of the others, the engine, and what can be resumed go on."""

import signal
import time

import pytest

from tests.faults.rules import Rule
from tests.faults.scene import Case, Scene
from tests.support.processes import alive, api_processes, wait_until

TWO = ("--server.api_processes", "2", "--server.detach_grace", "20", "--engine.max_running", "32")
PACE = Rule("pace", seconds=0.005)
STALL = 3.0


def kill_api_process(scene: Scene, pid: int) -> None:
    scene.strike(pid, signal.SIGKILL, "kill API process")
    wait_until(lambda: not alive(pid), "it is dead")


def replaced(scene: Scene, count: int) -> None:
    """Waits until both serve again, after so many were replaced."""
    wait_until(lambda: scene.server.metric("onehead_api_processes") == 2, "both serve")
    assert scene.server.metric("onehead_api_process_restarts_total") == count


def others_go_on(scene: Scene) -> None:
    """Its own streams are cut; those of the other process never notice."""
    scene.start(*TWO, rules=(PACE,))
    exchanges = scene.ask_all(scene.asks(32, 100, stream=True, extra={}))
    for exchange in exchanges:
        exchange.reach(5)
    kill_api_process(scene, api_processes(scene.server.process.pid)[0])
    finished = [exchange.finished for exchange in scene.outcomes()]
    assert any(finished) and not all(finished)
    replaced(scene, 1)
    scene.canary()
    assert scene.server.restarts == 0


def resumed(scene: Scene, with_engine: bool) -> None:
    """Every API process dies twice under streams that can be resumed, and perhaps the engine with it: nothing is lost or told twice."""
    scene.start(*TWO, rules=(PACE,))
    resumable = scene.asks(8, 300, stream=True, extra={"resumable": True})
    exchanges = [scene.ask(ask, leave_after=scene.rng.randint(20, 60), reset=True, resumes=True) for ask in resumable]
    exchanges[0].reach(10)
    for kill in range(4):
        kill_api_process(scene, api_processes(scene.server.process.pid)[0])
        if with_engine and kill == 1:
            scene.kill_engine()
        replaced(scene, kill + 1)
    scene.all_finished()
    scene.canary()
    assert scene.server.restarts == int(with_engine) and len(scene.history.of("resume")) > len(exchanges)


def stops(scene: Scene) -> None:
    """It is killed and replaced; connections that waited in its socket are answered."""
    scene.start(*TWO, "--server.stall_after", str(STALL), rules=(PACE,))
    stopped = api_processes(scene.server.process.pid)[0]
    began = scene.strike(stopped, signal.SIGSTOP, "kill API process")
    waiting = scene.ask_all(scene.asks(8, 20, stream=True, extra={}))
    wait_until(lambda: not alive(stopped), "it is killed", STALL + 4)
    assert time.monotonic() - began >= STALL - 1.0  # It spoke up to a second before.
    scene.outcomes()
    assert any(exchange.finished for exchange in waiting)
    wait_until(lambda: scene.server.metric("onehead_api_processes") == 2, "both serve")
    scene.canary()
    assert scene.server.restarts == 0


CASES = [
    Case("F31", "an API process dies under 32 streams", others_go_on),
    Case("F31", "API processes die under what can be resumed", resumed, (False,)),
    Case("F31", "API processes and the engine die", resumed, (True,)),
    Case("F31", "an API process stops", stops),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(scene: Scene, case: Case) -> None:
    scene.play(case)
