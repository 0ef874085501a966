"""The playground: GET / and the files that it loads, from the package's folder server/ui.

Invariant: the page runs no script but these files and reaches no other host; it holds nothing
secret, so it needs no key. Its URLs are relative, so that a reverse proxy may serve it under any
prefix. It knows no API.
"""

from pathlib import Path

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from server.http.errors import TGI
from server.http.routes import Access, Route

FOLDER = Path(__file__).resolve().parents[2] / "ui"
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src "
    "'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-embedder-policy": "require-corp",
    "cross-origin-resource-policy": "same-origin",
}


class PageFiles(StaticFiles):
    """The folder's files, with the headers of the page."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The response for a file. Raises HTTPException."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        # A secure context: in others a browser logs that it ignores the policy.
        if any(name == b"sec-fetch-dest" for name, _ in scope["headers"]):
            response.headers["cross-origin-opener-policy"] = "same-origin"
        return response


def file_routes() -> list[Route]:
    """Routes of the page and its files."""
    files = PageFiles(directory=FOLDER, check_dir=False)

    async def page(http: Request) -> Response:
        """Show the playground."""
        path = http.scope.get("raw_path", b"/").decode("latin-1")
        # server.root_path alone: relative URLs of the page would leave out its last part.
        if not path.endswith("/"):
            return RedirectResponse(f"{path.rpartition('/')[2]}/")
        return await files.get_response("index.html", http.scope)

    return [
        Route("/", ("GET",), page, TGI, Access.PUBLIC, head=True),
        Route("/ui/{path:path}", (), GZipMiddleware(files), TGI, Access.PUBLIC),
    ]
