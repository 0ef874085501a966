"""The sockets of a server: no two servers have one address, whichever of them listens yet."""

import socket
from contextlib import ExitStack

import pytest

from server.errors import ResourceError
from server.serve import bind, bind_several


@pytest.mark.parametrize("listening", [False, True])
def test_no_other_server_gets_an_address_whose_shared_sockets_may_not_listen_yet(listening: bool) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(each) for each in bind_several("127.0.0.1", 0, 2)]
        port = sockets[0].getsockname()[1]
        for each in sockets if listening else ():
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As WebServer does.
            each.listen()
        with pytest.raises(ResourceError, match="in use"):
            bind_several("127.0.0.1", port, 2)
        with pytest.raises(ResourceError, match="in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("before", [1, 2])
def test_an_address_is_free_once_its_server_has_ended_though_connections_linger(before: int) -> None:
    sockets = [bind("127.0.0.1", 0)] if before == 1 else bind_several("127.0.0.1", 0, before)
    port = sockets[0].getsockname()[1]
    for each in sockets[1:]:
        each.close()
    sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As WebServer does when it begins to listen.
    sockets[0].listen()
    with socket.create_connection(("127.0.0.1", port)), sockets[0].accept()[0] as connection:
        connection.shutdown(socket.SHUT_RDWR)  # The server closes first, so that its side stays in TIME_WAIT.
    sockets[0].close()
    with bind("127.0.0.1", port):
        pass
    for each in bind_several("127.0.0.1", port, 2):
        each.close()
