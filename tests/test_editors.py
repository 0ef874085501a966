"""Recorded requests of editors and agents (tests/clients/editors.json) are answered with 200 and
the fields that these read.

A record says the client, its version or commit, and the file in which its request and what it
reads were found. `added` names fields of the body that the client does not send, or sends larger,
which keep the answer short. `ends` is the field by which the client knows the last event of a
stream, `last` what the last event has. `chats`: it needs a model with a chat template of its own.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ServerProcess, Stream

RECORDS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "clients" / "editors.json").read_text(encoding="utf-8")
)
CLIENTS = Path(__file__).parent.parent / "docs" / "guides" / "clients.md"
KINDS: dict[str, Any] = {"string": str, "number": (int, float), "boolean": bool}


def read(value: Any, path: str) -> Any:
    """The field at a path such as choices.0.text. Raises KeyError or IndexError where there is
    none.
    """
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def check(record: dict[str, Any], answer: Any) -> None:
    """Raises AssertionError where a field is missing or of another kind."""
    for path, kind in record["reads"].items():
        assert isinstance(read(answer, path), KINDS[kind]), (path, answer)
    for path, value in record.get("equals", {}).items():
        assert read(answer, path) == value


@pytest.mark.parametrize(
    "record", RECORDS, ids=lambda record: f"{record['client']} {record['path']}"
)
def test_the_request_of_an_editor(request: pytest.FixtureRequest, record: dict[str, Any]) -> None:
    name = "pretrained_server" if "chats" in record else "embedded_server"
    server: ServerProcess = request.getfixturevalue(name)
    path = record["path"]
    if "body" not in record:
        status, text = server.get(path)
        assert status == 200, text
        check(record, json.loads(text))
        return
    if "ends" not in record and "last" not in record:
        status, answer = server.post(path, record["body"])
        assert status == 200, answer
        check(record, answer)
        return
    stream = Stream(server.port, path, record["body"])
    response = stream.response()
    assert response.status == 200, response
    answers = [
        json.loads(event)
        for event in re.findall(rb"^(?:data: )?(\{.*)$", response.body(), re.MULTILINE)
    ]
    stream.close()
    for answer in answers:
        check(record, answer)
    if "last" in record:
        assert answers[-1] == answers[-1] | record["last"]
        return
    assert [bool(read(answer, record["ends"])) for answer in answers] == [False] * (
        len(answers) - 1
    ) + [True]


def test_several_completions_differ(embedded_server: ServerProcess) -> None:
    """llama.vscode shows them one after the other."""
    (body,) = (record["body"] for record in RECORDS if record.get("body", {}).get("n_cmpl"))
    status, answers = embedded_server.post("/infill", body | {"temperature": 1.5, "seed": 1})
    assert status == 200 and [answer["index"] for answer in answers] == [0, 1, 2]
    assert len({answer["content"] for answer in answers}) > 1


def test_every_editor_has_a_row_in_the_table_of_clients() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|",
        CLIENTS.read_text(encoding="utf-8").replace("`", ""),
        re.MULTILINE,
    )
    for client, version in {
        (record["client"].partition(",")[0], record["version"]) for record in RECORDS
    }:
        assert any(client in row and version in versions for row, versions in rows), (
            client,
            version,
        )
