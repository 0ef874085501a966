"""An OpenTelemetry collector for tests: takes OTLP over HTTP and keeps the spans."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.processes import wait_until


@dataclass(frozen=True)
class Span:
    """One span; times are seconds since 1970."""

    trace: str
    id: str
    parent: str
    name: str
    kind: int
    begin: float
    end: float
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


def _plain(value: Any) -> Any:
    """The value of an attribute."""
    kind = value.WhichOneof("value")
    return (
        [_plain(each) for each in value.array_value.values]
        if kind == "array_value"
        else getattr(value, kind)
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _plain(pair.value) for pair in pairs}


class Collector:
    """What has come so far."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.num_posts = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                found = (
                    self.path == "/v1/traces"
                    and self.headers["content-type"] == "application/x-protobuf"
                )
                if found:
                    collector.take(data)
                self.send_response(200 if found else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def take(self, data: bytes) -> None:
        """Keeps the spans of a request."""
        self.num_posts += 1
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            about = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                    times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
                    self.spans.append(
                        Span(
                            *ids,
                            span.name,
                            span.kind,
                            *times,
                            span.status.code == 2,
                            _attributes(span.attributes),
                            about,
                        )
                    )

    def of(self, request_id: str) -> dict[str, Span]:
        """The spans of a request: the whole, and what is below it, by name. Waits for the whole,
        which ends last.
        """

        def whole() -> Span | None:
            return next(
                (
                    span
                    for span in self.spans
                    if span.attributes.get("onehead.request_id") == request_id
                ),
                None,
            )

        found = wait_until(whole, f"the span of {request_id}")
        return {"whole": found} | {
            span.name: span for span in self.spans if span.parent == found.id
        }


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens meanwhile."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()
