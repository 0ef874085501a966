"""HTTPS by server.tls_certificate and server.tls_key: served, read again on SIGHUP, and refused by
name where the files cannot be used.

The certificates in tests/support/certificates are self-signed, for localhost, and valid for a
hundred years.
"""

import json
import shutil
import signal
import socket
import ssl
from pathlib import Path

import pytest

from commands import cli
from server.errors import ConfigurationError
from server.http.tls import check_certificate, reload_certificate
from tests.support.paths import ROOT
from tests.support.processes import ServerProcess, wait_until
from tests.support.wire import Wire, http_request

FILES = ROOT / "tests" / "support" / "certificates"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate and its key that a test may change."""
    return use("first", tmp_path / "tls.crt", tmp_path / "tls.key")


def use(name: str, certificate: Path, key: Path) -> tuple[Path, Path]:
    shutil.copy(FILES / f"{name}.crt", certificate)
    shutil.copy(FILES / f"{name}.key", key)
    return certificate, key


def connected(port: int, trusted: str) -> ssl.SSLSocket:
    """A connection of a client that trusts this certificate only."""
    context = ssl.create_default_context(cafile=FILES / f"{trusted}.crt")
    return context.wrap_socket(
        socket.create_connection(("127.0.0.1", port), timeout=20), server_hostname="localhost"
    )


def presented(port: int) -> str:
    """The certificate that a new connection is shown."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=20)


def test_it_is_served_and_read_again_without_ending_a_stream(
    tiny_folder: Path, pair: tuple[Path, Path]
) -> None:
    files = "--server.tls_certificate", str(pair[0]), "--server.tls_key", str(pair[1])
    server = ServerProcess(
        tiny_folder, *files, constants={"server.http.connection.HEAD_SECONDS": 1}
    )
    try:
        assert server.first_line.rstrip().endswith(f"on https://127.0.0.1:{server.port}")
        body = {
            "inputs": "a",
            "parameters": {"max_new_tokens": 400, "ignore_eos": True},
            "stream": True,
        }
        address = "127.0.0.1", server.port
        # The second begins no handshake.
        with (
            connected(server.port, "first") as connection,
            socket.create_connection(address, timeout=20) as silent,
        ):
            connection.sendall(http_request("POST", "/generate", body))
            response = Wire(connection).response()
            assert response.status == 200
            events = response.events()
            next(events)
            use("second", *pair)
            server.process.send_signal(signal.SIGHUP)
            wait_until(
                lambda: presented(server.port) == (FILES / "second.crt").read_text(),
                "the second certificate",
            )
            shutil.copy(FILES / "first.key", pair[1])  # Of another certificate: it is not taken.
            server.process.send_signal(signal.SIGHUP)
            *_, last = events
            assert json.loads(last.data or "")["index"] == 400
            assert silent.recv(1) == b"", "a handshake takes as long as a head may"
        assert presented(server.port) == (FILES / "second.crt").read_text()
        with connected(server.port, "second") as connection:
            connection.sendall(http_request("GET", "/ready"))
            assert Wire(connection).response().status == 200
        with socket.create_connection(address, timeout=20) as plain:
            plain.sendall(http_request("GET", "/ready"))
            assert plain.recv(100) == b"", "no HTTP"
    finally:
        assert server.stop() == 0
    said = server.process.communicate()[1]
    assert "SIGHUP: the TLS certificate was read again" in said and "Traceback" not in said
    assert "SIGHUP: the TLS certificate stays as it was: " in said and "KEY_VALUES_MISMATCH" in said


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("none.crt", "first.key", "in PEM .*No such file or directory: .*none.crt"),
        ("first.crt", "none.key", "in PEM .*No such file or directory: .*none.key"),
        ("first.crt", "second.key", "KEY_VALUES_MISMATCH"),
        ("first.key", "first.key", "expected a certificate and its key, both in PEM"),
        ("first.crt", "first.crt", "expected a certificate and its key, both in PEM"),
        (
            "first.crt",
            "encrypted.key",
            "server.tls_key .*encrypted.key: is encrypted; a key without a password is needed",
        ),
        ("", "first.key", "in PEM .*Is a directory: .*certificates"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(
    certificate: str, key: str, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_certificate(FILES / certificate, FILES / key)


def test_a_refusal_ends_the_start_with_one_line(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        "--server.tls_certificate",
        str(FILES / "first.crt"),
        "--server.tls_key",
        str(FILES / "second.key"),
    ]
    assert cli.main(["serve", "--model", str(tiny_folder), "--port", "0", *files]) == 78
    assert "KEY_VALUES_MISMATCH" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["tls_certificate", "tls_key"])
def test_one_without_the_other_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", f"--server.{option}", str(FILES / "first.crt")]) == 78
    assert "server: tls_certificate and tls_key are needed together" in capsys.readouterr().err


def test_a_certificate_that_does_not_fit_leaves_the_live_one(pair: tuple[Path, Path]) -> None:
    live = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    live.load_cert_chain(*pair)
    shutil.copy(FILES / "second.crt", pair[0])
    reload_certificate(live, *pair)
    client, server = (ssl.MemoryBIO(), ssl.MemoryBIO()), None
    context = ssl.create_default_context(cafile=FILES / "first.crt")
    ours = context.wrap_bio(client[0], client[1], server_hostname="localhost")
    server = live.wrap_bio(client[1], client[0], server_side=True)
    for _ in range(4):
        for side in (ours, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert ours.getpeercert(True) == ssl.PEM_cert_to_DER_cert((FILES / "first.crt").read_text())
