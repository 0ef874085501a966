"""A client of the TGI dialect that is cheap enough to measure servers with: HTTP/1.1 and
server-sent events over plain asyncio streams, one connection for each request.

Invariant: a request ends in an Outcome that holds either everything that came or the reason why
not. It knows the wire and nothing of what a request is sent for.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

Clock = Callable[[], float]


class ReplyError(Exception):
    """A reply that is no answer to what was asked; the message says how."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server listens."""

    host: str
    port: int
    authority: str
    prefix: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """Of http[s]://HOST[:PORT][/PREFIX]. Raises ValueError."""
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.username
            or parts.query
            or parts.fragment
        ):
            raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT; got {url!r}")
        parts.hostname.encode("idna")  # What cannot be looked up is a ValueError too.
        tls = parts.scheme == "https"
        return cls(
            parts.hostname,
            parts.port or (443 if tls else 80),
            parts.netloc,
            parts.path.rstrip("/"),
            tls,
        )

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of one request on a connection of its own."""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\n"
        head += f"host: {self.authority}\r\nconnection: close\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body


def reachable(url: str) -> str:
    """The same URL. Raises ValueError where no Endpoint can be made of it."""
    Endpoint.parse(url)
    return url


async def talk(endpoint: Endpoint, request: bytes) -> AsyncGenerator[tuple[int, bytes], None]:
    """Sends a request on a new connection; (status, bytes of the body) as they come in. Raises
    OSError or ReplyError.
    """
    reader, writer = await asyncio.open_connection(
        endpoint.host,
        endpoint.port,
        ssl=endpoint.tls or None,
    )
    try:
        writer.write(request)
        status, headers = _parse_head(await reader.readuntil(b"\r\n\r\n"))
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                yield status, (await reader.readexactly(size + 2))[:-2]
        elif "content-length" in headers:
            yield status, await reader.readexactly(int(headers["content-length"]))
        else:
            yield status, await reader.read()
    except EOFError:
        raise ReplyError("the connection was closed in mid-reply") from None
    except (ValueError, IndexError, asyncio.LimitOverrunError):
        raise ReplyError("the reply is not HTTP/1.1") from None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    return int(first.split(" ")[1]), {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }


class _Token(msgspec.Struct):
    id: int


class _Details(msgspec.Struct):
    input_length: int | None = None


class _Event(msgspec.Struct):
    """What is read of an event, and of the body of an error."""

    token: _Token | None = None
    details: _Details | None = None
    error: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are the clock's; `intended` is when it should have been
    sent, `sent` when it was.
    """

    intended: float
    sent: float = 0.0
    end: float = 0.0
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    input_length: int | None = None
    failure: str | None = None

    def take(self, data: bytes, now: float) -> None:
        """One event that came in now. Raises ReplyError where it is an error, or none of the
        dialect's.
        """
        try:
            event = _decode(data)
        except msgspec.DecodeError:
            raise ReplyError("an event is not of TGI's dialect") from None
        if event.error is not None:
            raise ReplyError(event.error)
        if event.token is not None:
            self.token_times.append(now)
            self.token_ids.append(event.token.id)
        if event.details is not None:
            self.input_length = event.details.input_length


async def generate(
    endpoint: Endpoint,
    request: bytes,
    timeout: float,
    outcome: Outcome,
    clock: Clock,
) -> None:
    """Sends the bytes of a streaming request and fills `outcome`. Raises nothing: what goes wrong
    is the outcome's failure.
    """
    outcome.sent = clock()
    try:
        async with asyncio.timeout(timeout), aclosing(talk(endpoint, request)) as pieces:
            await _receive(pieces, outcome, clock)
    except TimeoutError:
        outcome.failure = f"no end within {timeout:g} s"
    except (OSError, ReplyError) as error:
        outcome.failure = reason(error)
    outcome.end = clock()


async def _receive(
    pieces: AsyncIterator[tuple[int, bytes]],
    outcome: Outcome,
    clock: Clock,
) -> None:
    """Stamps each event as it comes in. Raises OSError or ReplyError."""
    status, tail = 0, b""
    async for status, body in pieces:
        now = clock()
        *lines, tail = (tail + body).split(b"\n") if status == 200 else (tail + body,)
        for line in lines:
            if line.startswith(b"data:"):
                outcome.take(line[5:], now)
    if status != 200:
        raise ReplyError(refusal(status, tail))


async def fetch_info(endpoint: Endpoint, timeout: float) -> dict[str, Any]:
    """The server's /info. Raises OSError or ReplyError."""
    status, text = 0, b""
    async with (
        asyncio.timeout(timeout),
        aclosing(talk(endpoint, endpoint.request("GET", "/info"))) as pieces,
    ):
        async for code, body in pieces:
            status, text = code, text + body
    if status != 200:
        raise ReplyError(f"GET /info is answered with {refusal(status, text)}")
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        raise ReplyError("GET /info is not answered with a JSON object") from None


def refusal(status: int, body: bytes) -> str:
    """An answer that is an error, in words."""
    try:
        return f"HTTP {status}: {_decode(body).error}"
    except msgspec.DecodeError:
        return f"HTTP {status}"


def reason(error: Exception) -> str:
    """An exception in words."""
    return str(error) or type(error).__name__
