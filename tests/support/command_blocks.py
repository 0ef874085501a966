"""Fenced command blocks of a Markdown page, and the place where they are run.

A page's blocks run in order, in one temporary folder. A block that starts `onehead serve` leaves
that server running for the blocks after it; before the first such block, requests to localhost:8000
go to a server that all pages share. Invariant: what runs is the block's text; only the port, the
way to `onehead` and curl's reporting of failures are added. It knows nothing of what a page should
say.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
    """Runs the blocks of a page as its reader would, each page in a folder of its own below
    `folder`.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._root, self._shared_port = folder, port
        self._servers: dict[str, tuple[subprocess.Popen[str], int]] = {}
        """What a block starts -> the server and its port: pages that start the same one share
        it."""
        commands = folder / "bin"
        commands.mkdir()
        module, function = entry_point()
        program = f"import sys; from {module} import {function}; sys.exit({function}())"
        (commands / "onehead").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)} "$@"\n'
        )
        (commands / "onehead").chmod(0o755)
        self._environment = os.environ | {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "ONEHEAD_PORT": "0",
            "ONEHEAD_SERVER__LB_GRACE": "0",
        }
        self.take("start")

    def take(self, page: str) -> None:
        """Begins with another page, in a new folder, and with the server that pages share."""
        self._port = self._shared_port
        self._folder = self._root / page
        self._folder.mkdir()
        (self._folder / ".venv").symlink_to(sys.prefix)
        for name in ("configs", "model"):
            (self._folder / name).symlink_to(ROOT / name)

    def run(self, block: Block) -> str:
        """What the block prints. Fails where it does, and where a request is not answered with
        2xx.
        """
        text = block.text.replace("localhost:8000", f"localhost:{self._port}")
        if block.serves:
            self._port = self._serve(_SERVE.sub("exec onehead serve", text))
            return ""
        if block.language == "python":
            return self._done([sys.executable, "-W", "ignore", "-c", text])
        text = re.sub(r"^curl ", "curl -sS --fail-with-body ", text, flags=re.MULTILINE)
        return self._done(["bash", "-euo", "pipefail", "-c", text])

    def _done(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
            cwd=self._folder,
            env=self._environment,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _serve(self, text: str) -> int:
        """The port of the server that the text starts."""
        if text not in self._servers:
            server = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", text],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=self._folder,
                env=self._environment,
            )
            assert server.stdout is not None
            port = served_port(server.stdout.readline())
            if port is None:
                server.kill()
            assert port is not None, f"did not start: {text}"
            self._servers[text] = server, port
        return self._servers[text][1]

    def close(self) -> list[int]:
        """Stops the servers that blocks have started; their exit statuses."""
        for server, _ in self._servers.values():
            server.terminate()
        for server, _ in self._servers.values():
            server.communicate(timeout=DEADLINE)
        return [server.returncode for server, _ in self._servers.values()]
