"""PackedBody: a body that is compressed once, and sent compressed to clients that accept gzip (RFC
9110, section 8.4). Knows no routes.
"""

import gzip
import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

_ACCEPTS = re.compile(r"(?i)(^|[\s,])gzip\s*(;\s*q=(1|0\.0*[1-9])|,|$)").search


class PackedBody:
    """A body that does not change."""

    def __init__(self, plain: bytes, media_type: str) -> None:
        self.plain, self._media_type = plain, media_type
        self._packed = gzip.compress(plain)

    def response(self, http: Request, headers: Mapping[str, str] | None = None) -> Response:
        """The response to a request, with these headers."""
        headers = {**(headers or {}), "vary": "accept-encoding"}
        if not _ACCEPTS(http.headers.get("accept-encoding", "")):
            return Response(self.plain, media_type=self._media_type, headers=headers)
        return Response(
            self._packed,
            media_type=self._media_type,
            headers=headers | {"content-encoding": "gzip"},
        )
