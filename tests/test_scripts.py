"""scripts/setup and scripts/serve in a copy of what they read, with a Python and a pip that install
nothing and write down what they are asked.
"""

import os
import pty
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from scripts.build_wheels import AS_CLANG, EXTENSIONS, kernels_of
from server.config import Section, ServeSettings
from tests.support.paths import ROOT

# Makes a .venv whose Python is the script beside it; anything else is the real Python's.
PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$STUBS/venv-python" "$3/bin/python"; else exec "$REAL_PYTHON" "$@"; fi
"""  # noqa: E501
# Knows torch's version where there is one; its pip writes down its arguments and leaves a kernel.
VENV_PYTHON = """#!/bin/sh
case "$1" in
  -c) case "$2" in *urlopen*) exit $UNREACHABLE ;; *) [ -n "$TORCH" ] && echo "$TORCH" ;; esac ;;
  -m)
    [ "$3" = config ] && exit 1
    echo "$@" >>pip.log; echo "pip says something"
    : >model/devices/cpu/native/kernels_stub.so
    ;;
esac
"""
TORCH = next(
    line.split("==")[1]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the scripts read, and the stubs first on PATH."""
    tree, stubs = tmp_path / "tree", tmp_path / "stubs"
    for name in (
        "scripts/setup",
        "scripts/serve",
        "server/config.py",
        "server/command_line.py",
        "pyproject.toml",
        "constraints.txt",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / "model" / "devices" / "cpu" / "native").mkdir(parents=True)
    for name in ("product.cpp", "rows.h"):
        shutil.copy2(
            ROOT / "model" / "devices" / "cpu" / "native" / name,
            tree / "model" / "devices" / "cpu" / "native",
        )
    stubs.mkdir()
    for name, text in (("python3", PYTHON), ("venv-python", VENV_PYTHON)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    monkeypatch.setenv("STUBS", str(stubs))
    monkeypatch.setenv("REAL_PYTHON", shutil.which("python3") or "python3")
    monkeypatch.setenv("PATH", f"{stubs}:{os.environ['PATH']}")
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setenv("UNREACHABLE", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tree


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def run_on_a_terminal(*command: str | Path) -> str:
    """What a command writes whose standard error is a terminal."""
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # How a terminal of which nothing is left ends.
        pass
    os.close(ours)
    return written.decode()


def _add_gpu(tree: Path) -> None:
    (tree.parent / "stubs" / "nvidia-smi").touch(mode=0o755)


def test_a_machine_without_a_gpu_gets_torch_for_cpus(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists():
        pytest.skip("a machine with a GPU")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    first = run(tree / "scripts" / "setup").stderr.splitlines()[0]
    assert "about 0.4 GB to download, with PyTorch for CPUs" in first
    of_torch, of_onehead = (tree / "pip.log").read_text().splitlines()
    assert of_torch.endswith(f"--index-url https://download.pytorch.org/whl/cpu torch=={TORCH}")
    assert "--no-deps" in of_torch and "--index-url" not in of_onehead
    # Where that index cannot be reached, or the owner has chosen one, pip takes torch from its own.
    (tree / ".venv" / ".onehead-train").unlink()
    monkeypatch.setenv("UNREACHABLE", "1")
    done = run(tree / "scripts" / "setup")
    assert done.returncode == 0 and "whl/cpu cannot be reached" in done.stderr
    (tree / ".venv" / ".onehead-train").unlink()
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    assert "from the index in pip's settings" in run(tree / "scripts" / "setup").stderr
    assert (tree / "pip.log").read_text().count("--index-url") == 1


def test_set_up_says_what_it_fetches_before_and_that_it_is_done_after(tree: Path) -> None:
    _add_gpu(tree)
    done = run(tree / "scripts" / "setup")
    first, _, last = done.stderr.splitlines()  # Between them stands pip's own output.
    assert done.returncode == 0 and done.stdout == ""
    assert first.startswith(
        "installing onehead into .venv: about 3 GB to download, with PyTorch for CUDA; this takes"
    )
    assert last.startswith("installed onehead in ") and "--quiet" in (tree / "pip.log").read_text()
    assert "--editable .[train]" in (tree / "pip.log").read_text()  # For the pictures of commands.
    again = run(tree / "scripts" / "setup")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "") and (
        tree / "pip.log"
    ).read_text().count("install") == 1


@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (TORCH + "+cpu", f"torch {TORCH}+cpu is there already; at most 0.2 GB"),
        ("1.0.0", "about 3 GB to download"),
        ("", "about 3 GB to download"),
    ],
)
def test_a_torch_that_is_kept_is_not_counted(
    tree: Path, monkeypatch: pytest.MonkeyPatch, torch: str, words: str
) -> None:
    subprocess.run(["python3", "-m", "venv", tree / ".venv"], check=True)
    _add_gpu(tree)
    monkeypatch.setenv("TORCH", torch)
    first = run(tree / "scripts" / "setup", "dev").stderr.splitlines()[0]
    assert first.startswith(
        f"installing onehead with [dev] into .venv: {words}"
    ) and first.endswith("; this takes minutes")


