"""scripts/gpu-bundle in a checkout of its own, with a pip that downloads nothing and writes down
what it is asked.
"""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# Its pip makes a file for each requirement, and fails where $REFUSE is one of them.
PYTHON = """#!/bin/sh
if [ "$1" != "-m" ]; then exec "$REAL_PYTHON" "$@"; fi
echo "$@" >>"$PIP_LOG"
seen=
for word in "$@"; do
  if [ "$seen" = --dest ]; then folder=$word; mkdir -p "$folder"; fi
  if [ "$seen" = --constraint ]; then grep '^numpy==' "$word" >>"$PIP_LOG"; fi
  if [ "$word" = "$REFUSE" ]; then
    echo "WARNING: slow" >&2; echo "ERROR: No matching distribution found for $word" >&2; exit 1
  fi
  seen=$word
done
echo wheel >"$folder/x.whl"
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tree = tmp_path / "tree"
    (tree / "scripts").mkdir(parents=True)
    for name in ("scripts/gpu-bundle", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, tree / name)
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "all"],
    ):
        subprocess.run(["git", *command], cwd=tree, check=True)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for name, value in (
        ("PYTHON", tmp_path / "python"),
        ("REAL_PYTHON", sys.executable),
        ("PIP_LOG", tmp_path / "pip.log"),
    ):
        monkeypatch.setenv(name, str(value))
    return tree


def bundle(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(tree / "scripts" / "gpu-bundle"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd=tree.parent
    )


def test_a_bundle_holds_the_commit_the_wheels_and_what_to_do(tree: Path, tmp_path: Path) -> None:
    (tree / "notes.txt").write_text("not committed")
    (tmp_path / "out").mkdir()
    done = bundle(tree, "out/bundle")
    assert done.returncode == 0, done.stderr
    assert "not in the bundle, as it is not committed:\n?? notes.txt" in done.stderr
    folder = tmp_path / "out" / "bundle"
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "onehead.tar.gz",
        "wheels",
        "wheels-http",
    }
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()
    with tarfile.open(folder / "onehead.tar.gz") as archive:
        names = archive.getnames()
        metadata = archive.extractfile("onehead/onehead-0.1.0.dist-info/METADATA")
        assert (
            metadata is not None
            and f"Version: 0.1.0+g{commit}" in metadata.read().decode().splitlines()
        )
    assert "onehead/pyproject.toml" in names and "onehead/notes.txt" not in names
    kernels, numpy, served, _ = (tmp_path / "pip.log").read_text().splitlines()
    assert (
        "--python-version 3.12 " in kernels
        and "manylinux_2_28_x86_64" in kernels
        and kernels.endswith(" msgspec numpy safetensors")
    )
    assert " fastapi>=" in served and " torch" not in served and numpy == "numpy==2.3.5"
    readme = (folder / "README.md").read_text()
    assert (
        commit in readme
        and len([line for line in readme.splitlines() if line.startswith("    ")]) == 4
    )


def test_another_host_s_wheels(tree: Path, tmp_path: Path) -> None:
    assert bundle(tree, "b", "--python", "3.13", "--machine", "aarch64").returncode == 0
    asked = (tmp_path / "pip.log").read_text()
    assert (
        "--python-version 3.13 " in asked
        and "manylinux_2_28_aarch64" in asked
        and "x86_64" not in asked
    )


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 2, "scripts/gpu-bundle DIR [--python 3.12]"),
        (("a", "b"), 2, "scripts/gpu-bundle DIR"),
        (("a", "--python"), 2, "scripts/gpu-bundle DIR"),
        (("a", "--quick"), 2, "scripts/gpu-bundle DIR"),
        (
            ("a", "--python", "3.10"),
            1,
            "gpu-bundle: --python 3.10: expected the host's version, like 3.12, from 3.11 on",
        ),
        (("a", "--python", "12"), 1, "--python 12: expected"),
        (("a", "--machine", "arm64"), 1, "gpu-bundle: --machine arm64: expected x86_64 or aarch64"),
        (
            ("tree",),
            1,
            "gpu-bundle: tree: is there already, and not an empty folder; name a new one",
        ),
        (("nowhere/a",), 1, "nowhere: no folder can be made there"),
    ],
)
def test_what_cannot_be_is_told(
    tree: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, words: str
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    done = bundle(tree, *arguments)
    assert done.returncode == status and words in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_wheel_that_is_not_there_is_named_and_nothing_is_left(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFUSE", "msgspec")
    done = bundle(tree, "b", "--python", "3.15")
    assert (
        done.returncode == 1
        and "ERROR: No matching distribution found for msgspec" in done.stderr
        and "slow" not in done.stderr
    )
    assert (
        "gpu-bundle: no wheels for Python 3.15 on x86_64: is the package index reached"
        in done.stderr
    )
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("b")]


def test_a_tree_without_git_is_told(tree: Path) -> None:
    shutil.rmtree(tree / ".git")
    done = bundle(tree, "b")
    assert (
        done.returncode == 1
        and "is no git checkout, and the source is taken from its last commit" in done.stderr
    )
