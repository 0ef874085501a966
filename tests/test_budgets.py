"""The budgets hold, the light modules stay light, and the checks can fail."""

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import budgets
from tests.support.paths import ROOT


def test_budgets() -> None:
    assert budgets.problems() == []


def test_a_forbidden_import_is_found(tmp_path: Path) -> None:
    """A contract of pyproject.toml finds an import upward, inside a function, through a module
    between.
    """
    for package in ("commands", "server", "model", "cache", "bench", "tests"):
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.so", "pretrained"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "server" / "logs.py").open("a") as file:
        file.write("\n\ndef planted() -> None:\n    import model.step\n")
    checked = lint_imports(tmp_path)
    assert checked.returncode == 1
    assert "The API process imports no torch, model or engine BROKEN" in checked.stdout
    assert "server.logs -> model.step" in checked.stdout


def lint_imports(folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(folder)}
    program = str(Path(sys.executable).with_name("lint-imports"))
    return subprocess.run(
        [program, "--no-cache"],
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )


def test_a_forbidden_call_is_found() -> None:
    assert (
        list(
            budgets.call_problems("server.x", ast.parse("import torch\ntorch.load('x')\neval('1')"))
        )
        != []
    )
    assert list(budgets.call_problems("model.x", ast.parse("import os\nos.environ['A']"))) != []
    careful = ast.parse("torch.load(path, weights_only=True)")
    assert [*budgets.call_problems("model.checkpoint.weights", careful)] and not [
        *budgets.call_problems("commands.convert.convert", careful)
    ]
    assert (
        list(budgets.call_problems("commands.convert.convert", ast.parse("torch.load(path)"))) != []
    )


@pytest.mark.parametrize(
    "module",
    [
        "commands.cli",
        "server.serve",
        "commands.generate",
        "commands.options",
        "commands.bench.bench",
        "commands.bench.offline",
        "server.hub.download",
        "model.step",
        "model.checkpoint.families",
        "cache.table",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_does_not_import_torch_or_the_service() -> None:
    heavy = "{'torch', 'fastapi', 'pydantic'}"
    code = (
        f"import sys; from commands.cli import main; main(['--help']); sys.exit(bool({heavy} & "
        "set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL
        ).returncode
        == 0
    )


def test_tokens_are_counted_without_docstrings_comments_and_layout(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""A module."""\n\n\ndef f(a):  # A comment.\n    """Doc."""\n    return a\n')
    assert budgets.num_tokens(path, ast.parse(path.read_text())) == len(
        ["def", "f", "(", "a", ")", ":", "return", "a"]
    )


def test_a_folder_above_its_ceiling_is_found() -> None:
    counts = Counter({"server": 11, "server/new": 1, "cache": 5})
    assert budgets.excesses("Python tokens", counts, {"server": 10, "cache": 5}) == [
        "server has 11 Python tokens, more than 10",
        "server/new has 1 Python tokens, more than 0",
    ]


def test_ceilings_are_lowered_and_never_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ceilings.toml"
    path.write_text(
        '# Why.\n\n[tokens]\n"cache" = 9\n"gone" = 3\n"model" = 4\n\n[lines]\n"JSON" = 7\n\n[functions]\n'  # noqa: E501
    )
    monkeypatch.setattr(budgets, "CEILINGS", path)
    monkeypatch.setattr(budgets, "tokens", lambda: Counter({"cache": 5, "model": 6}))
    monkeypatch.setattr(budgets, "lines", lambda: Counter({"JSON": 7}))
    budgets.lower()
    assert (
        path.read_text()
        == '# Why.\n\n[tokens]\n"cache" = 5\n"model" = 4\n\n[lines]\n"JSON" = 7\n\n[functions]\n'
    )


def test_every_python_file_of_what_serves_counts() -> None:
    counted = budgets.tokens()
    for path in (
        "server/http",
        "model/checkpoint/families",
        "model/devices/gpu/attention",
        "cache",
    ):
        assert counted[path] > 1000
    assert budgets.lines()["C++"] > 1000
