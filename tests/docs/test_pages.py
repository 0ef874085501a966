"""Pages that list parts of the source name all of them."""

import re

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


WHY = (DOCS / "why.md").read_text()
ENTRY = re.compile(r"^- <a id=\"([a-z0-9-]+)\"></a>(.*?)(?=^- |^#|\Z)", re.MULTILINE | re.DOTALL)


def test_every_section_of_performance_has_its_source() -> None:
    """Every section has a date, and a command that measures."""
    sections = (DOCS / "performance.md").read_text().split("\n## ")[1:]
    assert len(sections) > 5
    dated = re.compile(r"\b20\d\d-\d\d-\d\d\b")
    command = re.compile(r"python\s+-m\s+(bench|tests)\.|onehead compare|scripts/real")
    undated = [
        section.splitlines()[0]
        for section in sections
        if not (dated.search(section) and command.search(section))
    ]
    assert undated == []


def test_decisions_are_short_and_have_an_anchor_each() -> None:
    entries = ENTRY.findall(WHY)
    assert len(entries) == WHY.count("\n- ") == len(dict(entries))
    assert [anchor for anchor, text in entries if len(text.split()) > 60] == []


def test_references_to_decisions_name_one_that_there_is() -> None:
    """Also in comments of the code, which the site's own check of links does not see."""
    anchors = {*re.findall(r"<a id=\"([a-z0-9-]+)\"", WHY)}
    anchors |= {
        heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", WHY, re.MULTILINE)
    }
    folders = ("bench", "cache", "commands", "docs", "model", "scripts", "server", "tests")
    paths = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in ("", ".md", ".py") and path.is_file()
    ]
    texts = {path: path.read_text() for path in [*paths, *ROOT.glob("*.md"), ROOT / "mkdocs.yml"]}
    named = {path: {*re.findall(r"\bwhy\.md#([a-z0-9-]+)", text)} for path, text in texts.items()}
    assert {path: names - anchors for path, names in named.items() if names - anchors} == {}
