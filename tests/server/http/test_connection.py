"""Places for connections: the limit of open files is raised for them, or bounds them."""

import resource

import pytest

from server.errors import ResourceError
from server.http.connection import MIN_CONNECTIONS, OTHER_FILES, PROBE_CONNECTIONS, raise_file_limit

OTHERS = OTHER_FILES + PROBE_CONNECTIONS


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The soft and the hard limit of open files, which the process seems to have."""
    now = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(now))
    monkeypatch.setattr(
        resource, "setrlimit", lambda which, wanted: now.__setitem__(slice(None), wanted)
    )
    return now


def test_the_limit_of_files_is_raised_as_far_as_it_goes(
    limits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert raise_file_limit(100) == 100 and limits == [256, 1024]
    assert raise_file_limit(500) == 500 and limits == [500 + OTHERS, 1024] and not caplog.records
    assert raise_file_limit(4096) == 1024 - OTHERS
    assert f"server.max_connections to {1024 - OTHERS}" in caplog.text


def test_a_limit_that_leaves_no_connections_is_refused_with_what_is_needed(
    limits: list[int],
) -> None:
    limits[:] = [64, OTHERS + MIN_CONNECTIONS - 1]
    with pytest.raises(
        ResourceError,
        match=f"{OTHERS + MIN_CONNECTIONS - 1} files open, and needs {OTHERS + MIN_CONNECTIONS}",
    ):
        raise_file_limit(4096)
    assert raise_file_limit(2) == 2
    limits[:] = [64, OTHERS + MIN_CONNECTIONS]
    assert raise_file_limit(4096) == MIN_CONNECTIONS
