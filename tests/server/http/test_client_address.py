"""X-Forwarded-For is believed only of trusted proxies, from the right; IPv6 addresses of one
network are one client.
"""

import hashlib
import logging
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest

from server import logs
from server.http.client_address import client_address, client_group
from tests.server.http.test_routes import make

DIGEST = hashlib.sha256(b"key").hexdigest()
TRUSTED = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def scope(peer: str | None, *forwarded: str) -> dict[str, Any]:
    headers = [(b"x-forwarded-for", value.encode("latin-1")) for value in forwarded]
    return {"client": peer and (peer, 1234), "headers": [(b"host", b"x"), *headers]}


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("1.2.3.4", [], "1.2.3.4"),
        ("1.2.3.4", ["5.6.7.8"], "1.2.3.4"),  # Not a proxy: it may write what it likes.
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["5.6.7.8"], "5.6.7.8"),
        (
            "10.0.0.1",
            ["9.9.9.9, 5.6.7.8"],
            "5.6.7.8",
        ),  # The first was written by the client itself.
        ("10.0.0.1", ["9.9.9.9", "5.6.7.8, 10.0.0.2"], "5.6.7.8"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["5.6.7.8, nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["nonsense, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["5.6.7.8:443"], "5.6.7.8"),
        # The client wrote the first ones itself, and as many as a head may hold.
        ("10.0.0.1", ["10.0.0.2," * 3200 + "5.6.7.8"], "5.6.7.8"),
        (
            "10.0.0.1",
            ["5.6.7.8, " + ", ".join(f"10.0.0.{number}" for number in range(1, 16))],
            "5.6.7.8",
        ),
        (
            "10.0.0.1",
            ["5.6.7.8, " + ", ".join(f"10.0.0.{number}" for number in range(1, 17))],
            "10.0.0.1",
        ),
        ("10.0.0.1", ["5.6.7.8"] + ["10.0.9.9"] * 3200, "10.0.9.9"),
        ("fd00::1", ["[2001:db8::7]:443"], "2001:db8::7"),
        ("::ffff:10.0.0.1", ["5.6.7.8"], "5.6.7.8"),
        ("a socket's path", ["5.6.7.8"], "a socket's path"),
        (None, ["5.6.7.8"], ""),
    ],
)
def test_the_rightmost_address_that_is_not_trusted(
    peer: str | None, forwarded: list[str], expected: str
) -> None:
    assert client_address(scope(peer, *forwarded), TRUSTED) == expected


def test_nothing_is_believed_where_no_proxy_is_trusted() -> None:
    assert client_address(scope("10.0.0.1", "5.6.7.8"), ()) == "10.0.0.1"


def test_addresses_that_one_host_may_choose_among_are_one_client() -> None:
    assert client_group("2001:db8::7") == client_group("2001:db8::ffff:1") == "2001:db8::/64"
    assert client_group("2001:db8:0:1::7") != client_group("2001:db8::7")
    assert client_group("::ffff:1.2.3.4") == client_group("1.2.3.4") == "1.2.3.4"
    assert client_group("testclient") == "testclient" and client_group("") == ""


@pytest.mark.parametrize(
    ("trusted", "keys", "address", "client"),
    [
        ((), (), "10.0.0.1", "10.0.0.1"),
        (("10.0.0.0/8",), (), "2001:db8::7", "2001:db8::/64"),
        (("10.0.0.0/8",), (DIGEST,), "2001:db8::7", DIGEST),
    ],
)
async def test_the_access_line_and_the_admission_are_given_the_same_client(
    trusted: Any,
    keys: Any,
    address: str,
    client: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = await make(tmp_path, trusted_proxies=trusted, api_keys=keys)
    reserved = []
    reserve = served.client.reserve
    monkeypatch.setattr(
        served.client, "reserve", lambda *given: reserved.append(given) or reserve(*given)
    )
    transport = httpx.ASGITransport(served.app, client=("10.0.0.1", 1))
    headers = {"authorization": "Bearer key", "x-forwarded-for": "2001:db8::7"}
    with caplog.at_level("INFO", logger="onehead.access"):
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=headers
        ) as http:
            assert (
                await http.post(
                    "/generate", json={"inputs": "def", "parameters": {"max_new_tokens": 2}}
                )
            ).status_code == 200
    assert [given[:2] for given in reserved] == [(keys[0] if keys else "", client)]
    assert f" client={address} " in caplog.text


@pytest.mark.parametrize(
    "path",
    [
        "/" + "x" * 30_000,
        "/" + "%01" * 10_000,
        "/%F0%9F%98%80" * 2_000,
        "/v1/streams/" + "y" * 30_000,
    ],
)
@pytest.mark.parametrize("form", [logs.TextFormatter, logs.JsonFormatter])
async def test_the_access_line_is_short_whatever_the_path(
    path: str, form: type[logging.Formatter], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = await make(tmp_path, api_keys=(DIGEST,))
    with caplog.at_level("INFO", logger="onehead.access"):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(served.app), base_url="http://test"
        ) as http:
            assert (await http.get(path)).status_code == 401
    (line,) = (
        form().format(record) for record in caplog.records if record.name == "onehead.access"
    )
    assert len(line) < 5_000 and ("yy" not in line)
