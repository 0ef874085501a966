"""`onehead batch`: every line answered once and in order, through a kill too; a file that is none
is refused by its line.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import cli
from commands.batch import Journal, Line, read_lines
from server.errors import ResourceError, UsageError
from tests.support.processes import DEADLINE, children, engines, kill, wait_until


def arguments(folder: Path, source: Path, target: Path, *options: str) -> list[str]:
    return ["batch", str(source), str(target), "--model", str(folder), *options]


def command(folder: Path, source: Path, target: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "commands.cli", *arguments(folder, source, target, *options)]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text(
        "".join(
            json.dumps(line) + "\n" if not isinstance(line, str) else line + "\n" for line in lines
        )
    )
    return path


def completion(id: str, **body: Any) -> dict[str, Any]:
    base = {
        "model": "dummy",
        "prompt": f"def f{id}",
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": base | body}


def test_it_goes_on_after_a_kill_and_answers_in_order(tiny_folder: Path, tmp_path: Path) -> None:
    lines = [completion(str(i), max_tokens=150 if i % 3 else 5) for i in range(60)]
    lines[7]["body"]["max_tokens"] = -2
    lines[8]["url"] = "/v1/embeddings"
    lines[9] |= {
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "x"}]},
    }
    source = write(tmp_path / "in.jsonl", lines)
    target = tmp_path / "out.jsonl"
    straight = tmp_path / "straight.jsonl"
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
        done = subprocess.run(
            command(tiny_folder, source, output),
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 1
        assert (
            f"onehead batch: 3 of 60 requests were refused or failed; {output} says why"
            in done.stderr
        )
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [
        line["custom_id"] for line in lines
    ] and not partial.exists()
    assert all(set(answer) == {"id", "custom_id", "response", "error"} for answer in answers)
    statuses = [answer["response"]["status_code"] for answer in answers]
    assert statuses == [400 if i in (7, 8, 9) else 200 for i in range(60)]
    assert "max_tokens" in answers[7]["response"]["body"]["error"]["message"]
    texts = [
        answer["response"]["body"]["choices"][0]["text"]
        for answer in answers
        if answer["response"]["status_code"] == 200
    ]
    again = [json.loads(line)["response"] for line in straight.read_text().splitlines()]
    assert texts == [
        response["body"]["choices"][0]["text"]
        for response in again
        if response["status_code"] == 200
    ]


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
    tiny_folder: Path,
    tmp_path: Path,
    lines: list[Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
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
    assert (
        capsys.readouterr().err
        == f"onehead batch: {tmp_path / 'out.jsonl'}: cannot be written; its folder is read-only\n"
    )


def test_the_requests_are_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, other = write(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "other"
    requests = source.read_bytes()
    other.mkdir()
    (other / "symbolic.jsonl").symlink_to(source)
    (other / "hard.jsonl").hardlink_to(source)
    (other / "later.jsonl.partial").symlink_to(source)
    (other / "last.jsonl.whole").hardlink_to(source)
    targets = (
        source,
        other / ".." / "in.jsonl",
        *(other / name for name in ("symbolic.jsonl", "hard.jsonl", "later.jsonl", "last.jsonl")),
    )
    for target in targets:
        # A model that is no folder: refused before anything is opened, the checkpoint included.
        assert cli.main(arguments(tmp_path / "none", source, target)) == 2, target
        assert "would be overwritten" in capsys.readouterr().err, target
        assert source.read_bytes() == requests
    found = {path.name for path in tmp_path.iterdir()} | {path.name for path in other.iterdir()}
    assert found == {
        "in.jsonl",
        "other",
        "symbolic.jsonl",
        "hard.jsonl",
        "later.jsonl.partial",
        "last.jsonl.whole",
    }


def test_answers_to_other_requests_are_not_taken_for_these(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [completion("a")])
    (tmp_path / "out.jsonl.partial").write_text(
        json.dumps({"digest": "0" * 64, "maker": "", "answer": {}}) + "\n"
    )
    assert cli.main(arguments(tiny_folder, source, tmp_path / "out.jsonl")) == 2
    assert "holds answers to other requests" in capsys.readouterr().err


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def statuses(journal: Path) -> list[int]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [json.loads(line)["answer"]["response"]["status_code"] for line in lines]


@pytest.mark.nightly
def test_an_engine_that_is_gone_for_good_answers_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [completion(str(i), max_tokens=400) for i in range(40)])
    target = tmp_path / "out.jsonl"
    options = "--engine.max_running", "2", "--recovery_timeout", "1"
    process = subprocess.Popen(
        command(tiny_folder, source, target, *options), stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < end:
        for engine in engines(process.pid):
            kill(engine)
        time.sleep(0.05)
    assert process.wait(1) == 70 and not target.exists() and process.stderr is not None
    with process.stderr:
        assert (
            "engines in a row did not get ready; the last one ended with status -9 while it was "
            "loaded" in process.stderr.read()
        )
    assert set(statuses(tmp_path / "out.jsonl.partial")) <= {200}
    subprocess.run(command(tiny_folder, source, target), check=True, timeout=DEADLINE)
    assert {
        json.loads(line)["response"]["status_code"] for line in target.read_text().splitlines()
    } == {200}


@pytest.mark.nightly
def test_an_engine_that_is_away_for_long_answers_nothing_and_the_same_command_goes_on(
    tiny_folder: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [completion(str(i), max_tokens=300) for i in range(200)])
    target = tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    options = "--engine.max_running", "4", "--recovery_timeout", "0.2"
    process = subprocess.Popen(
        command(tiny_folder, source, target, *options), stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: len(statuses(partial)) >= 5, "some answers")
    (engine,) = engines(process.pid)
    (holder,) = (child for child in children(process.pid) if engine in children(child))
    os.kill(holder, signal.SIGSTOP)  # It forks no other, so that one has to be loaded.
    kill(engine)
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read()
    assert (
        process.wait(DEADLINE) == 70
        and "the engine is not back yet; the answers so far are kept, and the same command goes on"
        in said
    )
    assert (
        5 <= len(statuses(partial)) < 200
        and set(statuses(partial)) == {200}
        and not target.exists()
    )
    subprocess.run(command(tiny_folder, source, target), check=True, timeout=DEADLINE)
    assert len(target.read_text().splitlines()) == 200


@pytest.mark.nightly
def test_answers_of_two_models_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [completion(str(i), max_tokens=300) for i in range(60)])
    target = tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    killed = subprocess.Popen(command(folder, source, target, "--engine.max_running", "4"))
    wait_until(lambda: len(statuses(partial)) >= 5, "some answers")
    killed.kill()
    killed.wait(DEADLINE)
    weights = folder / "model.safetensors"
    first, answers = weights.read_bytes(), partial.read_bytes()
    weights.write_bytes(first[:-1] + bytes([first[-1] ^ 1]))
    done = subprocess.run(
        command(folder, source, target),
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and not target.exists()
    assert (
        f"{partial}: holds answers of another model, of other options or of another version"
        in done.stderr
    )
    assert partial.read_bytes() == answers[: answers.rindex(b"\n") + 1]
    weights.write_bytes(first)
    moved = folder.rename(tmp_path / "moved")
    subprocess.run(command(moved, source, target), check=True, timeout=DEADLINE)
    assert len(target.read_text().splitlines()) == 60


def test_a_link_is_written_through(tiny_folder: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [completion("a")])
    link = tmp_path / "out.jsonl"
    real = tmp_path / "elsewhere" / "real.jsonl"
    real.parent.mkdir()
    link.symlink_to(real)
    assert cli.main(arguments(tiny_folder, source, link)) == 0
    assert (
        link.is_symlink()
        and json.loads(real.read_text())["custom_id"] == "a"
        and [*real.parent.iterdir()] == [real]
    )


@pytest.mark.parametrize(
    "foreign",
    [
        "notes of somebody\n",
        '{"id": "batch_req_0", "custom_id": "a"}\n',
        "\n",
        "[1]\n",
        "7\n",
        "[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_foreign_output_is_refused_before_the_model_is_looked_for(
    foreign: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [completion("a")])
    target, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    target.write_bytes(foreign if isinstance(foreign, bytes) else foreign.encode())
    link.symlink_to(target)
    before = target.read_bytes()
    for output in (target, link):
        assert cli.main(arguments(tmp_path / "none", source, output)) == 2
        said = f"{output}: holds something else than answers to {source}; give another OUTPUT, or"
        assert said in capsys.readouterr().err
    assert target.read_bytes() == before
    # With --overwrite it is the model that is missing.
    assert cli.main(arguments(tmp_path / "none", source, target, "--overwrite")) == 78


@pytest.mark.nightly
def test_an_output_of_its_own_is_replaced_and_one_of_other_requests_is_not(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [completion("a"), completion("b", max_tokens=3, n=2), completion("c", max_tokens=-2)]
    lines[0]["body"] |= {"stop": ["e"], "ignore_eos": False, "max_tokens": 400}
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    target.touch()  # An empty file, as mktemp makes.
    for _ in range(2):
        assert cli.main(arguments(tiny_folder, source, target)) == 1
        out, err = capsys.readouterr()
        told = [" ".join(line.split()) for line in out.splitlines()]
        assert told[0] == "finish reason outputs" and "stop 1" in told
        assert "length 2 cut at max_tokens, or at the end of the context" in told
        assert "none 1 refused or failed" in told and "1 of 3 requests were refused" in err
    answers = target.read_bytes()
    # The same ids with other bodies are another batch, and so are more or fewer lines.
    changed = [[completion("a"), *lines[1:]], lines[:2], [*lines, completion("d")], lines[::-1]]
    for others in changed:
        assert cli.main(arguments(tiny_folder, write(source, others), target)) == 2
    assert target.read_bytes() == answers
    assert cli.main(arguments(tiny_folder, source, target, "--overwrite")) == 1
    assert [json.loads(line)["custom_id"] for line in target.read_text().splitlines()] == [
        "d",
        *"cba",
    ][1:]


def a_folder(path: Path) -> None:
    path.mkdir()


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [a_folder, a_loop, a_pipe])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.partial", "out.jsonl.whole"])
def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, make: Callable[[Path], None], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [completion("a")])
    make(tmp_path / name)
    assert cli.main(arguments(tmp_path / "none", source, tmp_path / "out.jsonl")) == 2
    said = capsys.readouterr().err
    assert said.startswith("onehead batch: ") and "out.jsonl" in said and said.count("\n") == 1


def test_a_name_that_is_too_long_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [completion("a")])
    assert cli.main(arguments(tmp_path / "none", source, tmp_path / ("x" * 250))) == 2
    assert "File name too long" in capsys.readouterr().err


def lines_of(tmp_path: Path) -> list[Line]:
    return read_lines(write(tmp_path / "in.jsonl", [completion("a"), completion("b")]))


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    lines, path = lines_of(tmp_path), tmp_path / "out.jsonl.partial"
    with (
        contextlib.closing(Journal(path, lines)),
        pytest.raises(UsageError, match="another run of this command writes it"),
    ):
        Journal(path, lines)
    assert not path.exists(), "it holds nothing"
    with contextlib.closing(Journal(path, lines)) as journal:
        journal.begin("x")
        journal.add(lines[0], {})
    with contextlib.closing(Journal(path, lines)) as journal:
        assert journal.answers == {lines[0].digest: {}}


def test_a_full_disk_is_told_in_a_line_and_costs_no_answer(tmp_path: Path) -> None:
    lines, path = lines_of(tmp_path), tmp_path / "out.jsonl.partial"
    with contextlib.closing(Journal(path, lines)) as journal:
        journal.begin("x")
        journal.add(lines[0], {})
        with journal._file, open("/dev/full", "wb", buffering=0) as full:
            journal._file = full
            with pytest.raises(
                ResourceError, match=r"No space left on device; the answers so far are kept"
            ):
                journal.add(lines[1], {})
    path.write_bytes(path.read_bytes() + b'{"digest": "the half of a li')
    with contextlib.closing(Journal(path, lines)) as journal:
        journal.begin("x")
        assert [*journal.answers] == [lines[0].digest]
        journal.add(lines[1], {})
        (tmp_path / "out.jsonl.whole").symlink_to("/dev/full")
        with pytest.raises(ResourceError, match=r"No space left on device; the answers are kept"):
            journal.finish(tmp_path / "out.jsonl", lines)
    assert path.exists() and not (tmp_path / "out.jsonl").exists()
