"""A child process ends when its parent does, at whatever moment, and finds its module without a
working directory.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server import child_process
from tests.support.paths import ROOT
from tests.support.processes import DEADLINE, alive, wait_until

# Starts a child that takes its time to import the module that it is to run, says its id, and waits.
PARENT = """
import subprocess, sys, time
from server.child_process import child_command
print(subprocess.Popen(child_command("slow_import"), cwd="/").pid, flush=True)
time.sleep(100)
"""


@pytest.fixture
def slow_import(tmp_path: Path) -> dict[str, str]:
    """The environment in which a module of this name marks that its import has begun, and imports
    for ever.
    """
    marker = str(tmp_path / "began")
    (tmp_path / "slow_import.py").write_text(
        f"import time; open({marker!r}, 'w').close(); time.sleep(100)"
    )
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}


@pytest.mark.parametrize("at_once", [True, False])
def test_it_ends_with_its_parent_while_it_imports(
    tmp_path: Path, slow_import: dict[str, str], at_once: bool
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=slow_import
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if not at_once:
        wait_until((tmp_path / "began").exists, "the import has begun")
    parent.kill()
    parent.wait(DEADLINE)
    parent.stdout.close()
    wait_until(lambda: not alive(child), "the child has ended", 0.5)


def test_a_child_whose_parent_was_gone_before_it_could_ask_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = child_process.child_command("server.nothing_of_this_name")
    assert int(command[-2]) == os.getpid()
    command[-2] = "1"  # Of a process that is not its parent.
    done = subprocess.run(command, cwd="/", capture_output=True, timeout=DEADLINE, check=False)
    assert done.returncode == 1 and done.stderr == b"", "the module is never looked for"


def test_it_needs_no_working_directory_and_no_absolute_path(tmp_path: Path) -> None:
    """The parent's folder is deleted, and its packages were found through a relative path: the
    child finds its module all the same.
    """
    code = (
        "import os, subprocess, sys; from server import child_process; os.chdir(sys.argv[1]); "
        "os.rmdir(sys.argv[1]);command = child_process.child_command('server.errors');"
        "sys.exit(subprocess.run(command, cwd=child_process.WORKING_DIRECTORY).returncode)"
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    command, environment = [sys.executable, "-c", code, str(gone)], os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_hangup_does_not_end_a_child_that_still_imports(
    tmp_path: Path, slow_import: dict[str, str]
) -> None:
    """A service manager may send it to every process of the service."""
    code = PARENT.replace("time.sleep(100)", "sys.stdin.read()")
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=slow_import,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_until((tmp_path / "began").exists, "the import has begun")
    (ignored,) = re.findall(r"SigIgn:\s+(\w+)", Path(f"/proc/{child}/status").read_text())
    assert int(ignored, 16) >> (signal.SIGHUP - 1) & 1
    os.kill(child, signal.SIGHUP)
    parent.communicate()
    wait_until(lambda: not alive(child), "the child's end")


FILES = """
import resource, sys
from server.child_process import allow_files
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_files(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "limit"),
    [(256, 1024, 512, 512), (256, 1024, 2000, 1024), (512, 1024, 256, 512)],
)
def test_open_files_are_allowed_up_to_the_hard_limit(
    soft: int, hard: int, wanted: int, limit: int
) -> None:
    command = [sys.executable, "-c", FILES, str(soft), str(hard), str(wanted)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(limit)] * 2
