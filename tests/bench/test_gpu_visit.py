"""A visit to a GPU host, where there is none: its archive, the parts that only a visit runs, and
the training of the embedded model.
"""

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import attention, check, profile
from bench.gpu.archive import read
from bench.gpu.attention import Problem
from bench.gpu.common import Part, make_checkpoint
from cache.layout import CacheLayout
from model.runner.runner import ModelRunner
from model.step import Sample, Sampling, StepPlan
from tests.support.attention_cases import Case
from tests.support.paths import ROOT


def test_a_visit_leaves_one_archive_of_everything(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.gpu",
        "--device",
        "cpu",
        "--small",
        "--only",
        "ceilings,attention",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.zip"]
    members = read(tmp_path / "gpu.zip")
    logs = {f"{name}.log" for name in ("imports", "ceilings", "attention", "ceilings_after")}
    assert set(members) == {"gpu.json", "report.txt", "gpu.png"} | logs
    found = json.loads(members["gpu.json"])
    assert found["server"]["device"] == "cpu" and all(check["holds"] for check in found["checks"])
    cases = {
        kernel: {
            heads: set(by_case) for heads, by_case in found["parts"]["attention"][kernel].items()
        }
        for kernel in ("onehead", "sdpa", "flex")
    }
    assert cases["onehead"] == {"4x32": {"1x64", "3x128"}, "3x16": {"1x64", "3x128"}}
    assert cases["sdpa"] == cases["flex"] == {"4x32": {"3x128"}, "3x16": {"3x128"}}
    assert len(members["gpu.png"]) > 10_000
    assert (
        "onehead 4x32 3x128, no graph" in done.stdout
        and members["report.txt"].decode() in done.stdout
    )
    figure = found["parts"]["attention"]["onehead"]["4x32"]["3x128"]
    assert (
        figure["seconds_with_write"] > 0
        and figure["spread"][0] <= figure["seconds"] <= figure["spread"][1]
    )
    assert found["parts"]["ceilings_after"]["copy"]["rate"] > 0


def test_attention_that_is_wrong_is_not_timed(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.gpu.attention.backend_name", lambda *_: "reference")
    monkeypatch.setattr("bench.gpu.attention.PEER_CASES", ())
    run: Any = Problem.ours

    def off(problem: Problem) -> Any:
        call = run(problem)
        return lambda layer: call(layer) + 1e-2

    monkeypatch.setattr(Problem, "ours", off)
    attention.measure(part)
    assert "is off by 0.0" in part.found["onehead"]["4x32"]["3x128"]["failed"]


@pytest.fixture
def part(tmp_path: Path) -> Part:
    return Part(tmp_path / "gpu.zip", "part", "cpu", True, tmp_path, 100.0)


@pytest.fixture
def _on_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's attention stands in for the GPU's, so that two backends are compared."""
    monkeypatch.setattr(check, "backend_name", lambda pool, heads: "reference")


@pytest.mark.usefixtures("_on_reference")
def test_the_checks_pass_here(part: Part) -> None:
    check.measure(part)
    assert part.found["attention"] == {"4x32 float32": {"kernels": "reference"}}
    assert (
        set(part.found["replays"]) == {"default"}
        and part.found["replays"]["default"]["logprob_distance"] < 1e-3
    )


@pytest.mark.usefixtures("_on_reference")
def test_a_check_finds_what_is_wrong(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is off by a little, or that depends on the batch; a step that ignores its
    plan's contexts.
    """
    run: Any = Case.run
    calls = count()

    def off(
        case: Case, chosen: list[int], layer: int = 0, name: str | None = None, *more: Any
    ) -> Any:
        is_second = next(calls) % 2  # The first call computes what is expected.
        return [o + 1e-2 * is_second for o in run(case, chosen, layer, name, *more)]

    def in_company(
        case: Case, chosen: list[int], layer: int = 0, name: str | None = None, *more: Any
    ) -> Any:
        return [
            o + 1e-6 * (len(chosen) > 1 and name is None)
            for o in run(case, chosen, layer, name, *more)
        ]

    for wrong in (off, in_company):
        with monkeypatch.context() as patch:
            patch.setattr(Case, "run", wrong)
            check.attention(part, 4, 32, None, torch.float32)
            assert "AssertionError" in part.found["attention"]["4x32 float32"]["failed"], wrong

    class Stale(ModelRunner):
        def run(self, plan: StepPlan) -> Any:
            sample: Any = plan.rows[0].sample
            return super().run(
                StepPlan(tuple(check.rows_of([1] * len(plan.rows), sample, self.pool.layout)))
            )

    monkeypatch.setattr(check, "ModelRunner", Stale)
    with pytest.raises(AssertionError):
        check.replays(part, {})


def test_the_profile_of_a_step(part: Part) -> None:
    make_checkpoint(part)
    profile.measure(part)
    for case in ("1x64", "3x128"):
        least, most = part.found[case]["temperature 0.6"]["step"]["spread"]
        assert 0 < least <= part.found[case]["temperature 0.6"]["step"]["seconds"] <= most
        assert part.found[case]["temperature 0.6, by kernel"] == {
            "kernels": {},
            "seconds": 0,
            "calls": 0,
        }


def test_a_step_of_the_visit_is_a_decode_step() -> None:
    layout = CacheLayout.of(1, (), check.PAGE_SIZE)
    rows = check.rows_of([1, 65, 200], Sample(Sampling(), [1], []), layout)
    assert [len(row.pages[0]) for row in rows] == [1, 2, 4] and len(
        {page for row in rows for page in row.pages[0]}
    ) == 7
