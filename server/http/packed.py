"""PackedBody: a body that is compressed once, and sent compressed to clients that accept gzip (RFC 9110, section 8.4). Knows no routes."""

import gzip
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response


class PackedBody:
    """A body that does not change."""

    def __init__(self, plain: bytes, media_type: str) -> None:
        self.plain, self._media_type = plain, media_type
        self._packed = gzip.compress(plain)

    def response(self, http: Request, headers: Mapping[str, str] | None = None) -> Response:
        """The response to a request, with these headers."""
        headers = {**(headers or {}), "vary": "accept-encoding"}
        if "gzip" not in http.headers.get("accept-encoding", ""):
            return Response(self.plain, media_type=self._media_type, headers=headers)
        return Response(self._packed, media_type=self._media_type, headers=headers | {"content-encoding": "gzip"})
