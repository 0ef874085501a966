"""Pages that list parts of the source name all of them."""

import pytest

from scripts.generate_reference import DOCS
from tests.support.paths import ROOT

TREE = (DOCS / "contributing" / "tree.md").read_text()
PACKAGES = [
    path.parent.relative_to(ROOT).as_posix()
    for package in ("commands", "server", "model", "cache")
    for path in sorted((ROOT / package).rglob("__init__.py"))
]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_names_every_package(package: str) -> None:
    assert f"`{package}/`" in TREE


def test_every_figure_of_performance_has_its_source() -> None:
    """Every section links to the page of docs/bench that its figures are from."""
    sections = (DOCS / "performance.md").read_text().split("\n## ")[1:]
    assert len(sections) > 5
    assert [section.splitlines()[0] for section in sections if "](bench/" not in section] == []
