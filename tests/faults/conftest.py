"""Fixtures of the fault suite: its options, the undisturbed server, a scene for each case."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.history import History
from tests.faults.scene import Scene, Undisturbed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="0", help="of every random choice of the nemesis")
    parser.addoption("--history", type=Path, help="folder for the histories; default: pytest's own")


@pytest.fixture(scope="session")
def undisturbed(tiny_folder: Path) -> Iterator[Undisturbed]:
    """One for the session, of the same checkpoint."""
    undisturbed = Undisturbed(tiny_folder)
    yield undisturbed
    assert undisturbed.server.stop(signal.SIGINT) == 0


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path, undisturbed: Undisturbed
) -> Iterator[Scene]:
    """A case's own, its randomness from the seed and the case's name."""
    case = str(request.node.callspec.params["case"])
    folder = request.config.getoption("--history") or tmp_path
    history = History(folder / f"{case}.jsonl")
    scene = Scene(tiny_folder, tmp_path, history, undisturbed, request.config.getoption("--seed"))
    yield scene
    scene.close()
