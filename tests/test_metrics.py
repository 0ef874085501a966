"""What is only noted for every token and step comes out as the library itself would have counted it."""

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import _LATENCY, Histogram, Metrics
from server.protocol import Gauges
from tests.fake_engine import READY


def samples(text: str) -> dict[str, float]:
    """When a series was created is only told to be there."""
    return {
        sample.name + str(sample.labels.get("le", "")): 0.0 if sample.name.endswith("_created") else sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_histogram_counts_as_the_librarys(seed: int) -> None:
    rng, ours, theirs = random.Random(seed), CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("seconds", "Text.", ours)
    reference = prometheus_client.Histogram("seconds", "Text.", buckets=_LATENCY, registry=theirs)
    for _ in range(rng.randrange(200)):
        value = rng.choice((*_LATENCY, 0.0, 1e-9, 1e9, rng.expovariate(1.0)))
        histogram.observe(value)
        reference.observe(value)
    found, expected = (samples(prometheus_client.generate_latest(registry).decode()) for registry in (ours, theirs))
    assert found == expected


def test_what_engines_count_goes_on_growing_when_one_is_replaced() -> None:
    metrics = Metrics()
    metrics.loaded(READY)
    for total in (1, 5):
        metrics.step(Gauges(2, 1, 3, total, 0.5, 0, 10 * total, total), 7)
    metrics.loaded(READY)
    assert samples(metrics.exposition().decode())["onehead_requests_running"] == 0
    metrics.step(Gauges(1, 0, 2, 2, 0.5, 1, 20, 2), 3)
    found = samples(metrics.exposition().decode())
    assert found["onehead_generation_tokens_total"] == 17 and found["onehead_step_time_seconds_count"] == 3
    assert (found["onehead_preemptions_total"], found["onehead_prefix_cache_queries_total"]) == (7, 70)
    assert (found["onehead_requests_running"], found["onehead_kv_pages_used"], found["onehead_kv_pages_cached"]) == (1, 2, 1)
    assert samples(metrics.exposition().decode()) == found
