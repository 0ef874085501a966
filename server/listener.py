"""Where the server listens: a TCP port, a Unix socket, or a socket that systemd holds.

systemd keeps its socket while the server is replaced: connections of that time wait in its queue,
and none is refused (sd_listen_fds(3)). It knows nothing of HTTP.
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from server.errors import ResourceError

UNIX = "unix:"
"""Begins the host of a Unix socket; its path follows."""
BACKLOG = 1024
_FIRST_GIVEN = 3
"""The descriptor at which systemd puts the first socket."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket, and whether another process holds it too."""

    socket: socket.socket
    is_shared: bool = False
    file: tuple[Path, int] | None = None
    """Of a Unix socket of its own: the path, and the number of the file there."""

    @property
    def address(self) -> str:
        """The IP address; empty for a Unix socket."""
        is_unix = self.socket.family is socket.AF_UNIX
        return "" if is_unix else str(self.socket.getsockname()[0])

    def url(self, scheme: str) -> str:
        """Where clients find it: a URL, or unix:PATH."""
        if not (host := self.address):
            return f"{UNIX}{self.socket.getsockname()}"
        port = self.socket.getsockname()[1]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def close(self) -> None:
        """Stops listening. Removes the socket's file, unless the next server has put its own
        there.
        """
        self.socket.close()
        if self.file is not None:
            path, number = self.file
            with suppress(OSError):
                if path.stat().st_ino == number:
                    path.unlink()


def listen(host: str, port: int) -> Listener:
    """The socket that systemd has given to this process, else one at this address. Raises
    ResourceError.
    """
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        return _given()
    if host.startswith(UNIX):
        path = Path(host.removeprefix(UNIX)).absolute()
        return Listener(_bound_to_file(path), file=(path, path.stat().st_ino))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol: asyncio sets TCP_NODELAY only on connections of such a socket, and without
    # it a response that is written in two parts waits 40 ms for an acknowledgement of the first.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        text = f"cannot listen on {host} port {port}: {error.strerror}"
        raise ResourceError(f"{text}; choose another with --port or --host") from None
    return Listener(found)


def _given() -> Listener:
    number = os.environ.get("LISTEN_FDS")
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)  # They are not for child processes.
    if number != "1":
        raise ResourceError(f"systemd gives {number} sockets; expected one ListenStream=")
    os.set_inheritable(_FIRST_GIVEN, False)
    found = socket.socket(fileno=_FIRST_GIVEN)
    if found.type is not socket.SOCK_STREAM:
        raise ResourceError("systemd gives a socket that is no stream; expected ListenStream=")
    return Listener(found, is_shared=True)


def _bound_to_file(path: Path) -> socket.socket:
    """Takes the place of a socket's file on which nobody listens any more."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with suppress(ConnectionRefusedError):
                found.connect(str(path))
                raise FileExistsError(0, "another process listens there")
            path.unlink()
        found.bind(str(path))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        reason = error.strerror or str(error)  # A path that is too long has no number.
        raise ResourceError(f"cannot listen on {UNIX}{path}: {reason}") from None
    return found
