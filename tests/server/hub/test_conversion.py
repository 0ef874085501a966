"""Conversions in a child process: why one failed, and that a signal leaves neither a process nor
files.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from server.errors import ResourceError
from server.hub import conversion


def test_one_that_hangs_or_dies_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SECONDS", 0.01)
    assert conversion.run("json.tool", "/dev/zero") == "it took more than 0.01 s"
    monkeypatch.setattr(conversion, "SECONDS", 60)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert conversion.run("json.tool") == "the conversion ended with status 1"


def test_a_child_that_cannot_write_is_a_lack_of_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "/: No space left on device\n"
    done = subprocess.CompletedProcess([], ResourceError.exit_code, stdout=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ResourceError, match=r"/: No space left on device; .* XDG_CACHE_HOME"):
        conversion.run("json.tool")


def test_an_interrupt_of_the_child_is_one_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], -signal.SIGINT, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(KeyboardInterrupt), conversion.new_folder(tmp_path / "cache"):
        conversion.run("json.tool")
    assert not list((tmp_path / "cache").iterdir())


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def eventually(happened: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    began, cache = tmp_path / "began", tmp_path / "cache"
    (tmp_path / "slow.py").write_text(
        f"import time; open({str(began)!r}, 'w').close(); time.sleep(100)"
    )
    code = (
        "import pathlib, sys; from server.hub.conversion import new_folder, run\nwith "
        "new_folder(pathlib.Path(sys.argv[1])): run('slow')"
    )
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(cache)], env=environment, stderr=subprocess.DEVNULL
    )
    eventually(began.exists)
    (child,) = children(process.pid)
    process.send_signal(number)
    assert process.wait(timeout=20) != 0
    eventually(lambda: not Path(f"/proc/{child}").exists())
    assert number == signal.SIGKILL or not list(cache.iterdir())
