"""README's requests are answered as they stand there, and the first one shows text that does not repeat itself."""

import json
import re
import subprocess

import pytest

from tests.support.paths import ROOT
from tests.support.processes import ServerProcess

README = (ROOT / "README.md").read_text()
REQUESTS = [block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "curl" in block and " -d '" in block]


def answered(server: ServerProcess, command: str) -> str:
    """What the command prints. Fails where the status is not 2xx."""
    command = command.replace("localhost:8000", f"localhost:{server.port}").replace("curl ", "curl -sS --fail-with-body ")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_requests() -> None:
    assert len(REQUESTS) >= 3


@pytest.mark.parametrize("command", REQUESTS, ids=range(len(REQUESTS)))
def test_a_request_is_answered(command: str, embedded_server: ServerProcess) -> None:
    assert answered(embedded_server, command)


def test_the_first_request_looks_well(embedded_server: ServerProcess) -> None:
    events = [json.loads(line.removeprefix("data:")) for line in answered(embedded_server, REQUESTS[0]).splitlines() if line]
    lines = [line.strip() for line in events[-1]["generated_text"].splitlines() if line.strip()]
    assert len(lines) >= 4 and len(set(lines)) >= 0.7 * len(lines), lines
