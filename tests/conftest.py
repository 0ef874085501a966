"""Shared fixtures: one torch thread per test process, a clean environment, tiny checkpoints."""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.paths import EMBEDDED

# Before any fixture starts a process: two test processes share two cores.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.support.checkpoints import SHAPES, TinyCheckpoint, make_checkpoint, make_tokenizer
from tests.support.families import FamilyCheckpoint, make_family_checkpoint
from tests.support.processes import ServerProcess

pytest_plugins = ("tests.support.durations",)

NIGHTLY = ("tests/bench/", "tests/deploy/", "tests/trials/")
"""Folders whose tests are run by scripts/test-nightly, not by scripts/test."""

# Seconds are the benchmarks' business: on a loaded machine a deadline fails what is right.
settings.register_profile("onehead", deadline=None)
settings.load_profile("onehead")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(NIGHTLY):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option of the machine's owner reaches a test."""
    for key in list(os.environ):
        if key.startswith("ONEHEAD_"):
            monkeypatch.delenv(key)


@pytest.fixture(
    scope="session",
    params=SHAPES,
    ids=lambda shape: f"H{shape.n_head}xd{shape.head_dim}V{shape.vocab_size}",
)
def any_checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TinyCheckpoint:
    """Each of the random checkpoints in turn."""
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """One random checkpoint with a tokenizer."""
    return make_checkpoint(SHAPES[0], tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_folder(tiny_checkpoint: TinyCheckpoint) -> Path:
    return tiny_checkpoint.folder


@pytest.fixture(scope="session")
def family_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, int], FamilyCheckpoint]:
    """Gives the random checkpoint of a family and number, made once in each test process. Tests do
    not write into its folder.
    """

    @cache
    def made(family: str, number: int) -> FamilyCheckpoint:
        return make_family_checkpoint(
            family, number, tmp_path_factory.mktemp(f"{family}-{number}-")
        )

    return made


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer each of whose tokens is one byte, and no model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "# {{ message.role }}: {{ message.content }}<|endoftext|>\n{% endfor %}{% if "
    "add_generation_prompt %}# assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def untemplated_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model without its chat template."""
    folder = tmp_path_factory.mktemp("untemplated") / "untemplated"
    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
    return folder


@pytest.fixture(scope="session")
def embedded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a plainer chat template than its own."""
    folder = tmp_path_factory.mktemp("embedded") / "embedded"
    shutil.copytree(EMBEDDED, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def pretrained_server() -> Iterator[ServerProcess]:
    """A running server of the embedded model with its own chat template, one for each test
    process.
    """
    server = ServerProcess(EMBEDDED, "--server.model_name", "embedded")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="session")
def embedded_server(embedded_folder: Path) -> Iterator[ServerProcess]:
    """A running server of it, one for each test process."""
    server = ServerProcess(embedded_folder, "--cache.pages", "512")
    yield server
    assert server.stop() == 0
