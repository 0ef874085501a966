"""Claude Code and Codex, as people start them, with a server: their system prompts, their tools and
their second turn. The model's answers are random: what is tested is that the agents take them.

    python agents_suite.py URL, with the agents in PATH
"""

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from check import run

MODEL = "agents-model"
CODEX = """
model = "{model}"
model_provider = "onehead"
[model_providers.onehead]
name = "onehead"
base_url = "{url}/v1"
wire_api = "responses"
"""


def lines(folder: str, settings: dict[str, str], *command: str) -> list[Any]:
    """The JSON values that a command writes, one a line."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def claude_code(url: str) -> None:
    """Its second turn finds nearly all of its prompt in the cache."""
    with TemporaryDirectory() as folder:
        settings = {
            "HOME": folder,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        asked = ["claude", "--output-format", "json", "-p"]
        (first,) = lines(folder, settings, *asked, "Say hi")
        (second,) = lines(folder, settings, *asked, "Go on", "--continue")
    for turn in (first, second):
        assert turn["is_error"] is False and turn["result"], turn
    usage = second["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    share = usage["cache_read_input_tokens"] / total
    print(f"Claude Code's second turn: {total} tokens, {share:.1%} of them in the cache")
    assert total > 10_000 and share >= 0.95, usage


def codex(url: str) -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "config.toml").write_text(CODEX.format(model=MODEL, url=url), "utf-8")
        settings = {"CODEX_HOME": folder}
        asked = ["codex", "exec", "--json", "--skip-git-repo-check"]
        first = lines(folder, settings, *asked, "Say hi")
        second = lines(folder, settings, *asked, "resume", "--last", "Go on")
    for events in (first, second):
        assert [event["type"] for event in events][-1] == "turn.completed", events
        assert any(event.get("item", {}).get("type") == "agent_message" for event in events)
    # It adds up the turns of a conversation.
    total, cached = (
        second[-1]["usage"][name] - first[-1]["usage"][name]
        for name in ("input_tokens", "cached_input_tokens")
    )
    print(f"Codex's second turn: {total} tokens, {cached / total:.1%} of them in the cache")
    assert total > 5_000 and cached / total >= 0.95


PACKAGES = json.loads((Path(__file__).parent / "agents" / "package.json").read_text("utf-8"))
VERSIONS = ", ".join(f"{name} {version}" for name, version in PACKAGES["dependencies"].items())
run("agents", VERSIONS, [claude_code, codex])
