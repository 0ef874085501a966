"""LoadLog: a log line on the load every 10 s while requests are open. It reads no clock."""

import logging

from server.generation.engine_client import EngineClient

log = logging.getLogger("onehead")

PERIOD_SECONDS = 10.0


class LoadLog:
    """Logs running and waiting sequences, KV cache usage, and the token rates and prefix cache hit rate of the period."""

    def __init__(self, client: EngineClient, now: float) -> None:
        self._client = client
        self._began = now
        self._counted = 0, 0, 0

    def tick(self, now: float) -> None:
        """Ends a period if it is due. An idle period gets no line."""
        seconds = now - self._began
        if seconds < PERIOD_SECONDS:
            return
        metrics = self._client.metrics
        gauges = metrics.gauges
        counted = metrics.num_generated, gauges.queried_tokens, gauges.hit_tokens
        # The counts of a restarted engine begin at 0.
        generated, queried, hit = (max(0, new - old) for new, old in zip(counted, self._counted, strict=True))
        self._began, self._counted = now, counted
        if self._client.admission.num_open or generated:
            log.info(
                "load: %d running, %d waiting, prompt %.1f tokens/s, generation %.1f tokens/s, KV cache usage %.1f %%, "
                "prefix cache hit rate %.1f %%",
                gauges.running,
                gauges.waiting,
                (queried - hit) / seconds,
                generated / seconds,
                100 * gauges.pages_used / max(1, metrics.num_pages),
                100 * hit / max(1, queried),
            )
