"""What a real server writes: JSON alone where that is asked for, how it loads, and who asked for
how many tokens at which speed.
"""

import hashlib
import http.client
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ServerProcess, wait_until

KEY = "of the editor"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


@pytest.fixture(scope="module")
def written(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of both outputs of a server with JSON logs, that was asked for a completion,
    probes, a missing route and its keys again.
    """
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[[key]]\nname = "editor"\nsha256 = "{DIGEST}"\n')
    server = ServerProcess(
        tiny_folder, "--server.log_format", "json", "--server.api_keys_file", str(keys)
    )

    def ask() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps({"prompt": "def f", "max_tokens": 20, "ignore_eos": True, "n": 2})
        connection.request(
            "POST",
            "/v1/completions",
            body,
            {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
        )
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    assert ask() == 200
    for path in ("/live", "/ready", "/health", "/metrics"):
        assert server.get(path)[0] == 200
    keys.write_text("[[key]]")
    server.process.send_signal(signal.SIGHUP)
    server.process.send_signal(signal.SIGHUP)  # A second one is no reason to end streams either.
    assert ask() == 200
    keys.write_text("")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: ask() == 401, "the key is no longer valid")
    server.process.send_signal(signal.SIGTERM)
    out, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 0
    # No line of another kind among them.
    return [json.loads(line) for line in (server.first_line + out + errors).splitlines()]


def test_the_line_that_says_where_is_json_too(written: list[dict[str, Any]]) -> None:
    (line,) = (line for line in written if line["message"].startswith("onehead serves "))
    assert line["level"] == "info" and line["time"]


def test_loading_says_what_it_loads_and_how_long_it_takes(
    written: list[dict[str, Any]], tiny_folder: Path
) -> None:
    said = [line["message"] for line in written if line["level"] == "info"]
    (loading,) = (message for message in said if message.startswith("loading weights, "))
    size = int(loading.split()[2])
    assert 0.9 * size <= (tiny_folder / "model.safetensors").stat().st_size and loading.endswith(
        " bytes"
    )
    assert [
        message
        for message in said
        if message.startswith("loading weights took ") and message.endswith(" s")
    ]


def test_the_access_line_names_client_key_tokens_and_speeds(written: list[dict[str, Any]]) -> None:
    lines = [line for line in written if line["logger"] == "onehead.access"]
    first = lines[0]
    assert (first["path"], first["status"], first["client"], first["key"]) == (
        "/v1/completions",
        200,
        "127.0.0.1",
        "editor",
    )
    assert (first["prompt_tokens"], first["output_tokens"]) == (5, 40)
    assert first["ttft_ms"] > 0 and first["tokens_per_second"] > 0
    assert (
        f"client=127.0.0.1 key=editor prompt_tokens=5 output_tokens=40 ttft_ms={first['ttft_ms']}"
        in first["message"]
    )
    refused = lines[-1]
    assert refused["status"] == 401 and "key" not in refused and "output_tokens" not in refused
    assert {line["path"] for line in lines} == {"/v1/completions"}  # Probes are at the level debug.
    assert not any(KEY in str(line) or DIGEST in str(line) for line in written)


def test_keys_that_cannot_be_read_again_are_one_error_each(written: list[dict[str, Any]]) -> None:
    errors = [line["message"] for line in written if line["level"] == "error"]
    assert 1 <= len(errors) <= 2 and all(
        "the API keys stay as they were" in message for message in errors
    )


def test_a_refusal_to_start_is_json_too(tiny_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "commands.cli",
        "serve",
        "--model",
        str(tiny_folder),
        "--port",
        "0",
        "--server.log_format",
        "json",
    ]
    done = subprocess.run(
        [*command, "--server.api_keys_file", "/nowhere/keys.toml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78 and done.stdout == ""
    (line,) = (json.loads(line) for line in done.stderr.splitlines())
    assert line["level"] == "error" and "/nowhere/keys.toml" in line["message"]
