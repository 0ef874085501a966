"""configs/: every preset loads, says why each of its lines is there, and gives an engine where it
names no GPU; the image has them all.
"""

import re
import tomllib
from pathlib import Path

import pytest

from commands.bench.offline import OfflineSettings, load_engine
from server.config import ServeSettings, load
from tests.support.paths import CONFIGS, ROOT

PRESETS = sorted(CONFIGS.glob("*.toml"))
NAMES = {"laptop", "gpu-host", "low-memory", "deterministic", "production"}


def test_all_of_them_are_listed() -> None:
    readme = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in PRESETS} == NAMES
    assert all(f"({path.name})" in readme for path in PRESETS)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_loads(path: Path) -> None:
    settings = load(ServeSettings, ["--config", str(path)], "onehead serve")
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    assert settings.engine.max_running == values.get("engine", {}).get("max_running")
    assert settings.host == values.get("host", "127.0.0.1")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_each_line_says_why(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        assert not re.match(r"\w", line) or re.search(r" # .{10,}\.$", line), line


@pytest.mark.parametrize("name", ["laptop", "low-memory", "deterministic"])
def test_a_preset_without_a_gpu_serves_the_embedded_model(name: str) -> None:
    settings = load(
        OfflineSettings,
        ["--config", str(CONFIGS / f"{name}.toml"), "--engine.threads", "1"],
        "onehead bench --offline",
    )
    _, ready = load_engine(settings)
    # The cache holds the longest request.
    assert ready.device == "cpu" and ready.capacity == ready.max_context
    assert ready.deterministic or name != "deterministic"


def test_the_image_is_built_from_files_that_are_sent_to_it() -> None:
    sent = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = re.findall(
        r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    )
    sources = {source for line in copied for source in line.split()}
    assert {"commands", "server", "model", "cache", "configs"} <= sources <= sent
