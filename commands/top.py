"""`onehead top`: a table of a running server's requests, tokens, KV cache pages and latencies.

It is drawn from the server's GET /metrics until Ctrl-C, or printed once for scripts.
"""

import sys
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from prometheus_client.parser import text_string_to_metric_families
from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from commands.bench.client import reachable
from server.config import PREFIX
from server.errors import one_line

TIMEOUT = 10.0
WINDOW = 10
"""Intervals that rates and latencies are taken over."""
FAILURES = OSError, HTTPException, ValueError
GAUGES = {
    "requests running": "requests_running",
    "requests waiting": "requests_waiting",
    "KV cache pages": "kv_pages_total",
    "pages of open requests": "kv_pages_used",
    "pages kept as prefixes": "kv_pages_cached",
    "engine restarts": "engine_restarts_total",
}
RATES = {
    "requests ended": "requests_total",
    "tokens generated": "generation_tokens_total",
    "prompt tokens": "prompt_tokens_total",
    "of them in the prefix cache": "prefix_cache_hits_total",
    "preemptions": "preemptions_total",
}
LATENCIES = {
    "time to first token": "time_to_first_token_seconds",
    "inter-token latency": "inter_token_latency_seconds",
    "end-to-end latency": "e2e_latency_seconds",
    "queue time": "queue_time_seconds",
    "engine step": "step_time_seconds",
}


class TopSettings(BaseSettings):
    """onehead top: a running server's requests, tokens, KV cache pages and latencies, live."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        cli_implicit_flags=True,
    )
    by_position: ClassVar[str] = "url"

    url: Annotated[str, AfterValidator(reachable)] = Field(
        "http://127.0.0.1:8000",
        description="address of the server",
    )
    key: Annotated[str, Field(min_length=1, pattern="^[ -~]+$")] | None = Field(
        None,
        description="key of /metrics, if one is needed; also in the environment: ONEHEAD_KEY",
    )
    interval: float = Field(
        1.0,
        ge=0.1,
        le=3600,
        description="seconds between two looks at the server",
    )
    once: bool = Field(False, description="print one table after one interval and end, for scripts")
    config: Path | None = Field(None, description="TOML file of these options")


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics at one moment, by name and bound of a bucket; other labels are summed."""

    at: float
    values: dict[tuple[str, str], float]

    def value(self, name: str) -> float:
        """A gauge or counter."""
        return self.values.get((f"onehead_{name}", ""), 0.0)


def parse(text: str, at: float) -> Scrape:
    """Raises ValueError for what is no exposition of a onehead server."""
    values = defaultdict[tuple[str, str], float](float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name, sample.labels.get("le", "")] += sample.value
    if ("onehead_requests_running", "") not in values:
        raise ValueError("its /metrics are not those of onehead")
    return Scrape(at, values)


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect, which would send the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = build_opener(ProxyHandler({}), _NoRedirects)


def scrape(settings: TopSettings) -> Scrape:
    """The metrics now. Raises one of FAILURES."""
    headers = {"authorization": f"Bearer {settings.key}"} if settings.key else {}
    request = Request(f"{settings.url.rstrip('/')}/metrics", headers=headers)
    with _OPENER.open(request, timeout=TIMEOUT) as reply:
        return parse(reply.read().decode(), time.monotonic())


def quantile(name: str, share: float, old: Scrape, new: Scrape) -> float | None:
    """Of what a histogram counted between two scrapes, with a straight line in each bucket, and the
    largest bound for what is above it; None where it counted nothing.
    """
    bounds = sorted((bound for metric, bound in new.values if metric == name and bound), key=float)
    counts = [new.values[name, bound] - old.values.get((name, bound), 0.0) for bound in bounds]
    if not counts or counts[-1] <= 0:
        return None
    wanted, low, below = share * counts[-1], 0.0, 0.0
    for bound, count in zip(bounds[:-1], counts, strict=False):
        if count >= wanted:
            return low + (float(bound) - low) * (wanted - below) / (count - below)
        low, below = float(bound), count
    return low


def table(url: str, old: Scrape, new: Scrape, notice: str = "") -> Table:
    """What changed between two scrapes, and the gauges of the newer one."""
    now, seconds = new.value, max(new.at - old.at, 1e-9)
    texts = Text(f"onehead top {url}"), Text(notice)
    shown = Table("", "", title=texts[0], caption=texts[1], box=box.SIMPLE, show_header=False)
    for words, name in GAUGES.items():
        shown.add_row(words, f"{now(name):,.0f}")
    for words, name in RATES.items():
        shown.add_row(words, f"{max(0.0, now(name) - old.value(name)) / seconds:,.1f} a second")
    for words, name in LATENCIES.items():
        found = [quantile(f"onehead_{name}_bucket", share, old, new) for share in (0.5, 0.95)]
        ms = ("-" if each is None else f"{each * 1e3:,.1f}" for each in found)
        shown.add_row(words, f"{' / '.join(ms)} ms (p50 / p95)")
    return shown


def top(settings: TopSettings) -> int:
    """Runs the command; its exit status, 1 where the server cannot be used."""
    scrapes = deque[Scrape](maxlen=WINDOW + 1)
    try:
        scrapes.append(scrape(settings))
        if settings.once:
            time.sleep(settings.interval)
            Console().print(table(settings.url, scrapes[0], scrape(settings)))
            return 0
        with Live(table(settings.url, scrapes[0], scrapes[0]), auto_refresh=False) as live:
            while True:
                time.sleep(settings.interval)
                live.update(_next(settings, scrapes), refresh=True)
    except FAILURES as error:
        problem = f"the server at {settings.url} cannot be used: {_words(error)}"
        print(f"onehead top: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _next(settings: TopSettings, scrapes: deque[Scrape]) -> Table:
    """The table after one more look; after one that failed the last one, with the reason below."""
    notice = ""
    try:
        scrapes.append(scrape(settings))
    except FAILURES as error:
        notice = f"trying again: {_words(error)}"
    return table(settings.url, scrapes[0], scrapes[-1], notice)


def _words(error: Exception) -> str:
    return one_line(error) or type(error).__name__
