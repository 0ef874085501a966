"""`onehead generate`: sampled as the checkpoint says, its text alone on standard output, and a chat
that remembers, whose answers Ctrl-C ends.
"""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import cli
from commands.generate import GenerateSettings
from server.config import load
from server.text.checkpoint_settings import CheckpointFiles
from tests.support.processes import DEADLINE, ServerProcess

SPEED = r"\d+ tokens, [\d.]+ tokens/s; first after [\d.]+ ms, prompt of \d+; finish reason: \w+\n"


def command(folder: Path, *options: str) -> list[str]:
    limits = "--cache.pages", "128", "--model", str(folder)
    return [sys.executable, "-m", "commands.cli", "generate", *limits, *options]


def run(folder: Path, *options: str, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *options),
        input=said,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({}, [], GREEDY),
        ({"eos_token_id": 0, "repetition_penalty": 1.1}, [], GREEDY | {"repetition_penalty": 1.1}),
        ({"do_sample": True}, [], {"temperature": 1.0}),
        (
            {"do_sample": True, "top_k": 64, "top_p": 0.95},
            [],
            {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        ),
        ({"temperature": 0.6, "min_p": 0.1}, [], {"temperature": 0.6, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6}, [], GREEDY),
        (
            {"do_sample": False, "temperature": 0.6},
            ["--top_p", "0.5"],
            {"temperature": 0.6, "top_p": 0.5},
        ),
        ({"temperature": 0.6, "top_k": 5}, ["--temperature", "0"], GREEDY | {"top_k": 5}),
        ({}, ["--top-k", "5"], {"temperature": 1.0, "top_k": 5}),
        (
            {"top_k": 5},
            ["--top_k", "0", "--repetition-penalty", "2"],
            {"top_k": 0, "repetition_penalty": 2.0},
        ),
    ],
)
def test_it_draws_as_the_checkpoint_says_unless_told(
    config: dict[str, Any], options: list[str], expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    settings = load(GenerateSettings, ["x", "--seed", "7", *options], "onehead generate")
    sampling = settings.sampling(CheckpointFiles(tmp_path))
    assert {name: getattr(sampling, name) for name in expected} == expected and sampling.seed == 7
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: getattr(sampling, name) for name in plain} == plain | expected


def test_a_seeded_text_is_that_of_the_server_and_speed_goes_to_standard_error(
    embedded_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(embedded_folder, tmp_path / "sampled"))
    config = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
    }
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps(config))
    done = run(folder, "def f(", "--max_new_tokens", "12", "--seed", "3")
    server = ServerProcess(folder, "--cache.pages", "128")
    body = {"prompt": "def f(", "max_tokens": 12, "seed": 3}
    _, answer = server.post("/v1/completions", body)
    assert server.stop() == 0
    assert done.stdout == f"def f({answer['choices'][0]['text']}\n"
    assert re.fullmatch(SPEED, done.stderr) and "prompt of 3; finish reason: length" in done.stderr


@pytest.mark.parametrize(
    ("options", "status", "told"),
    [
        ([], 2, "onehead generate: expected a PROMPT, or --chat\n"),
        (["--chat"], 2, "has no chat template; give a PROMPT without it\n"),
        (["x", "--top_p", "0"], 78, "top_p: Input should be greater than 0"),
    ],
)
def test_what_cannot_be_done_is_told_before_an_engine_starts(
    options: list[str],
    status: int,
    told: str,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("commands.generate.running_engine", None)
    assert cli.main(["generate", "--model", str(tiny_folder), *options]) == status
    assert told in capsys.readouterr().err


def test_a_chat_from_a_pipe_remembers_and_refuses_what_is_too_long(embedded_folder: Path) -> None:
    options = "--chat", "--max_new_tokens", "6", "--engine.max_context", "128"
    both = run(embedded_folder, *options, said=f"import os\n\n{'x = 1 ' * 200}\nimport re\n")
    assert both.returncode == 2 and "prompt must have less than 128 tokens" in both.stderr
    first, second = re.findall(r"prompt of (\d+);", both.stderr)
    assert int(second) > int(first) + 6
    again = run(embedded_folder, *options, "import os")
    assert again.returncode == 0 and both.stdout.startswith(again.stdout)
    assert again.stdout.endswith("\n") and "> " not in both.stdout


def test_in_a_terminal_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(
    embedded_folder: Path, request: pytest.FixtureRequest
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(embedded_folder, "--chat", "--temperature", "1", "--seed", "1"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""

    request.addfinalizer(lambda: (process.kill(), process.wait(), os.close(ours)))

    def read_until(pattern: bytes) -> bytes:
        nonlocal shown
        while re.search(pattern, shown) is None:
            shown += os.read(ours, 4096)
        found, shown = shown, b""
        return found

    read_until(rb"> ")
    os.write(ours, b"import os\n")
    read_until(rb"(?s)import os\r\n.*\w")
    process.send_signal(signal.SIGINT)
    assert b"finish reason: cancelled" in read_until(rb"finish reason.*\n.*> ")
    os.write(ours, b"import re\n")
    read_until(rb"(?s)import re\r\n.*\w")
    process.send_signal(signal.SIGINT)
    read_until(rb"finish reason.*\n.*> ")
    os.write(ours, b"\x04")
    assert process.wait(DEADLINE) == 0
