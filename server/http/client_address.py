"""The address of a request's client: the peer's, or the one that trusted proxies report in
X-Forwarded-For.

Invariant: what a client wrote into X-Forwarded-For itself is never believed: each proxy appends the
address of its own peer, so the entries are read from the right, and only as long as the address so
far is that of a trusted proxy. It knows no keys.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from starlette.types import Scope

Network = IPv4Network | IPv6Network
MAX_PROXIES = 16
"""Entries of X-Forwarded-For that are looked at, from the right; a chain of proxies is shorter."""
CLIENT_PREFIX = 64
"""Bits of an IPv6 address that count as one client: a host may choose the others itself."""


def client_address(scope: Scope, trusted: Sequence[Network]) -> str:
    """The address of the client; the rightmost untrusted one where the peer is a trusted proxy."""
    address = scope["client"][0] if scope.get("client") else ""
    forwarded = (
        [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
        if trusted
        else []
    )
    for entry in reversed(",".join(forwarded).rsplit(",", MAX_PROXIES)[-MAX_PROXIES:]):
        known, next_one = parsed_address(address), parsed_address(entry)
        if known is None or next_one is None or not any(known in network for network in trusted):
            break
        address = str(next_one)
    return address


def client_group(address: str) -> str:
    """The client that an address counts as: itself, or its network where it is an IPv6 address."""
    known = parsed_address(address)
    return (
        str(IPv6Network((known, CLIENT_PREFIX), strict=False))
        if isinstance(known, IPv6Address)
        else str(known or address)
    )


def parsed_address(text: str) -> IPv4Address | IPv6Address | None:
    """An address, which some proxies write with its port; None for any other text."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
