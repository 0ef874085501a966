"""The files of deploy/observability as tests read them: the expressions of the dashboard and of the
alert rules, and what they ask for.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.paths import ROOT

OBSERVABILITY = ROOT / "deploy" / "observability"
DASHBOARD = OBSERVABILITY / "grafana" / "onehead.json"
PROMETHEUS = OBSERVABILITY / "prometheus"
OF_THE_SCRAPE = {"job", "instance"}
"""Labels that Prometheus adds."""
_SELECTOR = re.compile(r"\b(up|(?:onehead|process)_\w+)\b\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard."""
    return dict(json.loads(DASHBOARD.read_text()))


def dashboard_expressions() -> dict[str, str]:
    """Every expression of the dashboard, by its place: the title of its panel, and its letter
    there.
    """
    board = dashboard()
    targets = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    return targets | {each["name"]: each["expr"] for each in board["annotations"]["list"]}


def alerts() -> list[dict[str, Any]]:
    """The alert rules."""
    groups = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exposed(exposition: str) -> dict[str, set[str]]:
    """The series of Prometheus' text format by name, each with its labels; also those that have no
    sample yet, without labels.
    """
    found: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(exposition):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(
            family.type, ("",)
        )
        for suffix in suffixes:
            found.setdefault(family.name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def problems(expression: str, series: dict[str, set[str]]) -> list[str]:
    """What an expression asks for that is not exposed, in words."""
    found = []
    for name, matchers in _SELECTOR.findall(_GROUPING.sub("", expression)):
        if name not in series:
            found.append(f"no metric {name}")
        elif series[name]:
            found += [
                f"{name} has no label {label}"
                for label in _MATCHER.findall(matchers)
                if label not in series[name] | OF_THE_SCRAPE
            ]
    labels = {
        label for group in _GROUPING.findall(expression) for label in re.findall(r"\w+", group)
    }
    # Of keys with a name, which a server may lack.
    known = OF_THE_SCRAPE.union(*series.values(), {"key"})
    return found + [f"no metric has the label {label}" for label in sorted(labels - known)]


def page_and_anchor(reference: str) -> tuple[Path, str]:
    """The page that a runbook names, and the heading in it."""
    page, _, anchor = reference.partition("#")
    return ROOT / page, anchor


def anchors(page: Path) -> set[str]:
    """The anchors that the site gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    }
