"""Routes for operators and their tools: /live, /ready, /health, /ping, /version, /metrics,
/plan.
"""

from functools import partial
from importlib.metadata import version

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from server.http.errors import TGI
from server.http.handlers import Handlers
from server.http.routes import Access, Route


class OpsRoutes(Handlers):
    """Handlers of these routes. All answer HEAD too, which load balancers probe with."""

    def routes(self) -> list[Route]:
        shown = partial(Route, methods=("GET",), dialect=TGI, head=True, tag="operations")
        probed = partial(shown, access=Access.PUBLIC, probe=True)
        return [
            probed("/live", handler=self.live),
            probed("/ready", handler=self.ready),
            probed("/health", handler=self.health),
            probed("/ping", handler=self.ready),
            shown("/version", handler=self.version),
            probed("/metrics", handler=self.metrics, access=Access.METRICS_KEY),
            shown("/plan", handler=self.plan),
        ]

    async def live(self) -> Response:
        """Show whether the server's process answers.

        Also 200 while the engine is starting or restarting.
        """
        return JSONResponse({"status": "live"})

    async def ready(self) -> Response:
        """Show whether the server accepts requests.

        200 if it does, else 503 with its state: the phase of loading, the reason of an engine
        restart, or draining.
        """
        status = self.generation.client.status
        if self.generation.client.admission.accepting:
            return JSONResponse({"status": status})
        return JSONResponse(
            {"error": "unhealthy", "error_type": "healthcheck", "status": status}, status_code=503
        )

    async def health(self) -> Response:
        """Show whether requests are answered.

        As /ready, but also 200 while a new engine replaces one that crashed or hung: requests wait
        for it. The status is then the reason, else ok.
        """
        client = self.generation.client
        return (
            JSONResponse({"status": "ok" if client.admission.accepting else client.status})
            if client.healthy
            else await self.ready()
        )

    async def version(self) -> Response:
        """Show the version of this server.

        In vLLM's form.
        """
        return JSONResponse({"version": version("onehead")})

    async def metrics(self) -> Response:
        """Show metrics.

        In the Prometheus text format.
        """
        return Response(self.generation.client.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def plan(self) -> Response:
        """Show the memory plan of the running engine.

        Bytes of weights and KV cache, and how many sequences fit. `onehead plan` computes the same
        for a checkpoint folder.
        """
        ready = self.generation.client.ready
        if ready is None:
            return await self.ready()
        return JSONResponse(
            {
                "model_type": ready.model_type,
                "dtype": ready.dtype,
                "quantization": ready.quantization,
                "device": ready.device,
                "parameters": ready.num_parameters,
                "weight_bytes": ready.weight_bytes,
                "kv_bytes_per_token": {
                    "multi_query": ready.kv_bytes_per_token,
                    "multi_head": ready.multi_head_bytes_per_token,
                },
                "cache": {
                    "dtype": ready.kv_dtype,
                    "page_size": ready.page_size,
                    "page_bytes": ready.page_bytes,
                    "pages": ready.num_pages,
                    "bytes": ready.page_bytes * ready.num_pages,
                },
                "max_context": ready.max_context,
                "longest_sequence": ready.capacity,
                "sequences": [
                    {"context": context, "fit": count} for context, count in ready.sequences
                ],
            }
        )
