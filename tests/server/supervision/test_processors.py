"""Processors and the OpenMP environment of the engine: quotas of cgroup v1 and v2, and the user's
own settings.
"""

import os
import sys
from pathlib import Path

import pytest

from server.service import _warn_of_threads
from server.supervision import processors
from tests.support.processes import ServerProcess


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.fsencode(text))


def available(tmp_path: Path, groups: str) -> float:
    """Processors of a process in these groups, of a machine whose groups are in `fs`."""
    proc = tmp_path / "proc"
    write(proc / "cgroup", groups)
    mounts = [f"30 23 0:26 / {tmp_path}/fs rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"]
    mounts += [
        f"31 23 0:27 / {tmp_path}/fs/{name} rw - cgroup cgroup rw,{name}"
        for name in ("cpu,cpuacct", "memory")
    ]
    write(proc / "mountinfo", "\n".join(["22 1 8:1 / / rw - ext4 /dev/root rw", *mounts]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, "PROC", proc)
        return processors.available_processors()


@pytest.fixture(autouse=True)
def _eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")


def test_without_a_quota_every_processor_of_the_affinity_mask_counts(tmp_path: Path) -> None:
    assert available(tmp_path, "") == 8
    write(tmp_path / "fs" / "cpu.max", "max 100000\n")
    assert available(tmp_path, "0::/\n") == 8


def test_a_quota_of_a_container(tmp_path: Path) -> None:
    write(tmp_path / "fs" / "cpu.max", "150000 100000\n")
    assert available(tmp_path, "0::/\n") == 1.5
    # The path of the host's hierarchy, of which a container sees its own group alone, as the root.
    assert available(tmp_path, "0::/docker/1234\n") == 1.5


def test_the_smallest_quota_of_the_groups_above_holds(tmp_path: Path) -> None:
    write(tmp_path / "fs" / "machine.slice" / "cpu.max", "300000 100000\n")
    write(tmp_path / "fs" / "machine.slice" / "onehead.service" / "cpu.max", "600000 100000\n")
    assert available(tmp_path, "0::/machine.slice/onehead.service\n") == 3


def test_a_quota_of_the_first_version(tmp_path: Path) -> None:
    write(tmp_path / "fs" / "cpu,cpuacct" / "docker" / "cpu.cfs_quota_us", "250000\n")
    write(tmp_path / "fs" / "cpu,cpuacct" / "docker" / "cpu.cfs_period_us", "100000\n")
    assert available(tmp_path, "4:memory:/docker\n2:cpu,cpuacct:/docker/1234\n0::/\n") == 2.5
    write(tmp_path / "fs" / "cpu,cpuacct" / "docker" / "cpu.cfs_quota_us", "-1\n")
    assert available(tmp_path, "2:cpu,cpuacct:/docker\n") == 8


def test_lines_that_are_not_understood_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "fs" / "cpu.max", "150000 100000\n")
    assert available(tmp_path, "\nno colon\n0::/caf\udce9\n") == 1.5


def test_threads_are_whole_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for quota, threads in ((0.5, 1), (1.5, 1), (2.0, 2)):
        monkeypatch.setattr(processors, "available_processors", lambda quota=quota: quota)
        assert processors.engine_threads(None) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert processors.engine_threads(5) == 5
    assert processors.engine_threads(None) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2,2")
    assert processors.engine_threads(None) == 2


@pytest.mark.parametrize(
    ("max_running", "step_tokens", "has_gpu", "expected"),
    [
        (None, None, False, (64, 512)),
        (None, None, True, (256, 4096)),
        (600, None, False, (600, 600)),
        (600, None, True, (600, 4096)),
        (None, 48, False, (48, 48)),
        (None, 1024, True, (256, 1024)),
        (2, 101, True, (2, 101)),
    ],
)
def test_steps_are_larger_on_a_gpu(
    max_running: int | None,
    step_tokens: int | None,
    has_gpu: bool,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "nvidia0").touch() if has_gpu else None
    monkeypatch.setattr(processors, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert processors.step_sizes(max_running, step_tokens, "auto") == expected
    assert processors.step_sizes(None, None, "cpu") == (64, 512)
    assert processors.step_sizes(None, None, "cuda") == (256, 4096)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, True), ("1", True), ("MIG-abc", True), ("", False), ("-1", False)],
)
def test_a_hidden_gpu_is_not_used(
    visible: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(processors, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert processors.on_gpu("auto") is expected and processors.on_gpu("cuda")


def test_threads_spin_for_a_short_time_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"A": "b"})
    assert processors.engine_environment() == {
        "A": "b",
        "GOMP_SPINCOUNT": str(processors.SPIN_ITERATIONS),
    }
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setattr(os, "environ", {name: "x"})
        assert processors.engine_environment() == {name: "x"}


@pytest.mark.parametrize(
    ("threads", "quota", "warned"),
    [(2, 2.0, False), (2, 1.5, True), (4, 2.0, True), (1, 1.0, False)],
)
def test_more_threads_than_processors_are_told(
    threads: int,
    quota: float,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("server.service.available_processors", lambda: quota)
    _warn_of_threads(threads)
    assert (f"{threads} threads for {quota:g} processors" in caplog.text) == warned


def test_the_engine_of_a_server_has_that_environment(embedded_server: ServerProcess) -> None:
    variables = Path(f"/proc/{embedded_server.engine_pid}/environ").read_text().split("\0")
    assert f"GOMP_SPINCOUNT={processors.SPIN_ITERATIONS}" in variables
