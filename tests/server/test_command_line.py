"""--help and usage errors of every command: no NUL bytes, a type word for each option, one default,
and what is missing by name.
"""

import re
from pathlib import Path

import pytest

from commands import cli
from commands.generate import GenerateSettings
from commands.options import ConvertOptions, PlanOptions, TrainOptions, load_options
from server.command_line import OTHER_NAMES
from server.config import EMBEDDED_MODEL, ServeSettings, _names, load
from tests.support.paths import ROOT

COMMANDS = [*([name] for name in cli.COMMANDS), ["bench", "--offline"]]
TYPE_WORDS = (
    r"PATH|TEXT|N|NUMBER|SIZE|A,B,\.\.\.|N,N,\.\.\.|NUMBER,\.\.\.|\{[a-z0-9_]+(,[a-z0-9_]+)+\}"
)


def output(argv: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints that ends in argparse."""
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def entries(text: str) -> list[str]:
    """Each option of a --help, in one line."""
    return [
        " ".join(entry.split())
        for entry in re.split(
            r"\n(?=  -)", text.split("\noptions:\n")[1].replace("\n\n", "\n  -\n")
        )
    ][1:]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_option_has_a_type_word_and_one_default(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = output([*command, "--help"], 0, capsys)
    assert (
        text.startswith(f"usage: onehead {' '.join(command)} [OPTIONS]")
        and "\0" not in text
        and "Loaded" not in text
    )
    options = [entry for entry in entries(text) if entry.startswith("--")]
    assert len(options) >= 5
    for entry in options:
        assert re.match(rf"--[a-z_.]+ ({TYPE_WORDS}) |--([a-z_]+), --no-", entry), entry
        assert entry.count("default: ") + entry.count("(required)") == 1, entry
        assert re.search(r"\((required|default: [^\0]+)\)$", entry) and "None" not in entry, entry


def test_values_are_shown_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    serve = {
        entry.split()[0]: entry
        for entry in entries(output(["serve", "--help"], 0, capsys))
        if entry.startswith("--")
    }
    assert serve["--cache.memory"].startswith("--cache.memory SIZE ") and serve[
        "--cache.memory"
    ].endswith("(default: 0.4 on a CPU, 0.9 on a GPU)")
    assert serve["--server.cors_origins"].startswith("--server.cors_origins A,B,... ")
    assert serve["--engine.deterministic"].endswith("(default: false)") and serve[
        "--cache.pages"
    ].endswith("(default: none)")
    assert "--memory SIZE " in output(["plan", "--help"], 0, capsys)
    assert "(default: 1,8,32)" in output(["bench", "--help"], 0, capsys)


@pytest.mark.parametrize(
    ("argv", "usage", "missing"),
    [
        (["batch"], "onehead batch [OPTIONS] INPUT OUTPUT", "INPUT, OUTPUT"),
        (["batch", "in.jsonl"], "onehead batch [OPTIONS] INPUT OUTPUT", "OUTPUT"),
        (["train"], "onehead train [OPTIONS] --output PATH", "--output"),
        (["compare"], "onehead compare [OPTIONS] --output PATH", "--output"),
        (["convert", "--output", "x"], "onehead convert [OPTIONS] --model PATH", "--model"),
    ],
)
def test_what_is_missing_is_named(
    argv: list[str], usage: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(argv, 2, capsys)
    assert (
        text == f"usage: {usage}\nonehead {argv[0]}: error: the following arguments are required: "
        f"{missing}\n"
    )


def test_a_checkpoint_to_plan_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(["plan"], 2, capsys)
    assert (
        text
        == "usage: onehead plan [OPTIONS] MODEL\nonehead plan: error: one of the arguments MODEL "
        "--model is required\n"
    )


def serve_settings(*argv: str) -> ServeSettings:
    return load(ServeSettings, list(argv), "onehead serve")


@pytest.mark.parametrize(
    "argv",
    [
        ("x",),
        ("--model", "x"),
        ("--model=x",),
        ("--port", "1", "x"),
        ("x", "--port", "1"),
        ("--", "x"),
    ],
)
def test_the_checkpoint_by_position_or_by_name(argv: tuple[str, ...]) -> None:
    assert serve_settings(*argv).given == "x"
    assert load_options(
        PlanOptions, [each for each in argv if each not in ("--port", "1")], "onehead plan"
    ).model == Path("x")


def test_the_checkpoint_may_come_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve_settings().model == EMBEDDED_MODEL
    monkeypatch.setenv("ONEHEAD_MODEL", "y")
    assert serve_settings().given == "y" and serve_settings("x").given == "x"


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_the_checkpoint_by_position_and_by_name_is_an_error(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["x", "--model", "y"], ["--model", "y", "x"]):
        assert "not allowed with argument" in output([command, *argv], 2, capsys)


def test_generate_takes_its_prompt_by_position_and_any_model() -> None:
    settings = load(
        GenerateSettings,
        ["--model", "x", "--max-new-tokens", "3", "--no such option, but a text"],
        "onehead generate",
    )
    assert (settings.given, settings.prompt, settings.max_new_tokens) == (
        "x",
        "--no such option, but a text",
        3,
    )


@pytest.mark.parametrize(
    ("argv", "section", "name", "value"),
    [
        (("--server.log-level", "debug"), "server", "log_level", "debug"),
        (("--server.log_level=debug",), "server", "log_level", "debug"),
        (("--engine.max-running=7",), "engine", "max_running", 7),
        (("--cache.page-size", "16"), "cache", "page_size", 16),
        (("--server.model-name", "my-model"), "server", "model_name", "my-model"),
    ],
)
def test_hyphens_are_as_good_as_underscores(
    argv: tuple[str, ...], section: str, name: str, value: object
) -> None:
    assert getattr(getattr(serve_settings(*argv), section), name) == value


def test_hyphens_of_flags_without_a_section() -> None:
    options = load_options(
        ConvertOptions, ["--model", "x", "--output", "y", "--no_evaluate"], "onehead convert"
    )
    assert not options.evaluate
    assert (
        load_options(TrainOptions, ["--output", "x", "--fim-rate", "0.5"], "onehead train").fim_rate
        == 0.5
    )


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["serve", "--engine.max_runing", "1"],
            "no such option --engine.max_runing; did you mean --engine.max_running?",
        ),
        (
            ["serve", "--engine.max-runing=1"],
            "no such option --engine.max-runing; did you mean --engine.max_running?",
        ),
        (
            ["serve", "--max-running", "1"],
            "no such option --max-running; did you mean --engine.max_running?",
        ),
        (["serve", "--prot", "1"], "no such option --prot; did you mean --port?"),
        (
            ["generate", "x", "--server.max_waiting", "1"],
            "no such option --server.max_waiting; --help lists all",
        ),
        (
            ["plan", "x", "--page-sise", "1"],
            "no such option --page-sise; did you mean --page_size?",
        ),
        (["convert", "--no-evaluat"], "no such option --no-evaluat; did you mean --no-evaluate?"),
        (["serve", "--qqqqqqqqqqqq"], "no such option --qqqqqqqqqqqq; --help lists all"),
        (
            ["serve", "--max-model-len", "9"],
            "no such option --max-model-len; here it is --engine.max_context",
        ),
        (
            ["serve", "--max_total_tokens=9"],
            "no such option --max_total_tokens; here it is --engine.max_context",
        ),
        (["serve", "-c", "9"], "no such option -c; here it is --engine.max_context"),
        (["serve", "--dtype", "half"], "no such option --dtype; here it is --engine.dtype"),
        (
            ["batch", "--num-shard", "2"],
            "no such option --num-shard; here it is a server for each GPU",
        ),
        # Where a command has no such option, another server's is none either.
        (["plan", "x", "--max-model-len", "9"], "no such option --max-model-len; --help lists all"),
        (
            ["bench", "--served-model-name", "x"],
            "no such option --served-model-name; --help lists all",
        ),
    ],
)
def test_a_misspelt_option_is_one_line_with_the_nearest_name(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(argv, 2, capsys)
    assert text.startswith(f"onehead {argv[0]}: {line}") and text.count("\n") == 1


def options_of_others(page: Path) -> list[tuple[str, str]]:
    """(option, cell beside it) of the table of options of a page for those who come from another
    server.
    """
    table = page.read_text().split("## Options\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    found = re.compile(r"`(--?[a-z][\w-]*)")
    return [(option, ours) for theirs, ours in rows for option in found.findall(theirs)]


PAGES = sorted((ROOT / "docs" / "guides").glob("moving-from-*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_that_a_guide_translates_is_translated_by_the_command(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {option for option in options_of_others(page) if option[0] not in ("--host", "--port")}
    assert len(known) >= 10
    for theirs, ours in known:
        said = output(["serve", theirs, "1"], 2, capsys)
        assert said.startswith(f"onehead serve: no such option {theirs}; here it is "), theirs
        named = re.search(r"here it is (--[\w.]+)", said)
        assert named is None or named[1] in ("--model",) or named[1] in ours, (said, ours)


def test_every_name_that_is_told_is_an_option() -> None:
    told = [line.split(" = ") for line in OTHER_NAMES.strip().splitlines()]
    names = [f"--{name}" for name in _names(ServeSettings)]
    assert len(told) > 30
    for ours, theirs in told:
        assert not ours.startswith("--") or re.split("[ ,]", ours)[0] in names, ours
        assert not {f"--{name}" for name in theirs.split()} & set(names), theirs
    every = [name for _, theirs in told for name in theirs.split()]
    assert len(every) == len(set(every))
