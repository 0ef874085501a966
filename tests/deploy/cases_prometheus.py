"""Every expression of deploy/observability, evaluated by a real Prometheus over what it has scraped
from a server under load.

The load has what the panels show: a queue, a cache that is too small, refused and cancelled
requests, a key with a name, draft tokens, and an engine that is killed.
"""

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from commands.bench.bench import prompt_text
from tests.support.observability import PROMETHEUS, alerts, dashboard, dashboard_expressions
from tests.support.processes import DEADLINE, ServerProcess, Stream, wait_until
from tests.support.wire import exchange, http_request

EXPRESSIONS = dashboard_expressions()
KEY = {"authorization": "Bearer a key"}
SMALL_CACHE = ("--cache.page_size", "16", "--cache.pages", "48")
SHORT_QUEUE = ("--engine.max_running", "8", "--server.max_waiting", "8")
PREFIX = "def area(width: int, height: int) -> int:\n    return width * height\n\n\n" * 2
"""What all prompts begin with."""
NUM_CLIENTS = 24
LOAD_SECONDS = 25.0
VALUES = {"$__rate_interval": "10s", "$__range": "120s", "$job": ".*", "$instance": ".*"}
"""What stands for the variables of the dashboard: a server is scraped every second here."""


class Prometheus:
    """A Prometheus that scrapes one server every second, by the example's configuration."""

    def __init__(self, folder: Path, target: int) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{target}"]}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        where = (
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={self.address}",
        )
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(["prometheus", *where], stderr=log)
        self.start = time.time()
        wait_until(self._is_scraping, f"Prometheus scrapes the server; its log is {folder}/log")

    def _is_scraping(self) -> bool:
        try:
            return bool(self.ask("query", query="up == 1")["result"])
        except OSError:
            return False

    def ask(self, what: str, **arguments: Any) -> Any:
        """The data of an answer of the API."""
        with urlopen(
            f"http://{self.address}/api/v1/{what}?{urlencode(arguments)}", timeout=DEADLINE
        ) as reply:
            return json.load(reply)["data"]

    def values(self, expression: str) -> list[float]:
        """Every value that an expression has had since the start, those that are no number left
        out.
        """
        for name, value in VALUES.items():
            expression = expression.replace(name, value)
        series = self.ask(
            "query_range", query=expression, start=self.start, end=time.time(), step=1
        )["result"]
        return [float(value) for each in series for _, value in each["values"] if value != "NaN"]


def client(port: int, number: int, end: float) -> None:
    """Sends requests until `end`, and closes the connection of each eighth before its answer has
    come.
    """
    rng = random.Random(number)
    while time.monotonic() < end:
        prompt = PREFIX + prompt_text(rng, rng.randint(8, 96))
        parameters = {"max_new_tokens": rng.randint(16, 96), "ignore_eos": rng.random() < 0.8}
        if rng.random() < 0.125:
            stream = Stream(
                port, "/generate", {"inputs": prompt, "parameters": parameters, "stream": True}, KEY
            )
            time.sleep(0.2)
            stream.close()
            continue
        response, _ = exchange(
            port,
            http_request("POST", "/generate", {"inputs": prompt, "parameters": parameters}, KEY),
            DEADLINE,
        )
        if response.status == 429:
            time.sleep(0.5)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus after it has scraped a server under load, whose engine was killed half way."""
    folder = tmp_path_factory.mktemp("prometheus")
    keys = folder / "keys.toml"
    keys.write_text(
        f'[[key]]\nname = "editor"\nsha256 = "{hashlib.sha256(b"a key").hexdigest()}"\n'
    )
    with (folder / "server.log").open("w") as log:
        options = (
            *SMALL_CACHE,
            *SHORT_QUEUE,
            "--engine.speculation",
            "ngram",
            "--server.api_keys_file",
            str(keys),
        )
        server = ServerProcess(None, *options, stderr=log)
    prometheus = Prometheus(folder, server.port)
    try:
        end = time.monotonic() + LOAD_SECONDS
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            running = [
                clients.submit(client, server.port, number, end) for number in range(NUM_CLIENTS)
            ]
            time.sleep(LOAD_SECONDS / 2)
            os.kill(server.engine_pid, signal.SIGKILL)
            for each in running:
                each.result()
        time.sleep(2)  # The last scrapes.
        yield prometheus
    finally:
        server.stop()
        prometheus.process.terminate()
        prometheus.process.wait(DEADLINE)


@pytest.mark.parametrize("place", EXPRESSIONS)
def test_every_expression_of_the_dashboard_has_values(place: str, recorded: Prometheus) -> None:
    values = recorded.values(EXPRESSIONS[place])
    assert values, EXPRESSIONS[place]
    assert min(values) >= 0


@pytest.mark.parametrize(
    "variable", dashboard()["templating"]["list"][1:], ids=lambda variable: variable["name"]
)
def test_the_variables_of_the_dashboard_have_values(
    variable: dict[str, Any], recorded: Prometheus
) -> None:
    series, label = (
        variable["definition"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
    )
    assert (
        len(recorded.ask(f"label/{label}/values", **{"match[]": series.replace("$job", ".*")})) == 1
    )


@pytest.mark.parametrize(
    "place",
    [
        "Preemptions A",
        "Prefix cache hit rate A",
        "Failed and refused B",
        "Engine recovery A",
        "Tokens of named keys A",
    ],
)
def test_the_load_has_what_the_panels_show(place: str, recorded: Prometheus) -> None:
    assert max(recorded.values(EXPRESSIONS[place])) > 0


def test_the_rules_are_evaluated_and_the_killed_engine_fires_its_alert(
    recorded: Prometheus,
) -> None:
    rules = [rule for group in recorded.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in alerts()}
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == [
        "OneheadEngineRestarted"
    ]
