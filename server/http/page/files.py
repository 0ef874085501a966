"""The playground: GET / and the files that it loads, from the package's folder server/ui.

Invariant: the page runs no script but these files and reaches no other host; it holds nothing
secret, so it needs no key. Its URLs are relative, so that a reverse proxy may serve it under any
prefix. It knows no API.
"""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from server.errors import NotFound
from server.http.exchange import Dialect
from server.http.packed import PackedBody
from server.http.routes import Access, Route

FOLDER = Path(__file__).resolve().parents[2] / "ui"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src "
    "'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'; trusted-types 'none'",
    "cross-origin-embedder-policy": "require-corp",
    "cross-origin-resource-policy": "same-origin",
}


def file_routes() -> list[Route]:
    """Routes of the page and its files, which are read and compressed once."""
    paths = [path for path in FOLDER.rglob("*.*") if path.suffix in TYPES]
    files = {
        path.relative_to(FOLDER).as_posix(): PackedBody(path.read_bytes(), TYPES[path.suffix])
        for path in paths
    }

    def answer(http: Request, name: str) -> Response:
        if name not in files:
            raise NotFound("no such file of the playground")
        tag = f'W/"{hashlib.sha256(files[name].plain).hexdigest()[:32]}"'
        headers = {**HEADERS, "etag": tag}
        # A secure context: in others a browser logs that it ignores the policy.
        if "sec-fetch-dest" in http.headers:
            headers["cross-origin-opener-policy"] = "same-origin"
        if tag in http.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers | {"vary": "accept-encoding"})
        return files[name].response(http, headers)

    async def page(http: Request) -> Response:
        """Show the playground."""
        path = http.scope.get("raw_path", b"/").decode("latin-1")
        # server.root_path alone: relative URLs of the page would leave out its last part.
        if not path.endswith("/"):
            return RedirectResponse(f"{path.rpartition('/')[2]}/")
        return answer(http, "index.html")

    async def file(http: Request, name: str) -> Response:
        """Show a file of the playground."""
        return answer(http, name)

    return [
        Route("/", ("GET",), page, Dialect.TGI, Access.PUBLIC, head=True, documented=False),
        Route(
            "/ui/{name:path}",
            ("GET",),
            file,
            Dialect.TGI,
            Access.PUBLIC,
            head=True,
            documented=False,
        ),
    ]
