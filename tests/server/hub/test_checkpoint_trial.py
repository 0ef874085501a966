"""A folder that would take too much time or memory to load is refused by its file, and this process
has not loaded it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.errors import ConfigurationError
from server.hub.checkpoint_trial import try_checkpoint
from tests.support.checkpoints import make_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_folder_that_can_be_loaded_passes(folder: Path) -> None:
    try_checkpoint(folder)


def test_files_that_have_passed_are_not_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    try_checkpoint(folder)
    with monkeypatch.context() as no_process:
        no_process.setattr("subprocess.Popen", None)
        try_checkpoint(folder)
    for name, key, value in (
        ("tokenizer_config.json", "chat_template", 7),
        ("tokenizer.json", "model", {}),
    ):
        before = (folder / name).read_bytes()
        edit(folder / name, lambda values, key=key, value=value: values.update({key: value}))  # type: ignore[misc]
        with pytest.raises(ConfigurationError, match=f"^{folder}/{name}: "):
            try_checkpoint(folder)
        (folder / name).write_bytes(before)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("tokenizer_config.json", "chat_template", 7),
        ("generation_config.json", "top_p", 0),
        (
            "tokenizer.json",
            "pre_tokenizer",
            {
                "type": "Split",
                "pattern": {"Regex": "(" * 10**5},
                "behavior": "Isolated",
                "invert": False,
            },
        ),
    ],
    ids=["template", "sampling", "pattern"],
)
def test_what_cannot_be_used_is_named(folder: Path, name: str, key: str, value: object) -> None:
    (folder / "generation_config.json").write_text("{}")
    edit(folder / name, lambda values: values.update({key: value}))
    with pytest.raises(ConfigurationError, match=f"^{folder}/{name}: "):
        try_checkpoint(folder)


@pytest.mark.parametrize(
    ("length", "words"),
    [(2**25, "cannot be loaded within 8 s"), (1000, "makes 1001 tokens of one letter")],
    ids=["32 MB", "1 kB"],
)
def test_a_normalizer_that_adds_text_is_refused(folder: Path, length: int, words: str) -> None:
    text = "xy z" * (length // 4)
    edit(
        folder / "tokenizer.json",
        lambda tokenizer: tokenizer.update(normalizer={"type": "Prepend", "prepend": text}),
    )
    with pytest.raises(ConfigurationError, match=rf"^{folder}/tokenizer\.json: {words}"):
        try_checkpoint(folder)
