"""Fenced command blocks of a Markdown page, and the place where they are run.

A page's blocks run in order, in one temporary folder. A block that starts `onehead serve` leaves that server
running for the blocks after it; before the first such block, requests to localhost:8000 go to a server that
all pages share. Invariant: what runs is the block's text; only the port, the way to `onehead` and curl's
reporting of failures are added. It knows nothing of what a page should say.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.generate_reference import entry_point
from tests.support.paths import ROOT
from tests.support.processes import DEADLINE, served_port

LANGUAGES = {"bash", "sh", "shell", "console", "python"}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REASON = re.compile(r"<!-- not run here: (.+) -->\n\Z")
_SERVE = re.compile(r"^(?:scripts/serve|onehead serve)\b", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block that a reader would run."""

    language: str
    text: str
    reason: str | None
    """Why it cannot run here; None where it runs."""

    @property
    def serves(self) -> bool:
        return self.language != "python" and _SERVE.search(self.text) is not None


def blocks(page: str) -> list[Block]:
    """The command blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(page):
        if match[1] in LANGUAGES:
            reason = _REASON.search(page[: match.start()])
            found.append(Block(match[1], match[2], reason[1] if reason else None))
    return found


class Reader:
    """Runs the blocks of one page as its reader would."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self._server: subprocess.Popen[str] | None = None
        commands = folder / "bin"
        commands.mkdir()
        module, function = entry_point()
        program = f"import sys; from {module} import {function}; sys.exit({function}())"
        (commands / "onehead").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)} "$@"\n')
        (commands / "onehead").chmod(0o755)
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "model").symlink_to(ROOT / "model")
        self._environment = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "ONEHEAD_PORT": "0",
            "ONEHEAD_SERVER__LB_GRACE": "0",
        }

    def run(self, block: Block) -> str:
        """What the block prints. Fails where it does, and where a request is not answered with 2xx."""
        text = block.text.replace("localhost:8000", f"localhost:{self._port}")
        if block.serves:
            self._serve(_SERVE.sub("exec onehead serve", text))
            return ""
        if block.language == "python":
            return self._done([sys.executable, "-W", "ignore", "-c", text])
        text = re.sub(r"^curl ", "curl -sS --fail-with-body ", text, flags=re.MULTILINE)
        return self._done(["bash", "-euo", "pipefail", "-c", text])

    def _done(self, command: list[str]) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE, check=False, cwd=self._folder, env=self._environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _serve(self, text: str) -> None:
        self.close()
        self._server = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=self._folder,
            env=self._environment,
        )
        assert self._server.stdout is not None
        port = served_port(self._server.stdout.readline())
        assert port is not None, f"did not start: {text}"
        self._port = port

    def close(self) -> None:
        """Stops the server of the page, if it started one."""
        if self._server is not None:
            self._server.terminate()
            self._server.communicate(timeout=DEADLINE)
            if self._server.returncode != 0:
                pytest.fail(f"the server ended with {self._server.returncode}")
            self._server = None
