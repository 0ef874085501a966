"""Exchange: what the HTTP side knows of one request besides its ASGI scope, from the first byte that is read to the line of the access log.

Everything that layers tell each other about a request is a field here; the scope itself carries the Exchange and nothing else of ours.
"""

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import Send

from server.errors import RequestError
from server.generation.admission import Reservation

_KEY = "onehead"
"""Of an ASGI scope's entry with its Exchange."""
NO_CALLER = ""
"""The caller where no API key is needed: all such requests may share cached prefixes."""


class Dialect(Enum):
    """Whose clients read the answers of a route; it decides the form of error bodies."""

    TGI = "tgi"
    OPENAI = "openai"


@dataclass(slots=True)
class Exchange:
    """One request and its response."""

    received: float = field(default_factory=time.monotonic)
    """When its head had been read, in monotonic seconds."""
    request_id: str = ""
    dialect: Dialect = Dialect.TGI
    caller: str = NO_CALLER
    """The digest of the API key that it was sent with; decides whose prefixes are shared, and whose streams can be read."""
    key_name: str = ""
    error: RequestError | None = None
    """Why it is refused before its body is read."""
    claim: tuple[str, bytes] | None = None
    """(caller, Idempotency-Key) that it holds while it is answered."""
    claims: set[tuple[str, bytes]] = field(default_factory=set)
    """The claims of all requests, its own among them."""
    reservation: Reservation | None = None
    """Of a request to a route that generates."""
    outlives_response: bool = False
    """Whether a task goes on with it after its response and releases it then."""
    refused_status: int | None = None
    """The status that the connection answered with in the application's place."""
    write: Send | None = None
    """The ASGI `send` nearest to the socket: parts of a body go there directly, as each layer between costs time for every token."""
    decided: bool = False
    """Whether the front door has decided on it."""

    def release(self) -> None:
        """Gives back its reservation and its Idempotency-Key."""
        if self.reservation is not None:
            self.reservation.release()
        if self.claim is not None:
            self.claims.discard(self.claim)

    @property
    def reserved(self) -> Reservation:
        """Its reservation. Raises AssertionError on a route that is not declared as generating (server/http/routes.py)."""
        assert self.reservation is not None, "this route starts generation, but is not declared as `generates` in its Route"
        return self.reservation


def exchange_of(scope: Any) -> Exchange:
    """The Exchange of an ASGI scope, or of a starlette Request; a new one where there is none yet."""
    scope = scope.scope if isinstance(scope, HTTPConnection) else scope
    exchange = scope.get(_KEY)
    if exchange is None:
        exchange = scope[_KEY] = Exchange()
    assert isinstance(exchange, Exchange)
    return exchange
