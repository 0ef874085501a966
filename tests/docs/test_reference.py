"""The committed reference pages are what the code says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import generate_reference
from scripts.generate_reference import (
    DOCS,
    answers,
    bounds_of,
    errors_page,
    pages,
    read,
    table,
    type_of,
)
from tests.support.processes import ServerProcess


@pytest.fixture(scope="module")
def generated(embedded_folder: Path) -> Iterator[dict[Path, str]]:
    """By a server of its own: one that has ignored fields shows more labels."""
    with ServerProcess(embedded_folder, "--cache.pages", "512") as server:
        url = f"http://127.0.0.1:{server.port}"
        yield pages(*answers(lambda path, body: read(f"{url}{path}", body)))


def test_the_pages_are_what_the_code_says(generated: dict[Path, str]) -> None:
    stale = [path.name for path, text in generated.items() if path.read_text() != text]
    assert not stale, (
        f"{stale} differ from the code: run `scripts/docs reference` and commit what it writes"
    )


def test_every_page_of_the_reference_is_generated(generated: dict[Path, str]) -> None:
    assert set((DOCS / "reference").iterdir()) <= set(generated)


def test_a_code_word_that_is_not_explained_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(generate_reference.CODES, "queue_timeout")
    with pytest.raises(ValueError, match="queue_timeout"):
        errors_page()


@pytest.mark.parametrize(
    ("schema", "kind", "bounds"),
    [
        ('{"type": "integer", "minimum": 1, "maximum": 4}', "integer", ">= 1, <= 4"),
        (
            '{"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}',
            "number",
            "> 0",
        ),
        (
            '{"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}',
            "string or list of integer",
            "",
        ),
        ('{"type": ["number", "null"]}', "number", ""),
        ('{"enum": ["a", "b"]}', "`a`, `b`", ""),
        ('{"$ref": "#/components/schemas/Token"}', "[Token]", ""),
    ],
)
def test_types_in_words(schema: str, kind: str, bounds: str) -> None:
    parsed: dict[str, Any] = json.loads(schema)
    assert type_of(parsed, lambda name: f"[{name}]") == kind and bounds_of(parsed) == bounds


def test_a_cell_does_not_end_the_table() -> None:
    assert (
        table("a | b", [["x|y", "two\nlines"]])
        == "| a | b |\n| --- | --- |\n| x\\|y | two lines |\n"
    )
