"""The dashboard and the alert rules ask for metrics that a server exposes. scripts/observability
evaluates them by a real Prometheus.
"""

import re
import shutil
import subprocess
from itertools import combinations
from typing import Any

import pytest

from tests.support.observability import (
    PROMETHEUS,
    alerts,
    anchors,
    dashboard,
    dashboard_expressions,
    exposed,
    page_and_anchor,
    problems,
)
from tests.support.processes import ServerProcess

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed; it comes with Prometheus"
)
PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def series(embedded_server: ServerProcess) -> dict[str, set[str]]:
    """What a server exposes that has answered a request."""
    embedded_server.text("def", max_new_tokens=2)
    return exposed(embedded_server.get("/metrics")[1])


def test_the_dashboard_asks_for_metrics_that_there_are(series: dict[str, set[str]]) -> None:
    found = {
        title: problems(expression, series) for title, expression in dashboard_expressions().items()
    }
    assert len(found) > 40
    assert {title: words for title, words in found.items() if words} == {}


def test_the_alerts_ask_for_metrics_that_there_are(series: dict[str, set[str]]) -> None:
    found = {rule["alert"]: problems(rule["expr"], series) for rule in alerts()}
    assert len(found) >= 13
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("rate(onehead_tokens_total[5m])", ["no metric onehead_tokens_total"]),
        ("onehead_time_to_first_token_seconds", ["no metric onehead_time_to_first_token_seconds"]),
        (
            'sum(onehead_requests_total{reason="failed"})',
            ["onehead_requests_total has no label reason"],
        ),
        ("sum by (model) (onehead_requests_total)", ["no metric has the label model"]),
        ('sum by (outcome) (rate(onehead_requests_total{job="a", outcome!="failed"}[5m]))', []),
    ],
)
def test_what_is_not_exposed_is_seen(
    expression: str, words: list[str], series: dict[str, set[str]]
) -> None:
    assert problems(expression, series) == words


def test_the_variables_of_the_dashboard_are_declared_and_used() -> None:
    declared = {variable["name"] for variable in dashboard()["templating"]["list"]}
    used = {
        name
        for expression in dashboard_expressions().values()
        for name in re.findall(r"\$(\w+)", expression)
    }
    assert used - {"__rate_interval", "__range"} == declared - {"datasource"}
    sources = {panel["datasource"]["uid"] for panel in PANELS} | {
        target["datasource"]["uid"] for p in PANELS for target in p["targets"]
    }
    assert sources == {"${datasource}"}


def test_the_panels_lie_side_by_side() -> None:
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    assert [
        pair
        for pair in combinations(dashboard()["panels"], 2)
        if _overlap(pair[0]["gridPos"], pair[1]["gridPos"])
    ] == []
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)
    assert all(panel["title"] and panel["description"] for panel in PANELS)


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    page, anchor = page_and_anchor(rule["annotations"]["runbook"])
    assert anchor in anchors(page)


def test_every_alert_fires_in_a_case() -> None:
    cases = (PROMETHEUS / "alerts_test.yaml").read_text()
    assert [
        rule["alert"]
        for rule in alerts()
        if f'ALERTS{{alertname="{rule["alert"]}", alertstate="firing"' not in cases
    ] == []


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    ["check config prometheus.yaml", "check rules alerts.yaml", "test rules alerts_test.yaml"],
)
def test_promtool_finds_nothing_wrong(arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
