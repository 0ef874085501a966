"""What an operator's tools ask: /live, /ready, /health, /metrics."""

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from server.generation import Generation
from server.metrics import CONTENT_TYPE


class OpsRoutes:
    """The routes over one Generation."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def router(self) -> APIRouter:
        router = APIRouter(tags=["operations"])
        for path, handler in (("/live", self.live), ("/ready", self.ready), ("/health", self.ready), ("/metrics", self.metrics)):
            router.add_api_route(path, handler, methods=["GET"], response_class=Response)
        return router

    async def live(self) -> Response:
        """200 as long as this process answers; an engine that is being replaced does not change that."""
        return JSONResponse({"status": "live"})

    async def ready(self) -> Response:
        """200 when a request would be computed now, else 503."""
        if self.generation.accepting:
            return JSONResponse({"status": "ready"})
        status = "draining" if self.generation.draining else self.generation.supervisor.state.value
        return JSONResponse({"error": "unhealthy", "error_type": "healthcheck", "status": status}, status_code=503)

    async def metrics(self) -> Response:
        """Prometheus' text format."""
        return Response(self.generation.metrics.exposition(), media_type=CONTENT_TYPE)
