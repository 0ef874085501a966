"""Routes that show the KV cache and statistics: /monitor as events, and /monitor/cache to compare
its state of the cache with.
"""

import asyncio
from functools import partial

from starlette.responses import Response

from server.errors import Unavailable
from server.http.errors import TGI
from server.http.handlers import Handlers
from server.http.routes import Route
from server.http.sse import EventResponse

DUMP_SECONDS = 5.0
"""Time for the engine to answer."""


class MonitorRoutes(Handlers):
    """Handlers of /monitor and /monitor/cache."""

    def routes(self) -> list[Route]:
        return [
            Route("/monitor", ("GET",), self.watch, TGI, tag="operations"),
            Route("/monitor/cache", ("GET",), self.cache, TGI, tag="operations"),
        ]

    async def watch(self) -> Response:
        """Watch the pages of the KV cache, and the server's counts.

        Server-sent events without an end: `cache` says what each page holds and which sequences are
        open, when that has changed, at most 4 times a second; `stats` has counts and latencies,
        once a second.
        """
        monitor = self.generation.client.monitor
        viewer = monitor.join()
        leave = partial(monitor.viewers.remove, viewer)
        return EventResponse(viewer, leave, {}, self.section.keep_alive)

    async def cache(self) -> Response:
        """Show the pages of the KV cache as the engine's own lists have them.

        Viewers of /monitor are sent the same state, under the same `engine` and `view`.
        """
        try:
            async with asyncio.timeout(DUMP_SECONDS):
                dump = await self.generation.client.monitor.dump()
                return Response(dump, media_type="application/json")
        except TimeoutError:
            raise Unavailable(
                "the engine is not ready, or does not answer; try again later", retry_after=1
            ) from None
