"""What is only noted for every token and step comes out as the library itself would have counted
it.
"""

import logging
import random
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from server.config import ServerSection
from server.generation.engine_client import EngineClient
from server.metrics import LATENCY_BOUNDS, LOAD_SECONDS, Histogram, LoadLog, Metrics
from server.metrics_aliases import ALIASES
from server.protocol import Gauges, Heartbeat
from tests.support.fake_engine import READY


def samples(text: str) -> dict[str, float]:
    """When a series was created is only told to be there."""
    return {
        sample.name + str(sample.labels.get("le", "")): 0.0
        if sample.name.endswith("_created")
        else sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_histogram_counts_as_the_librarys(seed: int) -> None:
    rng, theirs = random.Random(seed), CollectorRegistry()
    histogram = Histogram("seconds", "Text.")
    reference = prometheus_client.Histogram(
        "seconds", "Text.", buckets=LATENCY_BOUNDS, registry=theirs
    )
    for _ in range(rng.randrange(200)):
        value = rng.choice((*LATENCY_BOUNDS, 0.0, 1e-9, 1e9, rng.expovariate(1.0)))
        histogram.observe(value)
        reference.observe(value)
    found, expected = histogram.exposition(), prometheus_client.generate_latest(theirs).decode()
    assert samples(found) == samples(expected)
    assert [line for line in found.splitlines() if line[0] == "#"] == [
        line for line in expected.splitlines() if line[0] == "#"
    ]


def test_each_help_line_can_be_read_alone() -> None:
    lines = [
        line.split(" ", 3)[2:]
        for line in Metrics("tiny").exposition().decode().splitlines()
        if line.startswith("# HELP onehead_")
    ]
    assert len(lines) > 25
    for name, text in lines:
        assert len(text.split()) > 1 and text.endswith("."), (name, text)
        assert not {"them", "those", "nobody", "somebody", "whoever"} & set(
            text.lower().rstrip(".").split()
        ), (name, text)


def test_the_model_and_the_version_are_labels_of_info_metrics() -> None:
    metrics = Metrics("org/tiny")

    def labels(name: str) -> dict[str, str]:
        families = text_string_to_metric_families(metrics.exposition().decode())
        (sample,) = (
            sample for family in families for sample in family.samples if sample.name == name
        )
        assert sample.value == 1
        return dict(sample.labels)

    assert labels("onehead_build_info") == {"version": version("onehead")}
    assert labels("onehead_model_info") == {"model_name": "org/tiny"}
    metrics.loaded(READY)
    found = labels("onehead_model_info")
    assert found["model_name"] == "org/tiny" and (
        found["model_type"],
        found["dtype"],
        found["deterministic"],
    ) == (
        "hash",
        "float32",
        "false",
    )


def test_the_memory_of_a_gpu_is_that_of_the_last_heartbeat() -> None:
    supervisor, metrics = SimpleNamespace(), Metrics()
    client = EngineClient(cast(Any, supervisor), metrics, ServerSection(), 1)

    def memory() -> list[float]:
        found = samples(metrics.exposition().decode())
        return [found[f"onehead_device_memory_{kind}_bytes"] for kind in ("used", "total")]

    metrics.loaded(READY)
    client.on_engine_event(Heartbeat(3))
    assert memory() == [0, 0]
    metrics.loaded(replace(READY, hardware="NVIDIA H100", device_memory=(60, 80)))
    assert memory() == [20, 80]
    client.on_engine_event(Heartbeat(4, 25))
    assert memory() == [25, 80] and 'hardware="NVIDIA H100"' in metrics.exposition().decode()


def test_the_process_itself_is_measured() -> None:
    found = samples(Metrics().exposition().decode())
    assert (
        found["process_resident_memory_bytes"] > 2**20
        and found["process_open_fds"] > 2
        and found["process_start_time_seconds"] > 0
    )


def test_what_engines_count_goes_on_growing_when_one_is_replaced() -> None:
    metrics = Metrics()
    metrics.loaded(READY)
    for total in (1, 5):
        metrics.step(Gauges(2, 1, 3, total, 0.5, 0, 10 * total, total), 7)
    metrics.loaded(READY)
    assert samples(metrics.exposition().decode())["onehead_requests_running"] == 0
    metrics.step(Gauges(1, 0, 2, 2, 0.5, 1, 20, 2), 3)
    found = samples(metrics.exposition().decode())
    assert (
        found["onehead_generation_tokens_total"] == 17
        and found["onehead_step_time_seconds_count"] == 3
    )
    assert (found["onehead_preemptions_total"], found["onehead_prefix_cache_queries_total"]) == (
        7,
        70,
    )
    assert (
        found["onehead_requests_running"],
        found["onehead_kv_pages_used"],
        found["onehead_kv_pages_cached"],
    ) == (1, 2, 1)
    again = samples(metrics.exposition().decode())
    assert {
        name: value
        for name, value in again.items()
        if found[name] != value and not name.startswith("process_")
    } == {}


def test_the_aliases_repeat_the_values_under_vllms_names() -> None:
    metrics = Metrics('a "b"\\c', with_aliases=True)
    metrics.loaded(READY)
    metrics.step(Gauges(2, 1, 3, 4, 0.5, 5, 6, 7), 8)
    for histogram in (
        metrics.time_to_first_token,
        metrics.inter_token_latency,
        metrics.e2e_latency,
        metrics.queue_time,
    ):
        histogram.observe(0.3)
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics.exposition().decode())
    }
    for alias, name in ALIASES.items():
        theirs, ours = families[f"vllm:{alias}"], families[f"onehead_{name}"]
        assert (theirs.type, theirs.documentation) == (ours.type, ours.documentation)
        assert len(theirs.samples) == len(ours.samples) > 0
        for sample, own in zip(theirs.samples, ours.samples, strict=True):
            assert sample.name.removeprefix(f"vllm:{alias}") == own.name.removeprefix(
                f"onehead_{name}"
            )
            assert sample.value == own.value and sample.labels == own.labels | {
                "model_name": 'a "b"\\c'
            }
    assert not [
        name
        for name in families
        if name.startswith("vllm:") and name[5:].removesuffix("_created") not in ALIASES
    ]
    (info,) = families["vllm:cache_config_info"].samples
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == (
        str(READY.page_size),
        str(READY.num_pages),
    )


