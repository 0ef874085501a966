"""Tracing: an OpenTelemetry span for each request that generates, and below it one each for its
queue, prefill and decode.

Spans are made when a request has ended, of times that are noted anyway, and a thread of the library
sends them to a collector. Invariant: no request waits for the collector; what the library's bounded
queue does not hold is dropped. It knows no dialect's fields.
"""

import time
from functools import partial
from itertools import pairwise
from typing import Any

from starlette.datastructures import Headers

from server.errors import ConfigurationError
from server.generation.request import speeds
from server.http.exchange import Exchange, Trace

SECONDS = 3.0
"""What the collector may take for a batch; at shutdown one or two may still be sent."""


class Tracing:
    """Sends spans to the collector at a base URL. Raises ConfigurationError where the library, an
    optional dependency, is missing.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider, export
        except ImportError as error:
            text = (
                "server.tracing_endpoint needs OpenTelemetry: install onehead[tracing] "
                f"({error.name} is missing)"
            )
            raise ConfigurationError(text) from None
        # Names in the library's own variables, such as OTEL_SERVICE_NAME, take the place of this
        # one.
        provider = TracerProvider(
            resource=Resource({"service.name": "onehead"}).merge(OTELResourceDetector().detect())
        )
        provider.add_span_processor(
            export.BatchSpanProcessor(
                OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=SECONDS)
            )
        )
        self._model, self._api, self._extract = model, trace, propagate.extract
        self._start = provider.get_tracer("onehead").start_span

    def of(self, scope: Any) -> Trace:
        """Makes the spans of a request, below the one that its `traceparent` names, when it is
        called with the ended Exchange.
        """
        known = {
            "url.path": scope["path"],
            "server.address": scope["server"][0],
            "server.port": scope["server"][1],
        }
        return partial(self._end, known, self._extract(Headers(scope=scope)))

    def _end(self, known: dict[str, Any], parent: Any, exchange: Exchange) -> None:
        choices = exchange.reservation.choices if exchange.reservation else []
        now = time.monotonic()
        operation = "chat" if "/chat/" in known["url.path"] else "text_completion"
        counts, outcomes = speeds(choices), [choice.outcome for choice in choices]
        attributes = known | {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "onehead",
            "gen_ai.request.model": self._model,
            "gen_ai.response.finish_reasons": outcomes,
            "gen_ai.usage.input_tokens": counts["prompt_tokens"],
            "gen_ai.usage.output_tokens": counts["output_tokens"],
            "http.response.status_code": exchange.status,
            "onehead.request_id": exchange.request_id,
        }
        offset = time.time_ns() - int(now * 1e9)
        start, kind = int(exchange.received * 1e9) + offset, self._api.SpanKind.SERVER
        span = self._start(f"{operation} {self._model}", parent, kind, attributes, start_time=start)
        if exchange.status >= 500 or "failed" in outcomes:
            span.set_status(self._api.StatusCode.ERROR)
        for first in choices[:1]:  # Its further choices are started together with it.
            moments = (
                first.arrival,
                first.started or now,
                first.first or now,
                max(choice.last for choice in choices) or now,
            )
            for name, (begin, end) in zip(
                ("queue", "prefill", "decode"), pairwise(moments), strict=True
            ):
                if begin < now:
                    child = self._start(
                        name,
                        self._api.set_span_in_context(span),
                        start_time=int(begin * 1e9) + offset,
                    )
                    child.end(int(end * 1e9) + offset)
        span.end(int(now * 1e9) + offset)
