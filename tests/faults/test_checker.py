"""The checker accepts sound histories of both dialects and finds each way to break an invariant. No
server needed.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.checker import verdict
from tests.faults.history import History, read

Records = list[dict[str, Any]]
HEADERS = {"x-request-id": "a1"}


def token(index: int, last: bool = False) -> dict[str, Any]:
    details = {"finish_reason": "length", "generated_tokens": 3} if last else None
    text = {"generated_text": "abc" if last else None, "details": details}
    return {
        "index": index,
        "token": {"id": index + 10, "text": "abc"[index - 1], "special": False},
        **text,
    }


def chunk(index: int, last: bool = False) -> dict[str, Any]:
    choice = {
        "text": "abc"[index - 1],
        "token_ids": [index + 10],
        "finish_reason": "length" if last else None,
    }
    return {"choices": [choice]}


STREAMS: dict[str, list[Any]] = {
    "tgi": [token(1), token(2), token(3, last=True)],
    "openai": [
        chunk(1),
        chunk(2),
        chunk(3, last=True),
        {"choices": [], "usage": {"completion_tokens": 3}},
        "[DONE]",
    ],
}
ERRORS: dict[str, Any] = {
    "tgi": {"error": "it failed", "error_type": "generation"},
    "openai": {
        "error": {
            "message": "it failed",
            "type": "InternalServerError",
            "param": None,
            "code": "out_of_memory",
        }
    },
}


def records(
    dialect: str,
    number: int = 1,
    data: list[Any] | None = None,
    status: int = 200,
    how: str = "eof",
) -> Records:
    data = copy.deepcopy(STREAMS[dialect] if data is None else data)
    told: Records = [
        {
            "kind": "sent",
            "request": number,
            "dialect": dialect,
            "canary": f"canary{number}",
            "body": {},
        }
    ]
    told.append(
        {
            "kind": "head",
            "request": number,
            "status": status,
            "headers": dict(HEADERS),
            "streamed": status == 200,
        }
    )
    told += [{"kind": "event", "request": number, "data": event} for event in data]
    told += [{"kind": "end", "request": number, "how": how}]
    told += [{"kind": "oracle", "request": number, "tokens": [11, 12, 13], "text": "abc"}]
    return [{"t": 0.1 * place, **record} for place, record in enumerate(told)]


def data_of(told: Records) -> list[Any]:
    return [record["data"] for record in told if record["kind"] == "event"]


@pytest.mark.parametrize("dialect", STREAMS)
def test_sound_histories_are_accepted(dialect: str, tmp_path: Path) -> None:
    done = ["[DONE]"] if dialect == "openai" else []
    failed = [*STREAMS[dialect][:2], ERRORS[dialect], *done]
    told = [
        *records(dialect),
        *records(dialect, 2, failed),
        *records(dialect, 3, STREAMS[dialect][:1], how="left"),
    ]
    told += records(dialect, 4, [ERRORS[dialect]], status=424)
    assert verdict(told) == []
    history = History(tmp_path / "h.jsonl")
    for record in told:
        history.add(**{key: value for key, value in record.items() if key != "t"})
    history.close()
    assert verdict(read(tmp_path / "h.jsonl")) == []


def drop_event(told: Records, place: int) -> None:
    del told[[i for i, record in enumerate(told) if record["kind"] == "event"][place]]


def repeat_event(told: Records, place: int) -> None:
    at = [i for i, record in enumerate(told) if record["kind"] == "event"][place]
    told.insert(at, copy.deepcopy(told[at]))


def tell(told: Records, data: Any) -> None:
    """One more event at the end."""
    told.insert(-2, {"t": 9.0, "kind": "event", "request": 1, "data": data})


def keep(told: Records, count: int) -> None:
    for _ in range(len(data_of(told)) - count):
        drop_event(told, -1)


def number(told: Records, *ids: int) -> None:
    events = [record for record in told if record["kind"] == "event"]
    for record, id in zip(events, ids, strict=False):
        record["id"] = f"s.{id}"


def change(kind: str, **values: Any) -> Callable[[Records], None]:
    def changed(told: Records) -> None:
        for record in told:
            if record["kind"] == kind:
                record.update(values)

    return changed


def other_token(told: Records) -> None:
    data = data_of(told)[1]
    if "token" in data:
        data["token"]["id"] = 99
    else:
        data["choices"][0]["token_ids"] = [99]


def other_text(told: Records) -> None:
    data = data_of(told)[1]
    (data["token"] if "token" in data else data["choices"][0])["text"] = "x"


def other_count(told: Records) -> None:
    for data in data_of(told):
        if data != "[DONE]" and data.get("details"):
            data["details"]["generated_tokens"] = 2
        if data != "[DONE]" and "usage" in data:
            data["usage"]["completion_tokens"] = 4


def error_with(dialect: str, text: str) -> Any:
    error = copy.deepcopy(ERRORS[dialect])
    if dialect == "tgi":
        error["error"] = text
    else:
        error["error"]["message"] = text
    return error


BREAKS: list[tuple[str, str, Callable[[Records], None]]] = [
    ("I1", "tgi", lambda told: keep(told, 2)),
    ("I1", "openai", lambda told: keep(told, 2)),
    ("I1", "tgi", change("end", how="cut")),
    ("I1", "openai", change("end", how="timeout")),
    ("I1", "tgi", lambda told: tell(told, ERRORS["tgi"])),
    ("I1", "tgi", lambda told: told.pop(1) and keep(told, 0)),
    ("I2", "tgi", lambda told: drop_event(told, 1)),
    ("I2", "tgi", lambda told: repeat_event(told, 1)),
    ("I2", "openai", lambda told: number(told, 1, 2, 4, 5, 6)),
    ("I2", "openai", lambda told: number(told, 1, 2)),
    ("I3", "openai", lambda told: drop_event(told, 1)),
    ("I3", "openai", lambda told: repeat_event(told, 1)),
    ("I3", "tgi", other_token),
    ("I3", "openai", other_token),
    ("I3", "tgi", other_text),
    ("I3", "openai", other_text),
    ("I3", "tgi", lambda told: told.pop() and None),
    ("I4", "tgi", other_count),
    ("I4", "openai", other_count),
    ("I5", "tgi", lambda told: tell(told, "[DONE]")),
    ("I5", "openai", lambda told: tell(told, "[DONE]")),
    ("I5", "openai", lambda told: drop_event(told, -1)),
    ("I5", "openai", lambda told: tell(told, chunk(1))),
    (
        "I7",
        "tgi",
        lambda told: told.extend(records("tgi", 2, [error_with("tgi", "canary1")], status=424)),
    ),
    ("I8", "tgi", change("head", t=100.0)),
    ("I9", "tgi", lambda told: told.extend(records("tgi", 2, [ERRORS["tgi"]], status=429))),
    (
        "I9",
        "openai",
        lambda told: told.extend(records("openai", 2, [ERRORS["openai"]], status=503)),
    ),
    ("I12", "tgi", change("head", headers={})),
    ("I12", "tgi", lambda told: told.extend(records("tgi", 2, [{"detail": "x"}], status=422))),
    (
        "I12",
        "openai",
        lambda told: told.extend(
            records("openai", 2, [{"error": "x", "error_type": "y"}], status=400)
        ),
    ),
]
BREAKS += [
    (
        "I12",
        dialect,
        lambda told, dialect=dialect, leak=leak: told.extend(
            records(dialect, 2, [error_with(dialect, leak)], status=500)
        ),
    )
    for dialect in STREAMS
    for leak in (
        "Traceback (most recent",
        'in File "x"',
        "at 0x7f0011223344",
        "of /home/user/onehead/x",
        "canary2 was your prompt",
        "",
    )
]


@pytest.mark.parametrize(("invariant", "dialect", "break_it"), BREAKS)
def test_what_breaks_an_invariant_is_found(
    invariant: str, dialect: str, break_it: Callable[[Records], Any]
) -> None:
    told = records(dialect)
    break_it(told)
    assert any(f" {invariant}: " in problem for problem in verdict(told)), verdict(told)


def test_a_killed_front_excuses_what_it_cut_off_and_nothing_else() -> None:
    told = records("tgi", data=STREAMS["tgi"][:1], how="cut")
    assert verdict(told) != []
    told.append({"t": 1.0, "kind": "act", "act": "kill front"})
    assert verdict(told) == []
    other_token(told := [*records("tgi", data=STREAMS["tgi"][:2], how="cut"), told[-1]])
    assert [problem for problem in verdict(told) if "I3" in problem]