def test_on_a_terminal_pip_shows_its_progress(tree: Path) -> None:
    written = run_on_a_terminal(tree / "scripts" / "setup")
    assert "pip says something" in written and "--quiet" not in (tree / "pip.log").read_text()


def options() -> list[str]:
    found = []
    for name, field in ServeSettings.model_fields.items():
        section = field.annotation
        names = (
            section.model_fields
            if isinstance(section, type) and issubclass(section, Section)
            else None
        )
        found += [f"--{name}"] if names is None else [f"--{name}.{option}" for option in names]
    return found


def test_every_option_passes_and_a_misspelt_one_is_told_before_set_up(tree: Path) -> None:
    (tree / "scripts" / "setup").write_text("#!/bin/sh\nexit 3\n")
    serve = tree / "scripts" / "serve"
    assert len(options()) > 40
    every = [text for option in options() for text in (option, "x")]
    for arguments in (
        every,
        [f"{option}=--x" for option in options()],
        [f"--{option[2:].replace('_', '-')}=x" for option in options()],
        ["/path/to/checkpoint", "--port", "80"],
        ["--server", "{}"],  # A whole section as JSON, which the library takes.
        ["--help"],
        ["-h"],
        ["--server.model_name", "--a name"],
        ["--port", "-1"],
        ["--"],
    ):
        assert run(serve, *arguments).returncode == 3, arguments
    for misspelt in (
        "--engine.max_runing",
        "--engin.max_running",
        "--max_running",
        "--engine.port",
        "--Model",
        "--.*",
        "--by_position",
    ):
        for arguments in ([misspelt, "1"], [f"{misspelt}=1"], ["--port", "80", misspelt]):
            done = run(serve, *arguments)
            assert (done.returncode, done.stderr) == (
                2,
                f"scripts/serve: {misspelt}: no such option; --help lists them\n",
            )

    for theirs, ours in (
        ("--max-model-len", "--engine.max_context"),
        ("--api-key", "--server.api_keys, of digests"),
        ("-ngl", "--engine.device cuda"),
        ("-m", "--model"),
        ("--trust-remote-code", "never done: code of a checkpoint is not run"),
    ):
        for arguments in ([theirs, "1"], [f"{theirs}=1"], ["--port", "80", theirs]):
            done = run(serve, *arguments)
            told = f"scripts/serve: {theirs}: no such option; here it is {ours}\n"
            assert (done.returncode, done.stderr) == (2, told)


def test_a_wheel_has_the_project_file_without_extensions_and_its_own_kernels() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    whole, project = tomllib.loads(text), tomllib.loads(EXTENSIONS.sub("", text))
    own_of = {"x86_64": {"avx512", "avx512bw", "avxvnni", "avx2"}, "aarch64": {"i8mm", "dotprod"}}
    for architecture, names in own_of.items():
        own = {kernel["name"].rpartition("_")[2] for kernel in kernels_of(architecture, whole)}
        assert own == names | {"portable"}
    kernels = whole["tool"]["setuptools"].pop("ext-modules")
    assert project == whole and 'model = ["pretrained/*"]' in text
    assert AS_CLANG.keys() <= {flag for kernel in kernels for flag in kernel["extra-compile-args"]}


def test_the_lock_has_the_tested_versions_of_all_that_is_needed() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    locked = [line.partition(" ")[0].lower() for line in lines if "==" in line.split(" ")[0]]
    tested = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    assert set(locked) <= set(tested) and len(locked) < sum("--hash=sha256:" in x for x in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[\[>]", each)[0].replace("_", "-") for each in project["dependencies"]}
    assert needed - {name.partition("==")[0] for name in locked} == {"torch"}
