"""Types of options that are written as text, and how they are read. It knows no options."""

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AnyUrl, BeforeValidator, Field, ValidationError
from pydantic_settings import NoDecode
from typing_extensions import TypeAliasType

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def _parse_memory(value: object) -> object:
    """'2GiB' or '500MB' to bytes; numbers pass through."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"must be a share up to 1.0, or bytes like 2GiB or 500MB; got {value!r}")
    return float(match[1]) * _UNITS[match[2].upper()]


def _parse_words(value: object) -> object:
    """'a,b' to ('a', 'b'); lists pass through. An empty text is refused: it usually comes from a
    shell variable that is not set.
    """
    if not isinstance(value, str):
        return value
    words = tuple(word.strip() for word in value.split(",") if word.strip())
    if not words:
        raise ValueError("is empty; leave the option out if you do not need it")
    return words


def _parse_network(value: object) -> object:
    try:
        return ip_network(str(value))
    except ValueError as error:
        raise ValueError(
            f"must be addresses such as 10.0.3.7 or networks such as 10.0.3.0/28: {error}"
        ) from None


def _check_origin(value: str) -> str:
    """Refuses what no browser sends as the origin of a page."""
    try:
        written = str(AnyUrl(value)).removesuffix("/")
    except ValidationError:
        written = ""
    is_bare = re.fullmatch("[^*@/]+://[^*@/]+", value) and value == written and value.islower()
    if not is_bare and value not in ("*", "null", "file://"):
        raise ValueError(
            f"{value!r} is the origin of no page; browsers send a scheme and a host in lower case, "
            "a port unless it is the scheme's own, and nothing else: https://app.example:8443. "
            "* alone stands for every page"
        )
    return value


def _check_digest(value: str) -> str:
    """The message does not repeat the value: it may be the key itself."""
    if re.fullmatch("[0-9A-Fa-f]{64}", value) is None:
        raise ValueError(
            "must be SHA-256 digests, 64 hex digits each; `printf %s KEY | sha256sum` makes one "
            "of a key"
        )
    return value.lower()


Seconds = Annotated[float, Field(gt=0, le=3600)]
File = Annotated[Path, AfterValidator(Path.absolute)]
"""A file that is read again while the server runs, when the working directory may be gone."""
Digest = Annotated[str, AfterValidator(_check_digest)]
Size = TypeAliasType("Size", Annotated[float, BeforeValidator(_parse_memory)])
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_parse_words)]
Origin = Annotated[str, AfterValidator(_check_origin)]
Origins = Annotated[tuple[Origin, ...], NoDecode, BeforeValidator(_parse_words)]
Network = Annotated[IPv4Network | IPv6Network, BeforeValidator(_parse_network)]
Networks = Annotated[tuple[Network, ...], NoDecode, BeforeValidator(_parse_words)]
Digests = Annotated[tuple[Digest, ...], NoDecode, BeforeValidator(_parse_words)]
