"""`onehead bench --offline`: closed loops on an engine in this process, by themselves with invented
tokens and as the command.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cache.layout import CacheLayout
from commands.bench.closed_loop import ClosedLoop
from commands.bench.figures import figures
from commands.bench.offline import OfflineSettings, bench, load_engine
from commands.cli import main
from model.step import SampledToken, SampleError, StepPlan, StepResult
from server.config import load
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.errors import ConfigurationError, UsageError
from tests.support.checkpoints import SHAPES, make_checkpoint
from tests.support.immediate import Immediate

MAX_RUNNING = 4


class InventedModel(Immediate):
    """A token for every row that asks for one, or a failure for one sequence. Remembers how many
    rows its steps had.
    """

    progress = 0

    def __init__(self, failing: int | None = None) -> None:
        self.failing = failing
        self.rows: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.rows.append(len(plan.rows))
        return StepResult(
            tuple(
                SampleError("no luck") if row.sequence == self.failing else self._drawn(row)
                for row in plan.rows
            )
        )

    def _drawn(self, row: Any) -> SampledToken | None:
        return None if row.sample is None else SampledToken(7, -1.0)


def core_of(model: InventedModel) -> EngineCore:
    return EngineCore(
        Scheduler(Limits(100, CacheLayout.of(1, (), 16), 256, MAX_RUNNING, 64)),
        model,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield make_checkpoint(SHAPES[0], tmp_path_factory.mktemp("offline")).folder


def settings_for(folder: Path, **values: Any) -> OfflineSettings:
    few = {
        "concurrency": [1, 3],
        "requests": 4,
        "prompt_tokens": 20,
        "output_tokens": 5,
        "engine": {"threads": 1},
        "cache": {"pages": 20},
    }
    return OfflineSettings.model_validate({"model": folder} | few | values)


# --- the loop


def test_every_request_gets_its_tokens_and_clients_stay_busy() -> None:
    model, ended = InventedModel(), []
    core = core_of(model)
    outcomes, steps = ClosedLoop(core, 5, lambda: ended.append(1)).run(
        3,
        [[n] * 20 for n in range(9)],
    )
    assert [outcome.failure for outcome in outcomes] == [None] * 9 and len(ended) == 9
    assert all(outcome.token_ids == [7] * 5 and outcome.input_length == 20 for outcome in outcomes)
    # A prompt of 20 and the four tokens after its first, a row each.
    assert max(model.rows) == 3 and sum(model.rows) == 9 * 5
    assert len(steps.host) == len(steps.compute) == len(model.rows) and min(steps.host) > 0
    assert (
        core.runner is model and core.scheduler.take_started() == [] and not core.scheduler.has_work
    )


def test_a_client_s_next_request_counts_from_the_end_of_its_last() -> None:
    outcomes, _ = ClosedLoop(core_of(InventedModel()), 3, lambda: None).run(1, [[1] * 4] * 3)
    for earlier, later in pairwise(outcomes):
        assert earlier.token_times[-1] == earlier.end <= later.intended < later.token_times[0]


def test_more_clients_than_run_together_wait_in_the_queue() -> None:
    model = InventedModel()
    outcomes, _ = ClosedLoop(core_of(model), 2, lambda: None).run(8, [[n] * 4 for n in range(8)])
    assert max(model.rows) == MAX_RUNNING and all(
        len(outcome.token_times) == 2 for outcome in outcomes
    )
    assert outcomes[7].token_times[0] > outcomes[3].end  # Both submitted at the beginning.


def test_a_failure_is_counted_and_its_client_goes_on() -> None:
    outcomes, _ = ClosedLoop(core_of(InventedModel(failing=0)), 2, lambda: None).run(
        1,
        [[1] * 4] * 2,
    )
    assert [outcome.failure for outcome in outcomes] == ["no luck", None]
    assert figures(outcomes)["failed"] == 1


# --- the command


def test_the_result_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "first.json"
    assert bench(settings_for(folder, output=first)) == 0
    assert "host ms" in capsys.readouterr().out
    result = json.loads(first.read_text())
    assert (
        result["kind"] == "offline"
        and result["server"]["model_id"] == folder.name
        and result["settings"]["engine"]["threads"] == 1
    )
    assert [run["load"] for run in result["runs"]] == ["closed 1", "closed 3"]
    for run in result["runs"]:
        step = run["figures"]["step"]
        assert run["figures"]["failed"] == 0 and 0 < step["host_share"] < 1 and step["count"] >= 5


def test_requests_that_do_not_fit_are_a_usage_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="600 together; the model and its cache hold 512"):
        bench(settings_for(folder, prompt_tokens=500, output_tokens=100))


def test_a_folder_without_a_checkpoint_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--offline", "--model", str(tmp_path / "none")]) == 78
    assert capsys.readouterr().err.startswith("onehead bench: ")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--concurrency", ""], "concurrency"),
        (["--engine.step_tokens", "2", "--engine.max_running", "3"], "step_tokens"),
    ],
)
def test_options_that_cannot_be_are_named(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load(OfflineSettings, argv, "onehead bench --offline")


@pytest.mark.parametrize("option", ["--url", "--rate", "--timeout"])
def test_options_of_the_other_kind_are_refused(
    option: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "--offline", option, "1"])
    assert left.value.code == 2 and option in capsys.readouterr().err


def test_an_interrupted_run_shows_what_it_has_and_writes_nothing(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step, taken, output = ClosedLoop._step, [0], tmp_path / "result.json"

    def interrupted(self: ClosedLoop, steps: Any) -> int:
        taken[0] += 1
        if (
            taken[0] == 40
            # After the warm-up's 5 steps and the first run's 20, in the third request of the
            # second.
        ):
            raise KeyboardInterrupt
        return step(self, steps)

    monkeypatch.setattr(ClosedLoop, "_step", interrupted)
    assert bench(settings_for(folder, output=output, concurrency=[1, 1], requests=4)) == 130
    printed = capsys.readouterr()
    rows = [line.split()[:4] for line in printed.out.splitlines() if "closed" in line]
    assert rows[0] == ["closed", "1", "4", "0"] and not output.exists()
    assert "interrupted: 1 of 2 runs are complete; no result is written" in printed.err


@pytest.mark.parametrize(("pages", "tokens"), [(2, 128), (8, None)])
def test_a_cache_smaller_than_the_context_is_told(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    pages: int,
    tokens: int | None,
) -> None:
    load_engine(
        settings_for(folder, cache={"pages": pages}, engine={"threads": 1, "max_context": 512}),
    )
    assert [message[: message.index(":")] for message in caplog.messages] == [
        f"the KV cache holds {tokens} tokens of one sequence, fewer than the context of 512"
        for _ in range(tokens is not None)
    ]
