"""AllowedHosts: which values of the Host header are answered, against DNS rebinding.

A web page may point its own host name at a loopback address, and its visitor's browser then sends
requests of that page to a server that only this machine can reach. Such requests name the page's
host. Invariant: where the server listens on a loopback address alone, none of them is answered. It
knows no routes.
"""

from collections.abc import Sequence

from starlette.types import Scope

from server.errors import HostNotAllowed
from server.http.client_address import parsed_address


class AllowedHosts:
    """The hosts in `allowed`, localhost and loopback addresses, on any port; all hosts, if
    `allowed` is empty and `address`, the one that the server listens on, is not a loopback address.
    """

    def __init__(self, allowed: Sequence[str], address: str) -> None:
        self._names = {"localhost", *map(str.lower, allowed)}
        self._checked = bool(allowed) or _is_loopback(address)

    def check(self, scope: Scope) -> None:
        """Raises HostNotAllowed where the request's Host header names another host. A request
        without that header, which HTTP/1.0 allows, cannot be a browser's and is let through.
        """
        for name, value in scope["headers"] if self._checked else ():
            if name == b"host" and not self._allows(value.decode("latin-1").lower()):
                shown = value[:100].decode("latin-1")
                raise HostNotAllowed(
                    f"this server does not answer to the host {shown!a}; to allow it, give its "
                    "name without the port to server.allowed_hosts",
                    code="host_not_allowed",
                )

    def _allows(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return name.removesuffix(".") in self._names or _is_loopback(name)


def _is_loopback(text: str) -> bool:
    address = parsed_address(text.partition("%")[0])
    return address is not None and address.is_loopback
