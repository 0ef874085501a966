"""Perplexity against `transformers`' loss on the same windows, and how `onehead plan` tells it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from commands import cli, perplexity
from model.checkpoint.families import read_spec
from model.spec import OptionError
from server.text.codec import TextCodec
from tests.support.checkpoints import TinyCheckpoint, make_tokenizer
from tests.support.families import FamilyCheckpoint
from tests.support.paths import MODELS


@torch.inference_mode()
def oracle_perplexity(oracle: Any, windows: list[list[int]]) -> float:
    """exp of the mean of `transformers`' losses, each weighted by its tokens."""
    losses = [
        oracle(torch.tensor([window]), labels=torch.tensor([window])).loss.double().item()
        * (len(window) - 1)
        for window in windows
    ]
    return math.exp(sum(losses) / sum(len(window) - 1 for window in windows))


# The second is more than a step, and more than the model's sliding window.
@pytest.mark.parametrize("length", [32, 301])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_perplexity_is_that_of_transformers(
    length: int,
    quantization: str,
    family_checkpoint: Callable[[str, int], FamilyCheckpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("commands.perplexity.STEP_TOKENS", 37)
    made = family_checkpoint("gemma3_text", 0)
    spec = read_spec(made.folder)
    length = min(length, spec.max_positions)
    ids = torch.randint(
        0, made.vocab_size, (3 * length - 5,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    windows = [ids[first : first + length] for first in range(0, len(ids), length)]
    computed: list[int] = []
    found = perplexity.perplexity(
        perplexity.load(made.folder, spec, "cpu", "float32", quantization, length),
        windows,
        computed.append,
    )
    assert sum(computed) == len(ids)
    expected = oracle_perplexity(made.oracle, windows)
    assert found == pytest.approx(expected, rel=1e-5 if quantization == "none" else 0.2)
    assert quantization == "none" or abs(found / expected - 1) > 1e-5


def test_windows_hold_each_token_once_and_open_as_prompts_do(
    tiny_folder: Path, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "def f(x):\n    return x * 2\n" * 9
    plain, opened = (TextCodec(folder) for folder in (tiny_folder, tmp_path))
    ids = plain.encode(text)
    windows = perplexity.windows_of(plain, text, 40)
    assert [id for window in windows for id in window] == ids and {
        len(window) for window in windows[:-1]
    } == {40}
    # The same token as an end of sequence is no opening; as a beginning it is.
    opened.end_token_ids = ()
    windows = perplexity.windows_of(opened, text, 40)
    assert [id for window in windows for id in window[1:]] == ids and {
        window[0] for window in windows
    } == {0}
    assert {len(window) for window in windows[:-1]} == {40} and sum(
        map(perplexity.num_scored, windows)
    ) == len(ids)
    with pytest.raises(OptionError, match="the text has 1 tokens, expected at least 2"):
        perplexity.windows_of(plain, "x", 40)


def test_the_built_in_text_is_long_enough_with_and_without_its_prose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = perplexity.built_in_text()
    assert (
        15_000 < len(whole) < 20_000 and "identifier" in whole.lower() and "import _socket" in whole
    )
    monkeypatch.setattr("commands.perplexity.PROSE", "no_such_module")
    assert 8_000 < len(perplexity.built_in_text()) < 10_000


def test_plan_measures_every_form(
    tiny_checkpoint: TinyCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x * 2\n" * 30)
    folder = str(tiny_checkpoint.folder)
    assert (
        cli.main(
            [
                "plan",
                folder,
                "--device",
                "cpu",
                "--quantization",
                "all",
                "--text",
                str(text),
                "--format",
                "json",
            ]
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    found = plan["perplexity"]
    windows = perplexity.windows_of(TextCodec(tiny_checkpoint.folder), text.read_text(), 512)
    assert found["forms"].keys() == plan["weight_bytes"].keys() and not found["refused"]
    assert found["forms"]["float32"] == pytest.approx(
        oracle_perplexity(tiny_checkpoint.oracle, windows), rel=1e-5
    )
    assert found["text"] == str(text) and found["tokens"] == sum(map(len, windows)) - len(windows)
    assert (
        cli.main(["plan", folder, "--device", "cpu", "--quantization", "int8", "--text", str(text)])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("perplexity")).split() == [
        "perplexity",
        *(f"{found['forms'][form]:.4f}" for form in ("float32", "int8")),
    ]
    assert any(line.startswith("over float32") and line.rstrip().endswith("%") for line in lines)


def test_where_perplexity_cannot_be_measured(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gemma = str(MODELS / "gemma-2b")
    assert cli.main(["plan", gemma, "--quantization", "all"]) == 0
    assert f"perplexity: not measured: {gemma} has no weights" in capsys.readouterr().out
    (tmp_path / "latin").write_bytes(b"\xe9t\xe9")
    for model, name, words in (
        (gemma, "latin", "has no effect, as perplexity is not measured"),
        (str(tiny_folder), "latin", "expected UTF-8"),
        (str(tiny_folder), "none", "No such file"),
    ):
        assert (
            cli.main(
                [
                    "plan",
                    model,
                    "--device",
                    "cpu",
                    "--quantization",
                    "int8",
                    "--text",
                    str(tmp_path / name),
                ]
            )
            == 2
        )
        assert words in capsys.readouterr().err
