"""FrontDoor: the outermost ASGI layer (inside CORS), which decides on a request before its body is
read.

It sets the request id and common headers, checks hosts and API keys, applies admission control and
writes the access log. Invariant: every path needs an API key, if there are any, unless its Route
says otherwise; the path that is checked is the path that is routed. It knows no bodies.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config import ServerSection
from server.errors import NotFound, RequestError, Unauthorized
from server.generation.clients import Terms
from server.generation.engine_client import EngineClient
from server.generation.generation import Generation
from server.generation.request import speeds
from server.http.client_address import client_address, client_group
from server.http.exchange import CLIENT_GONE, Exchange, exchange_of
from server.http.hosts import AllowedHosts
from server.http.keys import UNNAMED, Keys
from server.http.routes import Access, Route, RouteTable
from server.http.tracing import Tracing
from server.http.unknown_fields import header
from server.logs import request_id as current_request_id

access = logging.getLogger("onehead.access")

SAFETY_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}
"""Headers of every response that does not set them itself."""
RAW_SAFETY_HEADERS = tuple(
    (name.encode(), value.encode()) for name, value in SAFETY_HEADERS.items()
)
STREAMS = "/v1/streams/"
_REQUEST_ID = re.compile(rb"(?=[-_]*[A-Za-z0-9])[A-Za-z0-9_-]{1,64}")
MAX_PATH_CHARS = 200
"""Characters of a path that the access log shows."""


class FrontDoor:
    """Wraps the application; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        table: RouteTable,
        generation: Generation,
        section: ServerSection,
        keys: Keys,
        hosts: AllowedHosts,
        tracing: Tracing | None,
    ) -> None:
        self.app = app
        self.table = table
        self.client = generation.client
        self.tracing = tracing
        self.api_keys = keys
        self._metrics_keys = {section.metrics_key: UNNAMED} if section.metrics_key else None
        self._hosts = hosts
        self._root_path = section.root_path
        self._trusted_proxies = section.trusted_proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        if not exchange.request_id:
            self.decide(scope)
        current_request_id.set(exchange.request_id)
        response = LoggedResponse(scope, exchange, send, self.client)
        try:
            if exchange.error is not None:
                needs_key = isinstance(exchange.error, Unauthorized)
                headers = {"www-authenticate": "Bearer"} if needs_key else {}
                refused = exchange.dialect.response(exchange.error, headers)
                await refused(scope, receive, response.send)
            else:
                await self.app(scope, receive, response.send)
        finally:
            exchange.chunks = None  # Breaks reference cycles through the scope.
            if not exchange.outlives_response:
                exchange.release()
            response.log(self.table.find(scope["path"], scope["method"]))

    def decide(self, scope: Any) -> bool:
        """Decides, once for each request, whether the application processes it; if not, sets
        `Exchange.error`. Does not block.

        It removes server.root_path from the scope's path, sets the caller and reserves the
        admission, with the request's Idempotency-Key.
        """
        exchange = exchange_of(scope)
        if self._root_path and f"{scope['path']}/".startswith(f"{self._root_path}/"):
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"
        path = scope["path"]
        exchange.request_id = _request_id(scope)
        exchange.dialect = self.table.dialect(path)
        route = self.table.find(path, scope["method"])
        generates = scope["method"] == "POST" and route is not None and route.generates
        try:
            self._hosts.check(scope)
            self._identify(scope, exchange, route)
            if generates and self.tracing is not None:
                exchange.trace = self.tracing.of(scope)
            if not path.isprintable():
                # A router's pattern ignores a final line end, so that it would route another path
                # than the one checked here.
                raise NotFound("no such route; GET /docs lists those there are")
            if generates:
                keys = [value for name, value in scope["headers"] if name == b"idempotency-key"]
                key = b",".join(keys) if keys else None
                exchange.reservation = self.client.reserve(
                    exchange.caller, exchange.client, exchange.terms, key
                )
        except RequestError as error:
            # Without its traceback, whose frames refer to this exchange: only the garbage collector
            # would free that cycle.
            exchange.error = error.with_traceback(None)
        return exchange.error is None

    def is_probe(self, path: str) -> bool:
        """Whether a path is that of a probe, which has places of its own among the connections."""
        route = self.table.find(path.removeprefix(self._root_path))
        return route is not None and route.probe

    def on_incomplete_body(self, scope: Any) -> None:
        """Stops counting an admitted request as open: a client that sends its body slowly must not
        take others' capacity.
        """
        if (reservation := exchange_of(scope).reservation) is not None:
            reservation.release()

    def keys(self, route: Route | None) -> Mapping[str, Terms] | None:
        """The keys that are valid for a route, with what each may do, by digest; None if it needs
        none.
        """
        match Access.API_KEY if route is None else route.access:
            case Access.PUBLIC:
                return None
            case Access.METRICS_KEY:
                return self._metrics_keys
            case Access.API_KEY:
                return self.api_keys.terms

    def _identify(self, scope: Scope, exchange: Exchange, route: Route | None) -> None:
        """Sets the caller to the digest of the request's key, if the route needs one, and who the
        client is. Raises Unauthorized.
        """
        exchange.address = client_address(scope, self._trusted_proxies)
        exchange.client = client_group(exchange.address)
        keys = self.keys(route)
        if keys is None:
            return
        headers = scope["headers"]
        given = [value for name, value in headers if name == b"authorization"]
        given = given or [b"bearer " + key for name, key in headers if name == b"x-api-key"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).hexdigest()
        # Not a constant-time comparison: timing could leak parts of a digest, from which the key
        # cannot be found.
        if digest not in keys or scheme.lower() != b"bearer":
            raise Unauthorized(
                "a valid key is needed: send the header `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )
        exchange.caller, exchange.terms = digest, keys[digest]
        exchange.client = exchange.terms.name or digest


@dataclass(slots=True)
class LoggedResponse:
    """Adds the common headers to a response, and writes its line of the access log."""

    scope: Scope
    exchange: Exchange
    send_on: Send
    client: EngineClient
    is_complete: bool = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.exchange.status = message["status"]
            own = list(message.get("headers", []))
            named = {name.lower() for name, _ in own}
            own.append((b"x-request-id", self.exchange.request_id.encode()))
            if ignored := self.exchange.ignored:
                own.append((b"x-onehead-ignored", header(ignored).encode()))
                self.client.count_ignored(ignored)
            own += [pair for pair in RAW_SAFETY_HEADERS if pair[0] not in named]
            if self.client.admission.draining:
                own.append((b"connection", b"close"))
            message["headers"] = own
        elif not message.get("more_body", False):
            self.is_complete = True
        await self.send_on(message)

    def log(self, route: Route | None) -> None:
        """Writes the access log's line of the request, at level debug for probes."""
        exchange = self.exchange
        status = exchange.refused_status or (exchange.status if self.is_complete else CLIENT_GONE)
        milliseconds = round((time.monotonic() - exchange.received) * 1e3, 1)
        method = self.scope["method"]
        path = self.scope["path"][:MAX_PATH_CHARS]
        if path.startswith(STREAMS):
            path = (
                f"{STREAMS}..."  # A stream can be read by its id, so the id is kept out of the log.
            )
        fields = {"method": method, "path": path, "status": status, "milliseconds": milliseconds}
        choices = exchange.reservation.choices if exchange.reservation else ()
        details = {"client": exchange.address, "key": exchange.terms.name, **speeds(choices)}
        details = {name: value for name, value in details.items() if value}
        level = logging.DEBUG if route is not None and route.probe else logging.INFO
        words = "".join(f" {name}={value}" for name, value in details.items())
        text = f"{method} {ascii(path)[1:-1]} {status} {milliseconds:.1f} ms{words}"
        access.log(level, "%s", text, extra={"fields": fields | details})


def _request_id(scope: Scope) -> str:
    """The x-request-id of the client if it has up to 64 letters, digits, `-` and `_`; else a random
    id.
    """
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    match = _REQUEST_ID.fullmatch(b",".join(given))
    return match[0].decode() if match else secrets.token_hex(8)
