"""Answers as they pass through: events kept whole, the metrics of all replicas as one exposition,
and the errors of the ingress.

It does no I/O, and knows neither Ray nor what events say. The errors have the forms of the server's
own, so that clients need not know who answered.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

OPENAI_PATHS = frozenset(
    {
        *("/infill", "/completion", "/fim/completions", "/apply-template", "/props", "/detokenize"),
        *("/embedding", "/embeddings", "/rerank", "/classify"),
    }
)
"""Paths outside of /v1 whose errors have OpenAI's form too."""
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")


async def whole_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, cut between events, so that what has been passed on of a stream is always
    whole.
    """
    rest = b""
    async for piece in pieces:
        events, end, rest = (rest + piece).rpartition(b"\n\n")
        if end:
            yield events + end
    if rest:
        yield rest


def server_url(server: str, path: str) -> str:
    """The URL of a path on a server. A path that does not begin with a slash would else go on with
    the port, or make what comes before it a user's name of another host.
    """
    return f"{server}/{path.removeprefix('/')}"


def labelled(expositions: Mapping[str, str]) -> str:
    """One Prometheus exposition of several, by the replica that each is of, which every sample gets
    as the label `replica`.
    """
    families: dict[str, list[str]] = {}
    for replica, text in expositions.items():
        family: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ")[2], [line])
            elif line.startswith("# "):
                family += [line] * (len(family) == 1)  # The type, once.
            elif sample := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, (sample[2], f'replica="{replica}"')))
                family.append(f"{sample[1]}{{{labels}}} {sample[3]}")
    return "".join(f"{line}\n" for family in families.values() for line in family)


def openai(path: str) -> bool:
    """Whether the errors of a path, with its query or without, have OpenAI's form."""
    return path.startswith("/v1/") or path.partition("?")[0] in OPENAI_PATHS


def error_body(
    path: str, message: str, status: int, code: str, tgi_type: str, openai_type: str
) -> dict[str, Any]:
    """An error in the dialect of a path."""
    if openai(path):
        return {
            "error": {
                "message": message,
                "type": openai_type,
                "param": None,
                "code": code or status,
            }
        }
    return {"error": message, "error_type": tgi_type}


def expired() -> bytes:
    """The body of 410 for a resumable stream whose replica has ended."""
    message = "the server of that stream has ended; send the request again"
    return json.dumps(
        error_body("/v1/", message, 410, "stream_expired", "validation", "NotFoundError")
    ).encode()


def unavailable(path: str) -> bytes:
    """The body of 503 where no replica takes a request."""
    message = "no server can take this request now; send it again later"
    return json.dumps(
        error_body(path, message, 503, "", "healthcheck", "Service Unavailable")
    ).encode()


def too_large(path: str, limit: int) -> bytes:
    """The body of 413 for a request whose body has more bytes than `limit`."""
    message = f"the body is longer than {limit} bytes (max_body_bytes)"
    return json.dumps(error_body(path, message, 413, "", "validation", "BadRequestError")).encode()


def lost(path: str) -> bytes:
    """The last events of a stream whose server has ended before it."""
    message = "the server of this stream has ended; send the request again"
    event = json.dumps(
        error_body(path, message, 500, "server_lost", "generation", "InternalServerError")
    )
    done = "data: [DONE]\n\n" if openai(path) else ""
    return f"data: {event}\n\n{done}".encode()
