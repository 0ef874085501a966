"""F30: `onehead batch` while its engine dies, is away for long, or comes back with another model:
right answers, or an end with the reason.

The requests are 400, and every answer that is ever kept is that of a run to which nothing happens.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cases_files import Damage, no_weights, other_weights
from tests.faults.rules import FOLDER_VARIABLE, Rule, as_json
from tests.faults.scene import command_line
from tests.support.paths import ROOT
from tests.support.processes import DEADLINE, alive, children, forked, kill, wait_until

REQUESTS = 400
PACE = Rule("pace", seconds=0.004)
GAVE_UP, CONFIGURATION, USAGE = 70, 78, 2


class Batch:
    """A folder with requests, the answers that are right, and the runs that a case starts."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = Path(shutil.copytree(model, folder / "model"))
        self.folder = folder
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.partial = folder / "out.jsonl.partial"
        self.source.write_text(
            "".join(json.dumps(request(number)) + "\n" for number in range(REQUESTS))
        )
        self.runs = 0
        self.run(folder / "right.jsonl").wait(DEADLINE)
        self.right = texts((folder / "right.jsonl").read_text())
        assert len(self.right) == REQUESTS

    def run(
        self, target: Path | None = None, *options: str, rules: tuple[Rule, ...] = ()
    ) -> subprocess.Popen[str]:
        """Starts the command; its engines obey the rules."""
        self.runs += 1
        files = self.folder / f"run-{self.runs}"
        files.mkdir()
        self.log = files / "stderr"
        command = [
            sys.executable,
            "-m",
            "tests.faults.faulty_server",
            as_json(rules),
            str(files),
            "batch",
            str(self.source),
        ]
        command += [
            str(target or self.target),
            "--model",
            str(self.model),
            "--engine.max_running",
            "16",
            *options,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, text=True)
        return self.process

    def holder(self) -> int:
        """The process that holds the weights."""

        def holders() -> list[int]:
            return [
                pid
                for pid in children(self.process.pid)
                if alive(pid) and b"faulty_worker" in command_line(pid)
            ]

        return int(wait_until(holders, "an engine")[0])

    def engine(self) -> int:
        """The engine that runs, or is loaded, now."""
        return forked([self.holder()])[0]

    def answered(self, count: int) -> None:
        """Waits until so many answers are kept."""
        wait_until(
            lambda: self.partial.exists() and self.partial.read_bytes().count(b"\n") >= count,
            f"{count} answers",
        )

    def ended(self, status: int, words: str = "") -> None:
        """The run ends with a status and, where it is no success, with the reason as its last line;
        what is kept is right.
        """
        assert self.process.wait(DEADLINE) == status, self.log.read_text()[-2000:]
        said = self.log.read_text()
        assert "Traceback" not in said and words in said.strip().splitlines()[-1], said[-2000:]
        kept = self.target if status == 0 else self.partial
        found = texts(kept.read_text())
        assert found.items() <= self.right.items() and (status != 0 or len(found) == REQUESTS), (
            f"{len(found)} answers are kept"
        )
        assert self.target.exists() == (status == 0)

    def close(self) -> None:
        """Kills what is left, orphans too: they are known by the folder they were given."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{FOLDER_VARIABLE}={self.folder}/run-".encode() in environment.read_bytes():
                    os.kill(int(environment.parent.name), signal.SIGKILL)


def request(number: int) -> dict[str, Any]:
    sampled = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    body = {
        "prompt": f"def f{number}(",
        "max_tokens": 10 + number % 40,
        "ignore_eos": True,
        **sampled,
    }
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}


def texts(lines: str) -> dict[str, str]:
    """The text of each answer, by its request. Fails for an answer that is an error."""
    answers = [json.loads(line) for line in lines.splitlines()]
    answers = [answer.get("answer", answer) for answer in answers]
    assert all(answer["response"]["status_code"] == 200 for answer in answers)
    return {
        answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers
    }


@pytest.fixture
def batch(tiny_folder: Path, tmp_path: Path) -> Iterator[Batch]:
    batch = Batch(tiny_folder, tmp_path)
    yield batch
    batch.close()


def test_its_engines_are_killed(batch: Batch) -> None:
    batch.run(rules=(PACE,))
    for count in (40, 130, 250):
        batch.answered(count)
        kill(batch.engine())
    batch.ended(0)


def test_a_slow_successor_is_waited_for(batch: Batch) -> None:
    batch.run(
        None,
        "--recovery_timeout",
        "20",
        rules=(PACE, Rule("slow_load", seconds=6.0, from_engine=2, times=1)),
    )
    batch.answered(100)
    kill(batch.engine())
    batch.ended(0)


def test_a_successor_that_is_away_for_too_long_ends_it_and_the_same_command_goes_on(
    batch: Batch,
) -> None:
    batch.run(
        None,
        "--recovery_timeout",
        "1",
        rules=(PACE, Rule("slow_load", seconds=30.0, from_engine=2, times=1)),
    )
    batch.answered(100)
    kill(batch.engine())
    batch.ended(GAVE_UP, "the engine is not back yet; the answers so far are kept")
    batch.run()
    batch.ended(0)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (other_weights, "are not those that the server began with"),
        (no_weights, "model.safetensors: no such file"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_successor_of_another_model_answers_nothing(
    batch: Batch, damage: Damage, words: str
) -> None:
    whole = Path(shutil.copytree(batch.model, batch.folder / "whole"))
    batch.run(None, "--recovery_timeout", "10", rules=(PACE,))
    batch.answered(100)
    damage(batch.model)
    kill(batch.holder())
    # Refused three times within that time, or so slow to load that it was refused less often.
    status = CONFIGURATION if batch.process.wait(DEADLINE) == CONFIGURATION else GAVE_UP
    batch.ended(status, words)
    if damage is other_weights:
        batch.run()
        batch.ended(USAGE, "answers of another model")
    shutil.rmtree(batch.model)
    whole.rename(batch.model)
    batch.run()
    batch.ended(0)
