"""The engine's message loop, in a thread, over a real pipe, with the hash model."""

import logging
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest

from model.devices.device import Device
from model.spec import OptionError
from model.step import StepPlan, StepResult
from server import protocol
from server.engine import worker
from server.engine.core import EngineCore
from server.engine.masks import MaskProcesses
from server.engine.ngrams import NGrams
from server.engine.scheduler import Limits, Scheduler
from server.engine.worker import Worker, _check_files, load_report
from tests.support.guesser import Guesser
from tests.support.hash_model import HashModel, next_token, one_group, oracle


class NoMasks(MaskProcesses):
    """Of a server without constraints: there is no process to ask for."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None))


class SlowModel(HashModel):
    """A model whose steps take long enough for a message to arrive during one."""

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(0.005)
        return super().run(plan)


class Engine:
    """The API's end of a worker's pipe."""

    def __init__(self, pipe: Connection, core: EngineCore) -> None:
        self.pipe = pipe
        self.core = core
        self.started: list[int] = []

    def send(self, message: protocol.ToEngine) -> None:
        self.pipe.send_bytes(protocol.encode(message))

    def receive(self) -> Any:
        """The next message, skipping Started."""
        while True:
            assert self.pipe.poll(10), "the worker says nothing"
            message = protocol.decode_from_engine(self.pipe.recv_bytes())
            if not isinstance(message, protocol.Started):
                return message
            self.started += message.ids


@pytest.fixture
def engine() -> Iterator[Engine]:
    ours, theirs = Pipe()
    core = EngineCore(Scheduler(Limits(20, one_group(4), 80, 4, 16)), SlowModel(one_group(4)))
    thread = threading.Thread(target=Worker(theirs, core, NoMasks()).serve)
    thread.start()
    yield Engine(ours, core)
    ours.send_bytes(protocol.encode(protocol.Shutdown()))
    thread.join(10)
    assert not thread.is_alive()
    ours.close()
    theirs.close()


def submit(id: int, prompt: list[int], max_new: int) -> protocol.Submit:
    return protocol.Submit(id, prompt, [], max_new, 0, [], protocol.Sampling(seed=id))


def test_tokens_come_in_order_with_gauges(engine: Engine) -> None:
    engine.send(submit(1, [3, 4, 5], 6))
    reports = [engine.receive() for _ in range(6)]
    tokens = [token for report in reports for token in report.tokens]
    assert [token.token for token in tokens] == oracle(
        [3, 4, 5], 6, 0, frozenset(), seed=1, end_rate=0.0
    )
    assert [token.index for token in tokens] == list(range(6))
    assert [token.finish for token in tokens] == [None] * 5 + ["length"]
    assert engine.started == [1]
    assert reports[0].gauges.pages_used == 1 and reports[-1].gauges.pages_used == 0


def test_a_look_is_answered_between_steps_and_by_an_idle_engine(engine: Engine) -> None:
    engine.send(protocol.Look())
    assert engine.receive() == protocol.CacheView(1, 0, b"", [])
    engine.send(submit(1, [3, 4, 5], 6))
    engine.send(protocol.Look(dump=True))
    messages = [engine.receive() for _ in range(7)]
    (view,) = (message for message in messages if isinstance(message, protocol.CacheView))
    assert [row[0] for row in view.sequences] == [1] and view.step == messages.index(view)
    engine.send(protocol.Cancel(9))
    assert engine.receive() == protocol.Tokens([], protocol.Gauges(0, 0, 0, 0, 0.0, 2, 3))
    for _ in range(3):  # A look makes no report: nothing has changed.
        engine.send(protocol.Look())
        assert isinstance(engine.receive(), protocol.CacheView)
    assert not engine.pipe.poll(0.01)


def test_tokens_that_came_true_together_come_in_one_report() -> None:
    ours, theirs = Pipe()
    model = HashModel(one_group(4))
    scheduler = Scheduler(
        Limits(20, one_group(4), 80, 4, 16),
        NGrams(lambda sequence: Guesser(sequence.prompt, lambda t: next_token(t, 1, 0.0, True))),
    )
    for message in (submit(1, [3, 4, 5], 30), protocol.Shutdown()):
        ours.send_bytes(protocol.encode(message))
    worker = Worker(theirs, EngineCore(scheduler, model), NoMasks())
    worker._handle(protocol.decode_to_engine(theirs.recv_bytes()))  # type: ignore[arg-type]
    while scheduler.has_work:
        worker._send_events(worker.core.step(), 0.0)
    reports: list[Any] = [
        protocol.decode_from_engine(ours.recv_bytes()) for _ in range(model.progress)
    ]
    tokens = [token for report in reports for token in report.tokens]
    assert [token.token for token in tokens] == oracle(
        [3, 4, 5], 30, 0, frozenset(), seed=1, end_rate=0.0
    )
    assert [token.index for token in tokens] == list(range(30)) and len(reports) < 25
    gauges = reports[-1].gauges
    assert (
        gauges.accepted_tokens == 30 - len(reports)
        and gauges.accepted_tokens < gauges.drafted_tokens
    )
    ours.close()


def test_a_cancelled_sequence_has_no_pages_two_reports_later(engine: Engine) -> None:
    engine.send(submit(1, [3, 4, 5], 70))
    engine.receive()
    engine.send(protocol.Cancel(1))
    while (report := engine.receive()).tokens:
        pass  # Steps that were under way when the cancellation was sent.
    assert report.gauges.pages_used == 0 and report.gauges.running == 0
    assert not engine.pipe.poll(0.05), "an idle engine says nothing"


def test_cancelling_while_another_runs_frees_at_once(engine: Engine) -> None:
    engine.send(submit(1, [3] * 12, 30))
    engine.send(submit(2, [4], 30))
    while len(engine.receive().tokens) < 2:
        pass
    engine.send(protocol.Cancel(1))
    report = engine.receive()
    while any(token.id == 1 for token in report.tokens):
        report = engine.receive()
    assert report.gauges.running == 1 and [token.id for token in report.tokens] == [2]


def test_who_starts_is_said_before_the_step(engine: Engine) -> None:
    engine.send(submit(1, [3, 4, 5], 2))
    assert isinstance(protocol.decode_from_engine(engine.pipe.recv_bytes()), protocol.Started)
    assert len(engine.receive().tokens) == 1


def test_it_beats_whatever_it_does() -> None:
    ours, theirs = Pipe()
    model = SlowModel(one_group(4))
    Worker(
        theirs, EngineCore(Scheduler(Limits(20, one_group(4), 80, 4, 16)), model), NoMasks()
    ).start_heartbeat(0.001)
    assert protocol.decode_from_engine(ours.recv_bytes()) == protocol.Heartbeat(0)
    model.progress = 5
    while protocol.decode_from_engine(ours.recv_bytes()) == protocol.Heartbeat(0):
        pass
    assert protocol.decode_from_engine(ours.recv_bytes()) == protocol.Heartbeat(5)
    ours.close()


class Gone(Device):
    """A device that breaks once its memory has been asked for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def own_memory(self) -> tuple[int, int]:
        self.num_asked += 1
        if self.num_asked > 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return 60, 80

    def failure(self, error: Exception) -> str:
        return f"the GPU can compute no more ({error})"


