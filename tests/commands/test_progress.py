"""Progress on standard error: lines where it is a file, for as long as anything takes."""

import os
import pty
import subprocess
import sys
import time

import pytest

from commands import progress

WORK = """
import sys, time
from commands import progress
progress.SECONDS = 0.05
with progress.progress() as shown:
    task = shown.add_task("measuring", total=3)
    for part in range(3):
        shown.update(task, description=f"part {part}")
        time.sleep(0.2)
        shown.advance(task)
print("result")
"""


def test_a_file_gets_lines_while_one_part_lasts() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n"
    lines = done.stderr.splitlines()
    assert sum("part 1" in line and " 1/3 " in line for line in lines) >= 2
    assert lines[-1].startswith("part 2") and " 3/3 " in lines[-1] and "\x1b" not in done.stderr


def test_a_dumb_terminal_gets_lines_too() -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "dumb"}
    command = [sys.executable, "-c", WORK]
    subprocess.run(command, stderr=theirs, stdout=subprocess.DEVNULL, env=environment, check=True)
    os.close(theirs)
    assert os.read(ours, 65536).decode().count("part 1") >= 2
    os.close(ours)


def test_nothing_is_said_after_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    with progress.progress(transient=True) as shown:
        shown.add_task("measuring", total=1)
        time.sleep(0.1)
    assert "measuring" in capsys.readouterr().err
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
