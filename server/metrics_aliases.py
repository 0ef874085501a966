"""Metrics under vLLM's names, for dashboards and autoscalers that were made for vLLM
(docs/why.md#health-and-metric-names).

Invariant: an alias has the values of the metric that it repeats, and the label `model_name` besides
the metric's own. It knows no registry.
"""

import re

ALIASES = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "kv_cache_usage_perc": "kv_cache_usage_ratio",
    "gpu_cache_usage_perc": "kv_cache_usage_ratio",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "num_preemptions": "preemptions",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_latency_seconds",
    "request_queue_time_seconds": "queue_time_seconds",
    "cache_config_info": "cache_config_info",
}
"""Name at vLLM without its prefix `vllm:` -> name here without `onehead_`. The names with `gpu_`
are those of older versions, which the router of vLLM's production-stack reads."""
_LINE = re.compile(
    rf"^(# \w+ )?onehead_({'|'.join({*ALIASES.values()})})"
    r"(_total|_bucket|_sum|_count|_created|)(?:\{(.*)\})?( .*\n)",
    re.MULTILINE,
)
"""A line of those metrics: its comment's kind, and the metric's name, suffix, labels and value."""
_MODEL_NAME = re.compile(r'model_name="(?:[^"\\]|\\.)*"')


def aliases(exposition: str) -> str:
    """The lines to add to an exposition, which has the label `model_name` somewhere."""
    lines = [match.groups("") for match in _LINE.finditer(exposition)]
    model_names = _MODEL_NAME.findall(exposition)[:1]

    def labelled(labels: str) -> str:
        return "{" + ",".join(filter(None, (*model_names, labels))) + "}"

    return "".join(
        f"{kind}vllm:{alias}{suffix}{'' if kind else labelled(labels)}{rest}"
        for alias, name in ALIASES.items()
        for kind, found, suffix, labels, rest in lines
        if found == name
    )
