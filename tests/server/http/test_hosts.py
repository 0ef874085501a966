"""The Host header decides whether a request is answered, where a page of another host could reach
the server by DNS rebinding.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.errors import HostNotAllowed
from server.http.hosts import AllowedHosts
from tests.support.processes import ServerProcess
from tests.support.raw_http import Reply, exchange

LOOPBACK = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.9.9.9:80",
    "[::1]",
    "[::1]:8000",
    "[::ffff:127.0.0.1]:80",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "192.168.0.1",
    "[fe80::1]:80",
    "0.0.0.0",
    "",
    "x@localhost",
]
ROUTES = [
    "GET /",
    "GET /ui/app.js",
    "GET /live",
    "GET /metrics",
    "GET /v1/models",
    "POST /v1/completions",
    "POST /",
    "GET /nothing",
    "OPTIONS /generate",
]


def allows(hosts: AllowedHosts, host: str) -> bool:
    try:
        hosts.check({"headers": [(b"accept", b"*/*"), (b"host", host.encode("latin-1"))]})
    except HostNotAllowed:
        return False
    return True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "127.0.0.2"])
def test_a_loopback_server_answers_to_loopback_hosts(address: str) -> None:
    hosts = AllowedHosts((), address)
    assert [host for host in LOOPBACK if not allows(hosts, host)] == []
    assert [host for host in FOREIGN if allows(hosts, host)] == []
    hosts.check({"headers": []})  # HTTP/1.0: no browser sends it.


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.1.2.3", "fe80::1%eth0", ""])
def test_another_server_answers_to_all_unless_the_option_is_set(address: str) -> None:
    assert all(allows(AllowedHosts((), address), host) for host in [*LOOPBACK, *FOREIGN])
    chosen = AllowedHosts(("LLM.example", "10.1.2.3"), address)
    assert all(allows(chosen, host) for host in [*LOOPBACK, "llm.EXAMPLE:443", "10.1.2.3:8000"])
    assert not any(allows(chosen, host) for host in [*FOREIGN, "a.llm.example", "10.1.2.30"])


@pytest.fixture(scope="module")
def served(embedded_folder: Path) -> Iterator[ServerProcess]:
    digest = hashlib.sha256(b"key").hexdigest()
    options = ["--server.api_keys", digest, "--server.allowed_hosts", "llm.example"]
    with ServerProcess(embedded_folder, *options, "--cache.pages", "64") as server:
        yield server
        assert server.stop() == 0


@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_the_target_changes_nothing(served: ServerProcess, method: str) -> None:
    """Neither its query nor an authority in it, which no browser sends to a server."""
    for target in ("/live?a=http://localhost/", "http://localhost/live"):
        assert ask(served, f"{method} {target}", "evil.example").status == 403
        assert ask(served, f"{method} {target}", "LLM.example").status in (200, 405)


def ask(server: ServerProcess, route: str, host: str) -> Reply:
    reply = exchange(
        server.port,
        f"{route} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer key\r\nconnection: "
        "close\r\n\r\n".encode(),
    )
    assert reply is not None
    return reply


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_refuses_before_the_body(served: ServerProcess, route: str) -> None:
    for host in ("evil.example:8000", "192.168.0.1"):
        # The body that is announced never comes: the answer does not wait for it.
        reply = ask(
            served,
            route,
            f"{host}\r\ncontent-type: application/json\r\ncontent-length: 99"
            if "POST" in route
            else host,
        )
        assert reply.status == 403, reply
        assert b"server.allowed_hosts" in reply.body and host.encode() in reply.body
    for host in ("localhost", f"127.0.0.1:{served.port}", "LLM.example:443"):
        assert ask(served, route, host).status != 403
