"""Where a server listens: ports, Unix sockets, and sockets that systemd holds."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from server.errors import ResourceError
from server.listener import listen
from tests.support.paths import ROOT
from tests.support.processes import START_SECONDS
from tests.support.wire import Wire, http_request

TIMEOUT = 60.0
QUESTION = http_request("POST", "/generate", {"inputs": "def f(", "parameters": {"seed": 1}})
SERVE = f"exec {sys.executable} -m commands.cli serve --server.lb_grace 0"


def test_no_other_server_gets_an_address() -> None:
    with closing(listen("127.0.0.1", 0)) as one, pytest.raises(ResourceError, match="in use"):
        listen("127.0.0.1", one.socket.getsockname()[1])


def test_an_address_is_free_once_its_server_has_ended_though_connections_linger() -> None:
    with closing(listen("127.0.0.1", 0)) as listener:
        address = listener.socket.getsockname()
        with socket.create_connection(address), listener.socket.accept()[0] as connection:
            # The server closes first, so that its side stays in TIME_WAIT.
            connection.shutdown(socket.SHUT_RDWR)
    listen(*address).close()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a file")
    for path, reason in ((file, "in use"), (tmp_path / "none/s", "No such"), ("x" * 200, "long")):
        with pytest.raises(ResourceError, match=f"cannot listen on unix:.*{reason}"):
            listen(f"unix:{path}", 0)
    assert file.read_text() == "a file"


@contextmanager
def server(command: str, *descriptors: int) -> Iterator[subprocess.Popen[str]]:
    """A server that a shell starts, once it has said where it listens."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        pass_fds=descriptors,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=START_SECONDS)
        assert process.returncode == 0


def ask(path: Path) -> tuple[socket.socket, Wire]:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT)
    connection.connect(str(path))
    connection.sendall(QUESTION)
    return connection, Wire(connection)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))  # By a server that was killed.
    with server(f"{SERVE} --host unix:{path}") as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith(f" on unix:{path}\n")
        connection, wire = ask(path)
        with connection:
            response = wire.response("POST")
            assert response.status == 200 and b"generated_text" in response.body()
        with pytest.raises(ResourceError, match="another process listens there"):
            listen(f"unix:{path}", 0)
    assert not path.exists()


def test_no_connection_is_refused_while_systemd_restarts_a_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(path))
        held.listen(8)
        number = held.fileno()
        command = f"exec 3<&{number}; LISTEN_PID=$$ LISTEN_FDS=1 {SERVE}"
        answers = []
        with server(command, number) as process:
            assert process.stdout is not None
            assert process.stdout.readline().endswith(f" on unix:{path}\n")
            connection, wire = ask(path)
            with connection:
                answers.append(wire.response("POST").body())
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_SECONDS) == 0
        waiting, wire = ask(path)
        with waiting, server(command, number):
            answers.append(wire.response("POST").body())
        assert answers[0] == answers[1]
    assert path.exists(), "the file is systemd's"
