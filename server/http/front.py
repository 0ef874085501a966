"""FrontDoor: what every request passes before anything is done for it, as the outermost ASGI layer.

It gives each request an id and each response its headers, knows who asks, refuses those without a key, those for whom there is no room
and those who come while the server leaves, before a byte of their body is read; and writes the access log. Invariant: a path that is
not named public here needs a key, if there are any. It decides on the path that is routed on, and knows no bodies.
"""

import hashlib
import logging
import secrets
import time
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config import ServerSection
from server.errors import Conflict, NotFound, RequestError, Unauthorized
from server.generation.admission import Generation, Place, current_place
from server.generation.stream import speeds
from server.http.connection import SAFETY_HEADERS
from server.http.errors import refusal
from server.http.keys import Keys
from server.http.sse import WRITE
from server.logs import request_id as current_request_id

access = logging.getLogger("onehead.access")

PUBLIC = frozenset({"/live", "/ready", "/health", "/ping"})
PROBED = PUBLIC | {"/metrics"}
"""Paths that are asked every few seconds: their lines of the access log are at the level debug."""
WORK = frozenset({"/", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions", "/infill"})
"""Paths whose POST asks for generation."""
RAW_SAFETY_HEADERS = tuple((name.encode(), value.encode()) for name, value in SAFETY_HEADERS.items())
STREAMS = "/v1/streams/"
CLIENT_GONE = 499
ENTRY = "onehead.entry"


@dataclass(slots=True)
class Entry:
    """What the door has decided of a request. `kept`: it is not over with its response, and whoever goes on with it releases it."""

    running: set[tuple[str, bytes]]
    error: RequestError | None = None
    claim: tuple[str, bytes] | None = None
    place: Place | None = None
    kept: bool = False

    def release(self) -> None:
        """Gives back what the request was given: its place, and its Idempotency-Key."""
        self.leave()
        if self.claim is not None:
            self.running.discard(self.claim)

    def leave(self) -> None:
        """Gives back its place alone."""
        if self.place is not None:
            self.place.release()


class FrontDoor:
    """The application and what every request passes before it."""

    def __init__(self, app: ASGIApp, generation: Generation, section: ServerSection) -> None:
        self.app = app
        self.generation = generation
        self.api_keys = Keys(section.api_keys, section.api_keys_file)
        self._section = section
        self._running: set[tuple[str, bytes]] = set()
        """(who, Idempotency-Key) of the requests that are being answered."""

    def postpone(self, scope: Scope) -> None:
        """The rest of this request is still to come: until then it takes nobody's place."""
        entry: Entry = scope[ENTRY]
        entry.leave()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if ENTRY not in scope:
            self.admits(scope)
        entry: Entry = scope[ENTRY]
        exchange = Exchange(scope, send, self.generation)
        current_request_id.set(exchange.request_id)
        current_place.set(entry.place)
        try:
            if entry.error is not None:
                headers = {"www-authenticate": "Bearer"} if isinstance(entry.error, Unauthorized) else {}
                await refusal(Request(scope), entry.error, headers)(scope, receive, exchange.send)
            else:
                scope[WRITE] = send
                await self.app(scope, receive, exchange.send)
        finally:
            scope.pop(WRITE, None)  # It holds this scope.
            if not entry.kept:
                entry.release()
            exchange.log()

    def admits(self, scope: Scope) -> bool:
        """Decides, once for each request, whether anything is done for it, and notes that in its scope. It waits for nothing."""
        entry = scope[ENTRY] = Entry(self._running)
        prefix = self._section.root_path
        if prefix and f"{scope['path']}/".startswith(f"{prefix}/"):
            scope["path"] = scope["path"].removeprefix(prefix) or "/"
        scope["request_id"] = _request_id(scope)
        try:
            scope["principal"] = self._principal(scope)
            if not scope["path"].isprintable():
                # A router's pattern may match before a final line end: what is decided here must be what is routed.
                raise NotFound("no such route; GET /docs lists those there are")
            entry.claim = self._claim(scope)
            if scope["method"] == "POST" and scope["path"] in WORK:
                entry.place = self.generation.take_place(scope["principal"])
        except RequestError as error:
            # Without its frames, which hold this entry: in a flood, only long pauses would free such circles.
            entry.error = error.with_traceback(None)
        return entry.error is None

    def keys(self, path: str) -> dict[str, str] | None:
        """Names by digest of the keys one of which a request for `path` needs; None where it needs none."""
        if path == "/metrics":
            return {self._section.metrics_key: ""} if self._section.metrics_key else None
        return None if path in PUBLIC else self.api_keys.names

    def _principal(self, scope: Scope) -> str:
        """The digest of the request's key, empty where none is needed; notes the key's name. Raises Unauthorized."""
        keys = self.keys(scope["path"])
        if keys is None:
            return ""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).hexdigest()
        # The time that this takes says something of a digest at most, and no key follows from that.
        if digest not in keys or scheme.lower() != b"bearer":
            raise Unauthorized("a valid key is needed: send the header `Authorization: Bearer KEY`", code="invalid_api_key")
        scope["key_name"] = keys[digest]
        return digest

    def _claim(self, scope: Scope) -> tuple[str, bytes] | None:
        """Notes the request under its Idempotency-Key, if it has one. Raises Conflict while another runs under it."""
        keys = [value for name, value in scope["headers"] if name == b"idempotency-key"]
        if not keys or scope["method"] != "POST":
            return None
        claim = (scope["principal"], b",".join(keys))
        if claim in self._running:
            raise Conflict("a request with this Idempotency-Key is being answered already", code="idempotency_conflict")
        self._running.add(claim)
        return claim


class Exchange:
    """One request and its response, as the log tells of them."""

    def __init__(self, scope: Scope, send: Send, generation: Generation) -> None:
        self._scope = scope
        self._send = send
        self._generation = generation
        self._began = scope.get("onehead.received", time.monotonic())
        self._status = CLIENT_GONE
        self._complete = False
        self.request_id = scope["request_id"]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            own = list(message.get("headers", []))
            named = {name.lower() for name, _ in own}
            own.append((b"x-request-id", self.request_id.encode()))
            own += [header for header in RAW_SAFETY_HEADERS if header[0] not in named]
            if self._generation.draining:
                own.append((b"connection", b"close"))
            message["headers"] = own
        elif not message.get("more_body", False):
            self._complete = True
        await self._send(message)

    def log(self) -> None:
        """The line of the access log. A client that left before the end of its answer gets the status that nobody saw."""
        status = self._scope.get("onehead.refused") or (self._status if self._complete else CLIENT_GONE)
        milliseconds = round((time.monotonic() - self._began) * 1e3, 1)
        method, path = self._scope["method"], self._scope["path"]
        if path.startswith(STREAMS):
            path = f"{STREAMS}..."  # Whoever knows an id may read the stream.
        fields = {"method": method, "path": path, "status": status, "milliseconds": milliseconds}
        client, place = self._scope.get("client"), self._scope[ENTRY].place
        details = {"client": client and client[0], "key": self._scope.get("key_name"), **speeds(place.choices if place else ())}
        details = {name: value for name, value in details.items() if value}
        level = logging.DEBUG if path in PROBED else logging.INFO
        words = "".join(f" {name}={value}" for name, value in details.items())
        text = f"{method} {ascii(path[:200])[1:-1]} {status} {milliseconds:.1f} ms{words}"
        access.log(level, "%s", text, extra={"fields": fields | details})


def _request_id(scope: Scope) -> str:
    """The client's own id, where it is a plain short word; else a new one."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and 0 < len(given[0]) <= 64 and given[0].replace(b"-", b"").replace(b"_", b"").isalnum():
        return str(given[0].decode("ascii"))
    return secrets.token_hex(8)
