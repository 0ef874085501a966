"""The own code of editors' clients against a real server: `python -m tests.clients.editors_suite
FOLDER`, which scripts/editors calls.

FOLDER holds what is there of llama.vim and llama.vscode (checkouts), continue-core (the package
@continuedev/core, unpacked) and node_modules. What is missing is skipped, and named. Each program
under tests/clients/editors prints what holds. Exit status 1 where something does not, or where the
server refused a request.
"""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from pathlib import Path
from threading import Thread

from tests.conftest import CHAT_TEMPLATE
from tests.support.paths import EMBEDDED
from tests.support.processes import ServerProcess
from tests.support.tool_checkpoints import make_tool_checkpoint

PROGRAMS = Path(__file__).parent / "editors"
SECONDS = 120


def in_terminal(command: list[str], environment: dict[str, str]) -> str:
    """Runs a program in a pseudo-terminal until it ends; what it has written."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    shown, end = b"", time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # The program has closed its side.
                break
    process.kill()
    process.wait()
    os.close(ours)
    return shown.decode(errors="replace")


def llama_vim(url: str, folder: Path) -> bool:
    """A completion that is accepted, the one after it, and an instruction."""
    checkout = folder / "llama.vim"
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        environment = os.environ | {
            "TERM": "xterm",
            "LLAMA_VIM": str(checkout),
            "SERVER": url,
            "RESULT": str(result),
        }
        vim = ["vim", "-N", "-u", "NONE", "-i", "NONE", "-n", "-S", str(PROGRAMS / "llama_vim.vim")]
        shown = in_terminal(vim, environment)
        found = (
            json.loads(result.read_text(encoding="utf-8"))
            if result.is_file()
            else {"messages": shown[-2000:]}
        )
    checks = {
        "completion": any(response["content"].strip() for response in found.get("responses", ())),
        "timings": all(
            response["timings/predicted_n"] >= 0 and "tokens_cached" in response
            for response in found.get("responses", ())
        ),
        "speculative completion": len(found.get("responses", ())) > 1,
        "acceptance": any(
            line.startswith("    ret") and len(line) > len("    ret")
            for line in found.get("completed", ())
        ),
        "instruction": found.get("instructed", [])[-1:] == ["print(add(1, 2))"]
        and found["instructed"] != found["completed"],
    }
    failed = [name for name, holds in checks.items() if not holds]
    print(
        f"llama.vim {version(checkout)}: {', '.join(checks)}: "
        f"{'failed: ' + ', '.join(failed) if failed else 'all hold'}"
    )
    if failed:
        print(json.dumps(found, indent=1), file=sys.stderr)
    return not failed


def version(checkout: Path) -> str:
    """The commit of a checkout, from its .git or from a file beside it."""
    beside = checkout.with_name(f"{checkout.name}.commit")
    if beside.is_file():
        return beside.read_text(encoding="utf-8").strip()[:7]
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "of an unknown commit"


def missing(folder: Path) -> Iterator[tuple[str, str]]:
    """(what is skipped, what it lacks)."""
    needs = {
        "llama.vim": ("llama.vim/autoload/llama.vim",),
        "llama.vscode": (
            "llama.vscode/src/llama-server.ts",
            "node_modules/axios",
            "node_modules/typescript",
        ),
        "@continuedev/core": ("continue-core/llm/llms/LlamaCpp.ts", "node_modules/typescript"),
        "@continuedev/openai-adapters": (
            "node_modules/@continuedev/openai-adapters/dist/index.js",
            "node_modules/typescript",
        ),
    }
    for name, paths in needs.items():
        lacking = [str(folder / path) for path in paths if not (folder / path).exists()]
        lacking += [
            command
            for command in (("vim", "curl") if name == "llama.vim" else ("node",))
            if shutil.which(command) is None
        ]
        if lacking:
            yield name, ", ".join(lacking)


def node(program: str, *arguments: str, folder: Path) -> bool:
    """Runs a program under node; whether all of it holds."""
    environment = os.environ | {"NODE_PATH": str(folder / "node_modules")}
    return (
        subprocess.run(
            ["node", str(PROGRAMS / program), *arguments],
            env=environment,
            timeout=SECONDS,
            check=False,
        ).returncode
        == 0
    )


class LoggedServer(ServerProcess):
    """A server whose log is kept."""

    def __init__(self, model: Path) -> None:
        super().__init__(model, "--engine.max_context", "1024", "--server.model_name", "embedded")
        self.url = f"http://127.0.0.1:{self.port}"
        self._log: list[str] = []
        self._reader = Thread(target=lambda: self._log.extend(self.process.stderr or ()))
        self._reader.start()

    def answered(self) -> list[str]:
        """Ends the server. Method, path and status of each request."""
        self.stop()
        self._reader.join()
        lines = (re.search(r"onehead\.access: (\S+ \S+ \d+)", line) for line in self._log)
        return [line[1] for line in lines if line]


def run(
    folder: Path, skipped: Container[str], server: LoggedServer, tools: LoggedServer
) -> list[bool]:
    """Runs what is not skipped; whether all of each client holds."""
    modules = str(folder / "node_modules")
    programs = {
        "llama.vim": lambda: llama_vim(server.url, folder),
        "llama.vscode": lambda: node(
            "llama_vscode.cjs", server.url, str(folder / "llama.vscode"), tools.url, folder=folder
        ),
        "@continuedev/core": lambda: node(
            "continue_core.cjs", server.url, str(folder / "continue-core"), folder=folder
        ),
        "@continuedev/openai-adapters": lambda: node(
            "continue_adapters.mjs", server.url, modules, folder=folder
        ),
    }
    return [program() for name, program in programs.items() if name not in skipped]


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    skipped = dict(missing(folder))
    for name, lacking in skipped.items():
        print(f"{name}: skipped, for there is no {lacking}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "embedded"
        shutil.copytree(EMBEDDED, model)
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        servers = (
            LoggedServer(model),
            LoggedServer(make_tool_checkpoint("functiongemma", Path(scratch) / "tools")),
        )
        try:
            held = run(folder, skipped, *servers)
        finally:
            answered = [line for server in servers for line in server.answered()]
    refused = [line for line in answered if not line.endswith(" 200")]
    print(
        f"{len(held)} clients were run, {len(skipped)} skipped; {len(refused)} of {len(answered)} "
        "requests were not answered with 200"
    )
    for line in refused:
        print(line)
    return int(not all(held) or bool(refused))


if __name__ == "__main__":
    sys.exit(main())
