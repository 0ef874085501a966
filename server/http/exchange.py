"""Exchange: the state of one HTTP request and its response that the HTTP layers share.

Invariant: it is the only entry that this server adds to an ASGI scope; layers pass each other
nothing else about a request, but for the path, from which FrontDoor removes server.root_path, and
the log's request id.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import HTTPConnection

from server.errors import RequestError
from server.generation.admission import Reservation
from server.generation.clients import EVERYBODY, Terms
from server.http.errors import TGI, Dialect

_KEY = "onehead"
"""Key of the Exchange in an ASGI scope."""
NO_CALLER = ""
"""The caller where no API key is needed: all such requests may share cached prefixes."""


CLIENT_GONE = 499
"""Status, in the access log, of a request whose client disconnected before any other was sent."""
Trace = Callable[["Exchange"], None]
"""Called with an Exchange that has ended."""


class Chunks(Protocol):
    """Writes parts of a response's body past the middlewares and uvicorn, whose checks take time
    for each token.
    """

    @property
    def may_write(self) -> bool:
        """Whether the response is sent in chunks, and the client is there and keeps up."""

    def write(self, data: bytes) -> None:
        """Writes a chunk, while `may_write`."""


@dataclass(slots=True)
class Exchange:
    """One request and its response."""

    received: float = field(default_factory=time.monotonic)
    """Monotonic time when the request's head had been read."""
    request_id: str = ""
    """Empty until it has been decided on the request."""
    dialect: Dialect = TGI
    caller: str = NO_CALLER
    """SHA-256 digest of the request's API key: requests of one caller share cached prefixes and can
    read each other's streams."""
    terms: Terms = EVERYBODY
    """What the client may do."""
    address: str = ""
    """The client's address, behind trusted proxies too (server/http/client_address.py)."""
    client: str = ""
    """Who shares the server with others: the key's name, else its digest; the group of the address
    where no key is needed."""
    error: RequestError | None = None
    """Why the request is refused before its body is read; None if it is not."""
    reservation: Reservation | None = None
    """The admission of a request to a route that generates."""
    body: bytes = b""
    """The body, once it has been read."""
    stream: object = None
    """The StreamWriter of a stream of an earlier server, where the request is that one's."""
    outlives_response: bool = False
    """Whether a task of a resumable stream continues after the response, and calls `release`
    itself."""
    ignored: list[str] = field(default_factory=list)
    """Places of the fields of the body that are unknown and ignored, which the response tells."""
    status: int = CLIENT_GONE
    """Of the response."""
    trace: Trace | None = None
    """Records the request when it has ended, where that is asked for (server/http/tracing.py)."""
    refused_status: int | None = None
    """The status that the connection sent in place of the application, for the access log."""
    chunks: Chunks | None = None
    """What writes parts of the body at once; None where the connection has no such way."""

    def release(self) -> None:
        """Ends the reservation, if there is one, and the request's trace. Idempotent."""
        if self.reservation is not None:
            self.reservation.close()
        trace, self.trace = self.trace, None
        if trace is not None:
            trace(self)

    @property
    def reserved(self) -> Reservation:
        """The reservation. Raises AssertionError on a route without `generates`
        (server/http/routes.py).
        """
        assert self.reservation is not None, (
            "this route starts generation, but is not declared as `generates` in its Route"
        )
        return self.reservation


def exchange_of(scope: Any) -> Exchange:
    """The Exchange of an ASGI scope or of a Starlette request; created on first use."""
    scope = scope.scope if isinstance(scope, HTTPConnection) else scope
    exchange = scope.get(_KEY)
    if exchange is None:
        exchange = scope[_KEY] = Exchange()
    assert isinstance(exchange, Exchange)
    return exchange
