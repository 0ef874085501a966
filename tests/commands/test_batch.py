"""`onehead batch`: every line answered once and in order, through a kill too; a file that is none is refused by its line."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commands import cli
from tests.support.processes import DEADLINE, children, kill, wait_until


def arguments(folder: Path, source: Path, target: Path, *options: str) -> list[str]:
    return ["batch", str(source), str(target), "--model", str(folder), *options]


def command(folder: Path, source: Path, target: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "commands.cli", *arguments(folder, source, target, *options)]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" if not isinstance(line, str) else line + "\n" for line in lines))
    return path


def completion(id: str, **body: Any) -> dict[str, Any]:
    base = {"model": "dummy", "prompt": f"def f{id}", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    return {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": base | body}


def test_it_goes_on_after_a_kill_and_answers_in_order(tiny_folder: Path, tmp_path: Path) -> None:
    lines = [completion(str(i), max_tokens=150 if i % 3 else 5) for i in range(60)]
    lines[7]["body"]["max_tokens"] = -1
    lines[8]["url"] = "/v1/embeddings"
    lines[9] |= {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}]}}
    source, target, straight = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "straight.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    killed = subprocess.Popen(command(tiny_folder, source, target, "--engine.max_running", "4"))
    wait_until(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 12, "some answers")
    killed.send_signal(signal.SIGKILL)
    killed.wait(DEADLINE)
    before = partial.read_bytes().count(b"\n")
    assert not target.exists() and 12 <= before < 60
    with partial.open("ab") as file:
        file.write(b'{"digest": "cut off in the mid')
    for output in (target, straight):
        done = subprocess.run(command(tiny_folder, source, output), check=False, capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 1
        assert f"onehead batch: 3 of 60 requests were refused or failed; {output} says why" in done.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines] and not partial.exists()
    assert all(set(answer) == {"id", "custom_id", "response", "error"} for answer in answers)
    statuses = [answer["response"]["status_code"] for answer in answers]
    assert statuses == [400 if i in (7, 8, 9) else 200 for i in range(60)]
    assert "max_tokens" in answers[7]["response"]["body"]["error"]["message"]
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in answers if answer["response"]["status_code"] == 200]
    again = [json.loads(line)["response"] for line in straight.read_text().splitlines()]
    assert texts == [response["body"]["choices"][0]["text"] for response in again if response["status_code"] == 200]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "holds no requests"),
        ([completion("a"), "{"], "in.jsonl:2: the line is not JSON"),
        ([completion("a"), completion("a")], "in.jsonl:2: custom_id 'a' occurs twice"),
        ([completion("a") | {"body": []}], "in.jsonl:1: url must be a text and body an object"),
        ([completion("a") | {"method": "GET"}], "method must be POST"),
        ([completion("a") | {"extra": 1}], "'extra' is not a known key"),
        ([completion("") | {"custom_id": ""}], "custom_id must be a text"),
    ],
)
def test_a_file_that_is_none_is_refused_before_anything_is_loaded(
    tiny_folder: Path, tmp_path: Path, lines: list[Any], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commands.batch.running_engine", None)  # What starts an engine.
    source = write(tmp_path / "in.jsonl", lines)
    assert cli.main(arguments(tiny_folder, source, tmp_path / "out.jsonl")) == 2
    assert words in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_into_is_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text("{}\n")
    monkeypatch.setattr("commands.batch.os.access", lambda path, mode: False)
    assert cli.main(["batch", str(requests), str(tmp_path / "out.jsonl")]) == 2
    assert capsys.readouterr().err == f"onehead batch: {tmp_path / 'out.jsonl'}: cannot be written; its folder is read-only\n"


def test_the_requests_are_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = write(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "other"
    requests = source.read_bytes()
    other.mkdir()
    (other / "symbolic.jsonl").symlink_to(source)
    (other / "hard.jsonl").hardlink_to(source)
    (other / "later.jsonl.partial").symlink_to(source)
    (other / "last.jsonl.whole").hardlink_to(source)
    targets = source, other / ".." / "in.jsonl", *(other / name for name in ("symbolic.jsonl", "hard.jsonl", "later.jsonl", "last.jsonl"))
    for target in targets:
        # A model that is no folder: refused before anything is opened, the checkpoint included.
        assert cli.main(arguments(tmp_path / "none", source, target)) == 2, target
        assert "would be overwritten" in capsys.readouterr().err, target
        assert source.read_bytes() == requests
    found = {path.name for path in tmp_path.iterdir()} | {path.name for path in other.iterdir()}
    assert found == {"in.jsonl", "other", "symbolic.jsonl", "hard.jsonl", "later.jsonl.partial", "last.jsonl.whole"}


def test_answers_to_other_requests_are_not_taken_for_these(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [completion("a")])
    (tmp_path / "out.jsonl.partial").write_text(json.dumps({"digest": "0" * 64, "maker": "", "answer": {}}) + "\n")
    assert cli.main(arguments(tiny_folder, source, tmp_path / "out.jsonl")) == 2
    assert "holds answers to other requests" in capsys.readouterr().err


def test_an_engine_that_is_gone_for_good_answers_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [completion(str(i), max_tokens=400) for i in range(40)]), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    process = subprocess.Popen(command(tiny_folder, source, target, "--engine.max_running", "2"), stderr=subprocess.DEVNULL)
    end = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < end:
        for engine in children(process.pid):  # Before it can say a token: three such deaths in a row are enough.
            kill(engine)
        time.sleep(0.05)
    assert process.wait(1) == 70 and not target.exists()
    kept = [json.loads(line)["answer"] for line in partial.read_text().splitlines()] if partial.exists() else []
    assert all(answer["response"]["status_code"] == 200 for answer in kept) and len(kept) < 40
    subprocess.run(command(tiny_folder, source, target), check=True, timeout=DEADLINE)
    statuses = {json.loads(line)["response"]["status_code"] for line in target.read_text().splitlines()}
    assert statuses == {200}
