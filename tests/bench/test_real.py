"""The suite on published weights, on a tiny checkpoint and with a llama.cpp that answers what a
test wants.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.real import measures, texts
from bench.real.measures import Subject
from bench.real.published import PEER, Published
from server.text.codec import TextCodec


@pytest.fixture
def subject(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(texts, "TOKENS", 300)
    monkeypatch.setattr(texts, "CHARACTERS", 2000)
    published = Published.prepare(tmp_path, Path(sys.executable), tiny_folder / "weights.gguf")
    return Subject(published, tiny_folder, tiny_folder, ["float32", "int8"], tmp_path, rounds=1)


def test_both_halves_of_the_text_have_as_many_tokens(subject: Subject) -> None:
    windows = texts.scored_windows(TextCodec(subject.folder))
    assert sum(map(len, windows)) == 2 * 300


def test_perplexities_are_judged_by_llama_cpp_s(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def answer(self: Published, file: Path, do: str, **arguments: Any) -> dict[str, Any]:
        asked.append((file.name, do))
        if do == "quantize":
            Path(arguments["output"]).touch()
            return {}
        assert sum(map(len, arguments["windows"])) == 2 * 300
        return {"perplexity": theirs}

    monkeypatch.setattr(Published, "llama_cpp", answer)
    theirs = 1.0
    checks = {check.what: check for check in measures.perplexities(subject)}
    ours = float(checks["float32 as llama.cpp's F32, within 0.1 %"].found.split()[0])
    assert not checks["float32 as llama.cpp's F32, within 0.1 %"].holds
    assert (
        asked[:2] == [("weights.gguf", "quantize"), ("weights.gguf", "quantize")]
        and len(asked) == 5
    )
    theirs = ours
    checks = {check.what: check for check in measures.perplexities(subject)}
    assert checks["float32 as llama.cpp's F32, within 0.1 %"].holds
    # The other types were written already.
    assert len(asked) == 8 and asked[-1] == (
        "weights.gguf",
        "perplexity",
    )


def test_speeds_are_medians_of_ratios_in_turns(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "CLIENTS", {1: (1, 1.5), 2: (2, 1e9)})
    monkeypatch.setattr(measures, "OUTPUT_TOKENS", 3)
    monkeypatch.setattr(Published, "llama_cpp", lambda *_, **__: {"tokens_per_second": 1e-6})
    checks = measures.speeds(
        Subject(subject.published, subject.served, subject.folder, ["int8"], subject.output, 2)
    )
    assert [check.what for check in checks] == [
        "int8, 1 clients, at least 1.5 times llama.cpp's",
        "int8, 2 clients, at least 1000000000.0 times llama.cpp's",
    ]
    assert checks[0].holds and not checks[1].holds


def test_the_peer_s_script_needs_nothing_of_ours(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"do": "quantize"}))
    (tmp_path / "llama_cpp.py").write_text("raise RuntimeError('llama_cpp was imported')")
    done = subprocess.run(
        [sys.executable, PEER, "x.gguf", request],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path)},
        cwd="/",
    )
    assert "llama_cpp was imported" in done.stderr
