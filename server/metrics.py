"""Metrics: every metric is declared here once. Names and meanings are a contract: vLLM's where vLLM
has one, with the prefix onehead_.

Tokens and steps are only counted as they happen; the Prometheus metrics are updated from the counts
when they are scraped.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from msgspec.structs import asdict
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.metrics_aliases import aliases
from server.protocol import Gauges, Ready

LATENCY_BOUNDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
LOAD_SECONDS = 10.0
IDLE = Gauges(0, 0, 0, 0, 0.0)
"""The gauges of an idle engine."""
log = logging.getLogger("onehead")


class Histogram:
    """A histogram of seconds. It costs a tenth of what the one of prometheus_client costs, when it
    counts and when it is scraped.
    """

    def __init__(self, name: str, text: str) -> None:
        self._counts = [0] * (len(LATENCY_BOUNDS) + 1)
        self.sum, self._created = 0.0, time.time()
        buckets = "".join(
            f'{name}_bucket{{le="{bound}"}} %s.0\n' for bound in (*LATENCY_BOUNDS, "+Inf")
        )
        self._lines = (
            f"# HELP {name} {text}\n# TYPE {name} histogram\n{buckets}{name}_count "
            f"%s.0\n{name}_sum %s\n"
        )
        self._lines += (
            f"# HELP {name}_created {text}\n# TYPE {name}_created gauge\n{name}_created %s\n"
        )

    def observe(self, seconds: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self.sum += seconds

    def counts(self) -> dict[str, Any]:
        """The bounds, how many values were at most each of them and above the one before, or above
        all, and the sum.
        """
        return {"bounds": LATENCY_BOUNDS, "counts": self._counts, "sum": self.sum}

    def exposition(self) -> str:
        """The lines of a scrape."""
        counts = [*accumulate(self._counts)]
        return self._lines % (*counts, counts[-1], self.sum, self._created)


class ClientMetrics(Collector):
    """Usage of clients that have a name, from the counts that admission keeps of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.clients: Mapping[str, Any] = {}
        """By name: generation.clients.Usage."""
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The samples, for the registry."""
        tokens = CounterMetricFamily(
            "onehead_client_tokens",
            "Prompt and output tokens of a named key's sequences.",
            labels=["key"],
        )
        running = GaugeMetricFamily(
            "onehead_client_running",
            "Sequences of a named key that the engine has started.",
            labels=["key"],
        )
        waiting = GaugeMetricFamily(
            "onehead_client_waiting",
            "Sequences of a named key that the engine has not started.",
            labels=["key"],
        )
        for name, usage in self.clients.items():
            if usage.terms.name:
                tokens.add_metric([name], usage.num_tokens)
                running.add_metric([name], usage.num_submitted - usage.num_waiting)
                waiting.add_metric([name], usage.num_waiting)
        yield from (tokens, running, waiting)


class Metrics:
    """A registry and its metrics. The model name is a label of onehead_model_info only
    (docs/why.md#model-name-metric), and of vLLM's names of metrics, which are shown too
    `with_aliases`.
    """

    def __init__(self, model_name: str = "", with_aliases: bool = False) -> None:
        self._with_aliases = with_aliases
        self.registry = CollectorRegistry()
        self._histograms: list[Histogram] = []
        Info("onehead_build", "Version of the onehead server.", registry=self.registry).info(
            {"version": version("onehead")}
        )
        self._model = {"model_name": model_name}
        self._model_info = Info(
            "onehead_model",
            "The served model, its dtypes, device and kernels.",
            registry=self.registry,
        )
        self._model_info.info(self._model)
        self._engine_gauges = {
            self._gauge("requests_running", "Sequences that the engine is running."): "running",
            self._gauge(
                "requests_waiting",
                "Sequences waiting in the engine for KV cache pages or a place in the batch.",
            ): "waiting",
            self._gauge("kv_pages_used", "KV cache pages held by open requests."): "pages_used",
            self._gauge(
                "kv_pages_cached",
                "KV cache pages held by no open request but kept in the prefix cache.",
            ): "pages_cached",
        }
        """Gauges -> the field of Gauges."""
        self.kv_pages_total = self._gauge("kv_pages_total", "Total number of KV cache pages.")
        self.kv_cache_usage_ratio = self._gauge(
            "kv_cache_usage_ratio", "Fraction of KV cache pages held by open requests, from 0 to 1."
        )
        self._declare_counts_of_engines()
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.engine_restarts = self._counter(
            "engine_restarts", "Engine processes started to replace one that crashed or hung."
        )
        self.requests = Counter(
            "onehead_requests",
            "Sequences that ended, by outcome: a finish reason, cancelled, failed or refused.",
            ["outcome"],
            registry=self.registry,
        )
        self.by_client = ClientMetrics(self.registry)
        self._declare_latencies()
        self._declare_others()
        self._reached: dict[Counter, int] = {}
        self.gauges = IDLE
        """The latest report of the current engine."""
        self.num_generated = self.num_pages = 0

    def _declare_counts_of_engines(self) -> None:
        self.preemptions = self._counter(
            "preemptions",
            "Preemptions of running sequences, for lack of KV cache pages or for another client's "
            "share.",
        )
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens served from the prefix cache."
        )
        self._engine_totals = {
            self.preemptions: "preemptions",
            self.prefix_cache_queries: "queried_tokens",
            self.prefix_cache_hits: "hit_tokens",
            self._counter(
                "prefix_cache_loads", "Prompt tokens whose pages were read from cache.disk."
            ): "loaded_tokens",
            self._counter(
                "spec_decode_num_draft_tokens", "Draft tokens proposed by speculative decoding."
            ): "drafted_tokens",
            self._counter(
                "spec_decode_num_accepted_tokens", "Draft tokens accepted by speculative decoding."
            ): "accepted_tokens",
        }
        """Counters that each engine counts from its own start -> the field of Gauges."""

    def _declare_others(self) -> None:
        """Metrics that belong to no request."""
        self.ignored_fields = Counter(
            "onehead_ignored_fields",
            "Requests with an unknown field that was ignored, by its name; `other` above 64 names.",
            ["field"],
            registry=self.registry,
        )
        self.process_registry = CollectorRegistry()
        """Metrics that are read from /proc, which takes as long as all the others: shown as they
        were up to a second ago."""
        self._processes, self._processes_until = "", 0.0
        ProcessCollector(registry=self.process_registry)
        self._cache_config = Info(
            "onehead_cache_config",
            "Tokens of a KV cache page, and number of pages, under vLLM's names.",
            registry=self.registry,
        )
        self.requests_quarantined = self._counter(
            "requests_quarantined",
            "Sequences that were quarantined because they crashed the engine repeatedly.",
        )
        self.device_memory_used = self._gauge(
            "device_memory_used_bytes",
            "GPU memory that is taken, by all processes together; 0 where the engine is on a CPU.",
        )
        self.device_memory_total = self._gauge(
            "device_memory_total_bytes", "GPU memory in all; 0 where the engine is on a CPU."
        )
        self.log_lines_dropped = self._counter(
            "log_lines_dropped", "Log lines that could not be written."
        )
        self.streams_detached = self._gauge(
            "streams_detached", "Resumable streams that are generating without a connected client."
        )
        self.resume_bytes = self._gauge(
            "resume_bytes", "Bytes of events kept for resumable streams."
        )

    def _declare_latencies(self) -> None:
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time from a sequence's arrival to its first token (TTFT).",
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two consecutive tokens of a sequence."
        )
        self.e2e_latency = self._histogram(
            "e2e_latency_seconds",
            "Time from a sequence's arrival to its last token (end-to-end latency).",
        )
        self.queue_time = self._histogram(
            "queue_time_seconds",
            "Time from a sequence's arrival to the first step that computes its prompt.",
        )
        self.step_time = self._histogram("step_time_seconds", "Duration of an engine step.")
        self.engine_recovery = self._histogram(
            "engine_recovery_seconds", "Time from an engine crash until the next engine is ready."
        )

    def loaded(self, ready: Ready) -> None:
        """Called when an engine is ready; its counts begin at 0."""
        self.idle()
        self.num_pages = ready.num_pages
        self.kv_pages_total.set(ready.num_pages)
        self._cache_config.info(
            {"block_size": str(ready.page_size), "num_gpu_blocks": str(ready.num_pages)}
        )
        free, total = ready.device_memory
        self.device_memory_used.set(total - free)
        self.device_memory_total.set(total)
        words = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in asdict(ready).items()
            if isinstance(value, str | bool)
        }
        self._model_info.info(self._model | words)

    def idle(self) -> None:
        """Called when there is no engine, or a new one that is idle."""
        self._settle()
        self.gauges = IDLE
        for counter in self._engine_totals:
            self._reached.pop(counter, None)

    def step(self, gauges: Gauges, num_tokens: int) -> None:
        """Notes the engine's report after a step."""
        self.gauges = gauges
        self.num_generated += num_tokens
        if gauges.step_seconds:
            self.step_time.observe(gauges.step_seconds)

    def _settle(self) -> None:
        """Updates the metrics from the latest report."""
        gauges = self.gauges
        for gauge, field in self._engine_gauges.items():
            gauge.set(getattr(gauges, field))
        self.kv_cache_usage_ratio.set(gauges.pages_used / max(1, self.num_pages))
        for counter, field in self._engine_totals.items():
            self.reach(counter, getattr(gauges, field))
        self.reach(self.generation_tokens, self.num_generated)

    def reach(self, counter: Counter, total: int) -> None:
        """Raises a counter by the growth of `total`, which is counted elsewhere."""
        counter.inc(total - self._reached.get(counter, 0))
        self._reached[counter] = total

    @property
    def num_restarts(self) -> int:
        """Engines that were started to replace others."""
        return _totals(self.engine_restarts)[""]

    def stats(self) -> dict[str, Any]:
        """Gauges, totals and histograms that viewers are shown."""
        self._settle()
        counters = {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "preemptions": self.preemptions,
            "prefix_queries": self.prefix_cache_queries,
            "prefix_hits": self.prefix_cache_hits,
        }
        return {
            "restarts": self.num_restarts,
            "model": self._model["model_name"],
            **{
                name: getattr(self.gauges, name)
                for name in ("running", "waiting", "pages_used", "pages_cached")
            },
            "totals": {name: _totals(counter)[""] for name, counter in counters.items()}
            | {"requests": _totals(self.requests)},
            **{
                name: getattr(self, name).counts()
                for name in ("time_to_first_token", "inter_token_latency", "step_time")
            },
        }

    def exposition(self) -> bytes:
        """All metrics in the Prometheus text format."""
        self._settle()
        if (now := time.monotonic()) >= self._processes_until:
            self._processes = generate_latest(self.process_registry).decode()
            self._processes_until = now + 1
        text = "".join(
            (
                self._processes,
                generate_latest(self.registry).decode(),
                *(histogram.exposition() for histogram in self._histograms),
            )
        )
        return (text + aliases(text) if self._with_aliases else text).encode()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"onehead_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"onehead_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        self._histograms.append(Histogram(f"onehead_{name}", text))
        return self._histograms[-1]


class LoadLog:
    """A log line on the load every LOAD_SECONDS while there is any. It reads no clock."""

    def __init__(self, metrics: Metrics, now: float) -> None:
        self._metrics = metrics
        self._began = now
        self._counted = 0, 0, 0

    def tick(self, now: float) -> None:
        """Ends a period if it is due. An idle period gets no line."""
        seconds, metrics, gauges = now - self._began, self._metrics, self._metrics.gauges
        if seconds < LOAD_SECONDS:
            return
        counted = metrics.num_generated, gauges.queried_tokens, gauges.hit_tokens
        # The counts of a restarted engine begin at 0.
        pairs = zip(counted, self._counted, strict=True)
        generated, queried, hit = (max(0, new - old) for new, old in pairs)
        self._began, self._counted = now, counted
        if gauges.running or gauges.waiting or generated:
            log.info(
                "load: %d running, %d waiting, prompt %.1f tokens/s, generation %.1f tokens/s, "
                "KV cache usage %.1f %%, prefix cache hit rate %.1f %%",
                gauges.running,
                gauges.waiting,
                (queried - hit) / seconds,
                generated / seconds,
                100 * gauges.pages_used / max(1, metrics.num_pages),
                100 * hit / max(1, queried),
            )


def _totals(counter: Counter) -> dict[str, int]:
    """The values of a counter by its label, which is empty where it has none."""
    samples = (
        sample
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    )
    return {next(iter(sample.labels.values()), ""): int(sample.value) for sample in samples}