def test_an_idle_engine_whose_device_breaks_ends_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Pipe()
    ended: list[int] = []
    over = threading.Event()

    def end(status: int) -> None:
        ended.append(status)
        over.set()

    monkeypatch.setattr("server.engine.worker.os._exit", end)
    core = EngineCore(Scheduler(Limits(20, one_group(4), 80, 4, 16)), HashModel(one_group(4)))
    Worker(theirs, core, NoMasks(), Gone()).start_heartbeat(0.001)
    assert protocol.decode_from_engine(ours.recv_bytes()) == protocol.Heartbeat(0, 20)
    assert over.wait(10) and ended == [1]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "the engine has failed",
        "the GPU can compute no more (CUDA error: uncorrectable ECC error encountered)",
    ]
    ours.close()


def test_what_never_fits_fails_alone(engine: Engine) -> None:
    engine.send(submit(1, [3], 3))
    engine.send(submit(2, [3], 1000))
    seen = [engine.receive() for _ in range(4)]
    (failed,) = (message for message in seen if isinstance(message, protocol.Failed))
    assert failed.id == 2 and "at most 80 fit" in failed.reason
    assert sum(len(message.tokens) for message in seen if isinstance(message, protocol.Tokens)) == 3


def test_loading_is_told_to_the_api_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    ours, theirs = Pipe()
    report = load_report(theirs)
    for call in (
        ("loading weights", 0, 15_000_000),
        ("loading weights", 6_000_000, 15_000_000),
        ("measuring memory", 0, 0),
    ):
        report(*call)
    phases = [
        message.phase
        for message in (protocol.decode_from_engine(ours.recv_bytes()) for _ in range(3))
    ]
    assert phases == ["loading weights 0 %", "loading weights 40 %", "measuring memory"]
    assert [
        record.getMessage().rpartition(" took")[0] or record.getMessage()
        for record in caplog.records
    ] == [
        "starting",
        "loading weights, 15000000 bytes",
        "loading weights",
    ]


def test_more_sequences_than_files_are_refused_with_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each may need a pipe to a process that follows its constraint."""
    asked: list[int] = []
    monkeypatch.setattr(
        worker, "allow_files", lambda wanted: asked.append(wanted) or min(wanted, 1024)
    )
    _check_files(900)
    with pytest.raises(
        OptionError,
        match=r"engine.max_running 2000 needs 2064 open files, and this process may have 1024",
    ):
        _check_files(2000)
    assert asked == [964, 2064]
