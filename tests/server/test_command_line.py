"""--help and usage errors of every command: no NUL bytes, a type word for each option, one default, and what is missing by name."""

import re

import pytest

from commands import cli

COMMANDS = [*([name] for name in cli.COMMANDS), ["bench", "--offline"]]
TYPE_WORDS = r"PATH|TEXT|N|NUMBER|SIZE|A,B,\.\.\.|N,N,\.\.\.|NUMBER,\.\.\.|\{[a-z0-9_]+(,[a-z0-9_]+)+\}"


def output(argv: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints that ends in argparse."""
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def entries(text: str) -> list[str]:
    """Each option of a --help, in one line."""
    return [" ".join(entry.split()) for entry in re.split(r"\n(?=  -)", text.split("\noptions:\n")[1].replace("\n\n", "\n  -\n"))][1:]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_option_has_a_type_word_and_one_default(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = output([*command, "--help"], 0, capsys)
    assert text.startswith(f"usage: onehead {' '.join(command)} [OPTIONS]") and "\0" not in text and "Loaded" not in text
    options = [entry for entry in entries(text) if entry.startswith("--")]
    assert len(options) >= 5
    for entry in options:
        assert re.match(rf"--[a-z_.]+ ({TYPE_WORDS}) |--([a-z_]+), --no-", entry), entry
        assert entry.count("default: ") + entry.count("(required)") == 1, entry
        assert re.search(r"\((required|default: [^\0]+)\)$", entry) and "None" not in entry, entry


def test_values_are_shown_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    serve = {entry.split()[0]: entry for entry in entries(output(["serve", "--help"], 0, capsys)) if entry.startswith("--")}
    assert serve["--cache.memory"].startswith("--cache.memory SIZE ") and serve["--cache.memory"].endswith(
        "(default: 0.4 on a CPU, 0.9 on a GPU)"
    )
    assert serve["--server.cors_origins"].startswith("--server.cors_origins A,B,... ")
    assert serve["--engine.deterministic"].endswith("(default: false)") and serve["--cache.pages"].endswith("(default: none)")
    assert "--memory SIZE " in output(["plan", "--help"], 0, capsys)
    assert "(default: 1,8,32)" in output(["bench", "--help"], 0, capsys)


@pytest.mark.parametrize(
    ("argv", "usage", "missing"),
    [
        (["batch"], "onehead batch [OPTIONS] INPUT OUTPUT", "INPUT, OUTPUT"),
        (["batch", "in.jsonl"], "onehead batch [OPTIONS] INPUT OUTPUT", "OUTPUT"),
        (["generate"], "onehead generate [OPTIONS] PROMPT", "PROMPT"),
        (["plan"], "onehead plan [OPTIONS] FOLDER", "FOLDER"),
        (["train"], "onehead train [OPTIONS] --output PATH", "--output"),
        (["compare"], "onehead compare [OPTIONS] --output PATH", "--output"),
        (["convert", "--output", "x"], "onehead convert [OPTIONS] --model PATH --output PATH", "--model"),
    ],
)
def test_what_is_missing_is_named(argv: list[str], usage: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(argv, 2, capsys)
    assert text == f"usage: {usage}\nonehead {argv[0]}: error: the following arguments are required: {missing}\n"