def test_there_are_no_aliases_unless_they_are_asked_for() -> None:
    assert "vllm:" not in Metrics("tiny").exposition().decode()


def test_a_line_for_each_period_with_load(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    metrics.loaded(READY)
    load = LoadLog(metrics, 100.0)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "onehead"]

    load.tick(100.0 + LOAD_SECONDS)
    assert lines() == []  # Idle.
    metrics.step(Gauges(3, 2, 8, 0, 0.1, 0, 400, 100), 50)
    load.tick(101.0 + LOAD_SECONDS)
    assert lines() == []  # Not yet time.
    load.tick(100.0 + 2 * LOAD_SECONDS)
    rates = "prompt 30.0 tokens/s, generation 5.0 tokens/s"
    cache = "KV cache usage 25.0 %, prefix cache hit rate 25.0 %"
    assert lines() == [f"load: 3 running, 2 waiting, {rates}, {cache}"]
    metrics.loaded(READY)  # An engine that replaces another counts from 0 again.
    metrics.step(Gauges(1, 0, 1, 0, 0.1, 0, 10, 0), 20)
    load.tick(100.0 + 3 * LOAD_SECONDS)
    assert "prompt 0.0 tokens/s, generation 2.0 tokens/s" in lines()[1]
    metrics.step(Gauges(0, 0, 0, 0, 0.1, 0, 10, 0), 0)
    load.tick(100.0 + 4 * LOAD_SECONDS)
    assert len(lines()) == 2  # Idle again.
