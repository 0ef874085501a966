"""The page of `onehead bench --html`."""

import copy
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from commands.bench.bench import run_of
from commands.bench.client import Outcome
from commands.bench.comparison import Earlier
from commands.bench.figures import circumstances
from commands.bench.page import page

VOID = {"meta", "line", "circle", "polyline"}


def outcome(start: float, wait: float, gap: float, tokens: int = 20) -> Outcome:
    times = [start + wait + number * gap for number in range(tokens)]
    return Outcome(start, start, times[-1], times, list(range(tokens)), 8)


def result(*loads: str, speed: float = 1.0) -> dict[str, Any]:
    """A result of these loads; `speed` divides its latencies."""
    runs = []
    for number, label in enumerate(loads, 1):
        outcomes = [outcome(0.1 * i, 0.02 * number / speed, 0.004 * number * (1 + i / 10) / speed) for i in range(12)]
        runs.append(run_of(label, outcomes))
    settings = {"requests": 12, "prompt_tokens": 8, "output_tokens": 20, "concurrency": [1], "seed": 0}
    return circumstances({"model_id": "model", "model_sha": None}) | {"kind": "server", "settings": settings, "runs": runs}


class Parsed(HTMLParser):
    """Tags in their order, with what they ask for, and the text of every cell. Fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID or (tag == "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def test_a_page_has_a_chart_for_each_figure_and_every_number() -> None:
    found = result("closed 1", "closed 8", "open 4/s")
    parsed = Parsed(page(found, None))
    assert parsed.count("figure") == 4 + 4 + 3
    rows = {row[0]: row[1:] for row in parsed.rows}
    for index, run in enumerate(found["runs"]):
        assert rows["output tokens/s"][index] == f"{run['figures']['output_tokens_per_second']:.2f}"
        for name, key in (
            ("TTFT", "time_to_first_token"),
            ("Inter-token latency", "inter_token_latency"),
            ("End-to-end latency", "e2e_latency"),
        ):
            for part in ("mean", "p50", "p90", "p99", "max"):
                assert rows[f"{name} {part}, ms"][index] == f"{run['figures'][key][part] * 1e3:.2f}"
    assert rows[""] == ["closed 1", "closed 8", "open 4/s"] and rows["server.model_sha"] == ["none"] and rows["failed"] == ["0"] * 3


def test_an_earlier_result_is_dashed_and_stands_beside_each_number(tmp_path: Path) -> None:
    now, before = result("closed 1", "closed 8", speed=2.0), result("closed 8", "closed 1", "closed 64")
    before["commit"] = "another"
    parsed = Parsed(page(now, Earlier(tmp_path / "earlier.json", before)))
    row = next(row for row in parsed.rows if row[-4:-3] == ["TTFT p50, ms"])
    assert row == ["TTFT p50, ms", "10.00", "40.00", "0.250"]
    dashed = [attributes for tag, attributes in parsed.tags if tag == "polyline" and "earlier" in (attributes["class"] or "")]
    assert len(dashed) == 1 + 3 * 3 + 3 * 2
    assert "closed 64" not in parsed.text and "earlier another" in parsed.text


def test_an_earlier_result_without_distributions_has_none(tmp_path: Path) -> None:
    now, before = result("closed 1"), result("closed 1")
    del before["runs"][0]["distributions"]
    parsed = Parsed(page(now, Earlier(tmp_path / "earlier.json", before)))
    assert parsed.count("figure") == 7


def test_a_page_asks_for_nothing_and_runs_nothing() -> None:
    text = page(result("closed 1"), None)
    parsed = Parsed(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in parsed.tags}
    assert not re.findall(r"https?:|url\(|@import|<[^>]* on\w+=", text)
    policy = next(attributes["content"] for tag, attributes in parsed.tags if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every text inside."""
    if isinstance(value, str):
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from strings(inner, (*path, key))


def test_no_text_of_a_result_is_markup(tmp_path: Path) -> None:
    """In every place of both results where a text stands. A load says by its first word where it is drawn, so that one is kept."""
    bad = "x</style></title></text><script>alert(1)</script>\"'{{ 7 * 7 }}"
    now = result("closed 1", "open 4/s")
    now["runs"][0]["load"] = f"closed {bad}"
    before = copy.deepcopy(now)
    for each in (now, before):
        for path in [path for path in strings(each) if path[0] != "runs" and path != ("kind",)]:
            inner: Any = each
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = bad
    clean = {tag for tag, _ in Parsed(page(result("closed 1", "open 4/s"), Earlier(tmp_path, result("closed 1", "open 4/s")))).tags}
    parsed = Parsed(page(now, Earlier(tmp_path / bad.replace("/", ""), before)))
    assert {tag for tag, _ in parsed.tags} <= clean
    assert "{{ 7 * 7 }}" in parsed.text


@pytest.mark.parametrize("failed", [3, 12])
def test_failed_requests_leave_gaps_and_no_error(failed: int) -> None:
    outcomes = [outcome(0.1 * i, 0.02, 0.004) for i in range(12)]
    for each in outcomes[:failed]:
        each.failure = "HTTP 503"
    found = result("closed 1")
    found["runs"].append(run_of("closed 8", outcomes))
    rows = {row[0]: row[1:] for row in Parsed(page(json.loads(json.dumps(found)), None)).rows}
    assert rows["failed"] == ["0", str(failed)]
    assert (rows["TTFT p50, ms"][1] == "-") == (failed == 12)


def test_a_run_of_a_single_token_has_no_inter_token_latency() -> None:
    found = result("closed 1")
    found["runs"] = [run_of("closed 1", [outcome(0.0, 0.02, 0.0, tokens=1)])]
    assert Parsed(page(found, None)).count("figure") == 3 + 2
