"""Every metric, declared once. Names and meanings are a contract (vLLM's meanings under our prefix).

What every token and every step say is only noted, and becomes a metric when somebody looks.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from server.protocol import Gauges, Ready

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram(Collector):
    """Seconds by the bound that they do not exceed. The library's own costs ten times as much for each."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(_LATENCY) + 1)
        self.sum, self._created = 0.0, time.time()
        registry.register(self)

    def observe(self, seconds: float) -> None:
        """One more."""
        self._counts[bisect_left(_LATENCY, seconds)] += 1
        self.sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """As the registry wants it."""
        bounds = [*map(str, _LATENCY), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, list(zip(bounds, accumulate(self._counts), strict=True)), self.sum)
        family.add_sample(f"{self._name}_created", {}, self._created)
        yield family


class Metrics:
    """One registry and its series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests_running = self._gauge("requests_running", "Sequences in the running set of the engine.")
        self.requests_waiting = self._gauge("requests_waiting", "Sequences waiting for pages or a place in the running set.")
        self.kv_pages_used = self._gauge("kv_pages_used", "Cache pages owned by open requests.")
        self.kv_pages_cached = self._gauge("kv_pages_cached", "Cache pages owned by nobody, kept as prefixes until the room is needed.")
        self.kv_pages_total = self._gauge("kv_pages_total", "Cache pages there are.")
        self.kv_cache_usage_ratio = self._gauge("kv_cache_usage_ratio", "Used pages over all pages.")
        self.preemptions = self._counter("preemptions", "Sequences put back into the queue for want of pages.")
        self.prefix_cache_queries = self._counter("prefix_cache_queries", "Tokens of sequences that were let into the running set.")
        self.prefix_cache_hits = self._counter("prefix_cache_hits", "Those among them that were found in the cache.")
        self.drafted_tokens = self._counter("spec_decode_num_draft_tokens", "Tokens guessed by speculation.")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Those among them that came true.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.engine_restarts = self._counter("engine_restarts", "Engines started in place of a dead one.")
        self.requests = Counter(
            "onehead_requests", "Requests by how they ended.", ["outcome"], registry=self.registry
        )  # outcome: a finish reason, cancelled, failed or refused
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.")
        self.e2e_latency = self._histogram("e2e_latency_seconds", "From arrival to the last token.")
        self.queue_time = self._histogram("queue_time_seconds", "From arrival to the first step that computed some of the prompt.")
        self.step_time = self._histogram("step_time_seconds", "Duration of one engine step.")
        self.engine_recovery = self._histogram("engine_recovery_seconds", "From an engine's end until its successor is ready.")
        self.requests_quarantined = self._counter("requests_quarantined", "Requests given up because engines died of them.")
        self.log_lines_dropped = self._counter("log_lines_dropped", "Log lines that could not be written.")
        self.streams_detached = self._gauge("streams_detached", "Resumable streams that go on without a reader.")
        self.resume_bytes = self._gauge("resume_bytes", "Bytes kept for readers of resumable streams.")
        self._reached: dict[Counter, int] = {}
        self._engine_totals = {
            self.preemptions: "preemptions",
            self.prefix_cache_queries: "queried_tokens",
            self.prefix_cache_hits: "hit_tokens",
            self.drafted_tokens: "drafted_tokens",
            self.accepted_tokens: "accepted_tokens",
        }
        """What an engine counts from its start -> the field of Gauges that says it."""
        self._gauges: Gauges | None = None
        self._num_new_tokens = 0
        """Generated since they were last added up."""
        self._num_pages = 0

    def loaded(self, ready: Ready) -> None:
        """A new engine is ready; its own counts begin at 0 again."""
        self.idle()
        self._num_pages = ready.num_pages
        self.kv_pages_total.set(ready.num_pages)
        for counter in self._engine_totals:
            self._reached.pop(counter, None)

    def idle(self) -> None:
        """There is no engine, or a new one that has nothing to do yet."""
        self._settle()
        self._gauges = None
        for gauge in (self.requests_running, self.requests_waiting, self.kv_pages_used, self.kv_pages_cached, self.kv_cache_usage_ratio):
            gauge.set(0)

    def step(self, gauges: Gauges, num_tokens: int) -> None:
        """What the engine said after a step."""
        self._gauges = gauges
        self._num_new_tokens += num_tokens
        if gauges.step_seconds:
            self.step_time.observe(gauges.step_seconds)

    def _settle(self) -> None:
        """Makes metrics of what the engine said last."""
        gauges = self._gauges
        if gauges is None:
            return
        self.requests_running.set(gauges.running)
        self.requests_waiting.set(gauges.waiting)
        self.kv_pages_used.set(gauges.pages_used)
        self.kv_cache_usage_ratio.set(gauges.pages_used / self._num_pages)
        self.kv_pages_cached.set(gauges.pages_cached)
        for counter, field in self._engine_totals.items():
            self.reach(counter, getattr(gauges, field))
        self.generation_tokens.inc(self._num_new_tokens)
        self._num_new_tokens = 0

    def reach(self, counter: Counter, total: int) -> None:
        """Brings a counter to what somebody else has counted."""
        counter.inc(total - self._reached.get(counter, 0))
        self._reached[counter] = total

    def exposition(self) -> bytes:
        """The text that a scraper reads."""
        self._settle()
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"onehead_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"onehead_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"onehead_{name}", text, self.registry)
