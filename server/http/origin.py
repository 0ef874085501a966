"""Origin of a resumable request: what another process needs to carry it out again, and how that is done. Knows no dialect."""

import secrets
from typing import Any

from starlette.types import ASGIApp, Message

from server.api_protocol import Origin
from server.http.exchange import Exchange, put_exchange

MAX_BODY_BYTES = 2**24
"""A request with a larger body stays with its process."""
HEADERS = frozenset({b"content-type", b"x-stream-resumable"})
"""Headers that the handlers of requests read."""


def keep_origin(scope: Any, exchange: Exchange) -> None:
    """Gives the reservation of a resumable request its origin, and its stream an id."""
    exchange.stream_id = exchange.stream_id or secrets.token_urlsafe(24)
    if len(exchange.body) <= MAX_BODY_BYTES:
        reservation = exchange.reserved
        reservation.origin = Origin(
            stream=exchange.stream_id,
            path=scope["path"],
            body=exchange.body,
            headers=[(name, value) for name, value in scope["headers"] if name in HEADERS],
            request_id=exchange.request_id,
            address=exchange.address,
            reply_id=reservation.reply_id,
            created=reservation.created,
        )


async def repeat(app: ASGIApp, origin: Origin, exchange: Exchange) -> int:
    """Carries a request out again, behind FrontDoor, without a connection. Returns the status of the response."""
    exchange.request_id, exchange.address, exchange.stream_id = origin.request_id, origin.address, origin.stream
    exchange.decided = exchange.is_moved = True
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": origin.path,
        "raw_path": origin.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": list(origin.headers),
    }
    put_exchange(scope, exchange)
    status, body = 0, [origin.body]

    async def receive() -> Message:
        return {"type": "http.request", "body": body.pop(), "more_body": False} if body else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(scope, receive, send)
    return status
