"""The budgets hold, the light modules stay light, and the checks can fail."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import budgets


def test_budgets() -> None:
    assert budgets.problems() == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("cache.pages", "import torch"),
        ("model.decoder", "from server import config"),
        ("server.api.app", "def f():\n    import torch"),
        ("server.text", "from server.engine import core"),
        ("server.engine.scheduler", "import time"),
        ("model.families.gpt_bigcode", "import pickle"),
        ("model.backends.cpu", "from model.backends.reference import create"),
        ("model.backends.cpu", "from model.backends.triton import plan"),
        ("model.backends.triton.plan", "from model.backends import cpu"),
        ("cache.pages", "from server import config"),
        ("model.families.gpt_bigcode", "from server import errors"),
        ("server.engine.scheduler", "import uvicorn"),
        ("model.runner", "from model.reference import masking"),
        ("model.runner", "from model.tools import train"),
        ("server.generation", "from model.step import Row"),
        ("server.bench", "from server import offline"),
        ("server.engine.core", "from server import offline"),
        ("server.offline", "def f():\n    import torch"),
    ],
)
def test_a_forbidden_import_is_found(name: str, source: str) -> None:
    assert list(budgets.import_problems(name, ast.parse(source)))


def test_a_forbidden_call_is_found() -> None:
    assert list(budgets.call_problems("server.x", ast.parse("import torch\ntorch.load('x')\neval('1')"))) != []
    assert list(budgets.call_problems("model.x", ast.parse("import os\nos.environ['A']"))) != []
    careful = ast.parse("torch.load(path, weights_only=True)")
    assert [*budgets.call_problems("model.weights", careful)] and not [*budgets.call_problems("model.tools.convert", careful)]
    assert list(budgets.call_problems("model.tools.convert", ast.parse("torch.load(path)"))) != []


@pytest.mark.parametrize(
    "module",
    [
        "server.cli",
        "server.serve",
        "server.terminal",
        "server.bench",
        "server.offline",
        "server.hub",
        "model.step",
        "model.families",
        "cache.table",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_does_not_import_torch_or_the_service() -> None:
    heavy = "{'torch', 'fastapi', 'pydantic'}"
    code = f"import sys; from server.cli import main; main(['--help']); sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_tokens_are_counted_without_docstrings_comments_and_layout(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""A module."""\n\n\ndef f(a):  # A comment.\n    """Doc."""\n    return a\n')
    assert budgets.num_tokens(path, ast.parse(path.read_text())) == len(["def", "f", "(", "a", ")", ":", "return", "a"])


def test_what_serves_is_found_through_imports_inside_functions() -> None:
    trees = {name: ast.parse("") for name in ("server", *budgets.SERVING_ROOTS, "model", "model.a", "model.b", "model.c")}
    trees["server.serve"] = ast.parse("def f():\n    from model import a")
    trees["model.a"] = ast.parse("import model.b")
    assert {"model.a", "model.b"} <= budgets.serving_modules(trees) and "model.c" not in budgets.serving_modules(trees)
