"""A Hugging Face hub with one repository on 127.0.0.1: the routes that `snapshot_download` uses,
and faults in them.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY = "org/tiny-one"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "org/gated"
"""Its files are listed but not served, as the hub does for a gated repository."""


class FakeHub:
    """`requests` holds every request so far; `status` is answered to all instead of the file."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self.requests: list[str] = []
        self.status: int | None = None
        self.endpoint = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        path = path.partition("?")[0]
        if self.status is not None:
            return self.status, {}, b""
        for repository in (REPOSITORY, GATED):
            if path == f"/api/models/{repository}/tree/{COMMIT}":
                return 200, {}, json.dumps([self._entry(name) for name in self.files]).encode()
            if path in (f"/api/models/{repository}", f"/api/models/{repository}/revision/main"):
                return (
                    200,
                    {},
                    json.dumps(
                        {
                            "id": repository,
                            "sha": COMMIT,
                            "siblings": [{"rfilename": name} for name in self.files],
                        }
                    ).encode(),
                )
            if path.startswith(f"/api/models/{repository}/revision/"):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if path.startswith(f"/{GATED}/resolve/"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        name = path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
        if name in self.files:
            return 200, {"ETag": f'"{self._etag(name)}"', "X-Repo-Commit": COMMIT}, self.files[name]
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _etag(self, name: str) -> str:
        """The ETag of a file: the sha256 of a large file, git's sha1 of any other."""
        data = self.files[name]
        large = name.endswith(".safetensors")
        return (
            hashlib.sha256(data).hexdigest()
            if large
            else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        )

    def _entry(self, name: str) -> dict[str, object]:
        return {
            "type": "file",
            "path": name,
            "size": len(self.files[name]),
            "oid": self._etag(name)[:40],
        }


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for key, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **headers,
            }.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
