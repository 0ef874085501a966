"""The socket of a server, and the line that it logs when it is ready."""

import hashlib
import signal
import socket
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from commands import cli
from server.errors import ResourceError
from server.serve import bind, in_words
from tests.support.fake_engine import READY
from tests.support.processes import DEADLINE, ServerProcess, engines, wait_until
from tests.support.wire import exchange, http_request

GIB = 2**30


def test_no_other_server_gets_an_address() -> None:
    with bind("127.0.0.1", 0) as one, pytest.raises(ResourceError, match="in use"):
        bind("127.0.0.1", one.getsockname()[1])


def test_an_address_is_free_once_its_server_has_ended_though_connections_linger() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0] as connection:
            connection.shutdown(socket.SHUT_RDWR)  # The server closes first, so that its side stays in TIME_WAIT.
    bind("127.0.0.1", port).close()


def test_the_start_up_line_names_what_computes() -> None:
    line = in_words(READY)
    assert line.startswith("hash, 0.0M parameters in float32 on cpu, by torch, not batch-invariant;")
    assert line.endswith("32 pages of 8, up to 64 tokens a sequence")


def test_of_a_gpu_it_names_the_card_its_free_memory_and_the_graphs() -> None:
    hardware = "NVIDIA H100 80GB HBM3 (compute capability 9.0, driver 580.95.05, CUDA 13.0)"
    line = in_words(replace(READY, device="cuda", hardware=hardware, device_memory=(7 * GIB, 79 * GIB), num_graphs=104))
    assert f" in float32 on {hardware}, by torch" in line
    assert line.endswith("up to 64 tokens a sequence; 7.0 of 79.0 GiB of GPU memory are free, 104 CUDA graphs")


def test_it_says_how_the_weights_of_a_gguf_file_are_held() -> None:
    line = in_words(replace(READY, quantization="int4+int8", block_forms={"int8": 57, "int4": 126}))
    assert "parameters as in the file (126 matrices in int4 blocks and 57 matrices in int8 blocks) on cpu, by torch" in line


def test_a_hangup_at_any_moment_of_the_start_ends_nothing_and_is_not_missed(tmp_path: Path, tiny_folder: Path) -> None:
    """Keys that are removed while the engine is loaded are not valid once the server is ready."""
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"old").hexdigest()
    keys.write_text(f'[[key]]\nname = "old"\nsha256 = "{digest}"\n')
    server = ServerProcess(tiny_folder, "--server.api_keys_file", str(keys), wait=False)
    try:
        wait_until(lambda: engines(server.process.pid), "an engine is started, so the keys have been read")
        keys.write_text("")
        server.process.send_signal(signal.SIGHUP)
        server.wait_started()
        wire = http_request("GET", "/v1/models", None, {"authorization": "Bearer old"})
        assert exchange(server.port, wire, DEADLINE)[0].status == 401
    finally:
        server.stop()


def test_a_hangup_is_ignored_from_the_first_line_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the options are imported, which takes most of a second."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setitem(sys.modules, "server.config", None)
    try:
        with pytest.raises(ImportError):
            cli.main(["serve"])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)
