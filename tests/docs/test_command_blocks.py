"""Every command in README, Start and Guides runs as it stands there, or says why it cannot."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.generate_reference import DOCS
from tests.support.command_blocks import Block, Reader, blocks
from tests.support.paths import EMBEDDED, ROOT
from tests.support.processes import ServerProcess

README = ROOT / "README.md"
PAGES = [
    README,
    DOCS / "index.md",
    *sorted((DOCS / "start").glob("*.md")),
    *sorted((DOCS / "guides").glob("*.md")),
]
BLOCKS = {page: blocks(page.read_text()) for page in PAGES}
RUN = [page for page, found in BLOCKS.items() if any(block.reason is None for block in found)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader beside a server of the embedded model."""
    server = ServerProcess(EMBEDDED, "--cache.pages", "512")
    reader = Reader(tmp_path_factory.mktemp("reader"), server.port)
    yield reader
    assert set(reader.close()) <= {0}
    assert server.stop() == 0


def test_there_are_commands() -> None:
    assert sum(block.reason is None for found in BLOCKS.values() for block in found) >= 25
    assert {block.language for block in BLOCKS[README] if block.reason is None} == {
        "bash",
        "python",
    }


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.nightly if "guides" in page.parts else ())
        for page in RUN
    ],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_commands_of_a_page_run(page: Path, reader: Reader) -> None:
    reader.take(page.stem)
    for block in BLOCKS[page]:
        if block.reason is None:
            reader.run(block)


def test_the_first_request_is_answered_as_printed(reader: Reader) -> None:
    first = next(block for block in BLOCKS[README] if block.text.startswith("curl"))
    events = [
        json.loads(line.removeprefix("data:")) for line in reader.run(first).splitlines() if line
    ]
    said = events[-1]["generated_text"].strip()
    assert len(said) > 20 and said in README.read_text()


def test_a_reason_belongs_to_the_next_block_alone() -> None:
    page = "<!-- not run here: a GPU -->\n```bash\na\n```\n\n```sh\nb\n```\n```json\n{}\n```\n"
    assert blocks(page) == [Block("bash", "a\n", "a GPU"), Block("sh", "b\n", None)]


@pytest.mark.parametrize(
    "command", ["false", "curl localhost:8000/nowhere", "onehead plan nowhere", "onehead nothing"]
)
def test_a_command_that_fails_is_seen(command: str, reader: Reader) -> None:
    with pytest.raises(AssertionError):
        reader.run(Block("bash", command, None))
