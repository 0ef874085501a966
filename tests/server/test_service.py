"""SupervisedEngine: an engine that the kernel has ended for lack of memory is said to have."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from server.service import SupervisedEngine


@pytest.mark.parametrize(
    ("status", "counts", "named"),
    [
        (-signal.SIGKILL, (3, 4), True),
        (-signal.SIGKILL, (3, 3), False),
        (-signal.SIGSEGV, (3, 4), False),
        (1, (3, 4), False),
    ],
)
def test_the_oom_killer_is_named_where_the_kernel_counts_it(
    status: int,
    counts: tuple[int, int],
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before, after = counts
    monkeypatch.setattr("server.service.num_oom_kills", lambda: after)
    kills: list[bool] = []
    holder = SimpleNamespace(kill=lambda: kills.append(True))
    engine: Any = SimpleNamespace(_num_oom_kills=before, _holder=holder)
    ended: list[int] = []
    SupervisedEngine._on_exit(engine, ended.append, status)
    # Of the next engine, without another such end.
    SupervisedEngine._on_exit(engine, ended.append, status)
    assert ended == [status] * 2
    assert caplog.text.count("OOM killer") == caplog.text.count("lower cache.memory") == int(named)
    assert len(kills) == int(named), "the memory of the cache is given back"
