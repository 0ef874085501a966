"""The invariants I1-I5, I7-I9 and I12, checked on a recorded history. `python -m
tests.faults.checker FILE...` judges old ones.

Pure: records in, sentences out. It knows both dialects and nothing of any case. What a case allows
stands in the history itself: a client that left, or a front that was killed. I6 and I10 are about
the server's own figures, which tests.faults.scene asks it for.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.history import read
from tests.support.paths import ROOT

FIRST_EVENT_SECONDS = 60.0
LEAK = re.compile(
    r"Traceback|File "
    rf"\\*\"|0x[0-9a-f]{{6,}}|/(?:tmp|usr|root|home|proc|dev)/|{re.escape(str(ROOT))}|\.py\b|site-packages|Bearer "  # noqa: E501
)
DONE = "[DONE]"


@dataclass
class Told:
    """All that one request was told."""

    number: int
    sent: dict[str, Any]
    head: dict[str, Any] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    oracle: dict[str, Any] | None = None

    @property
    def data(self) -> list[Any]:
        return [event["data"] for event in self.events]

    @property
    def ended(self) -> str:
        return "never" if self.end is None else str(self.end["how"])

    @property
    def ids(self) -> list[int]:
        return [id for data in self.data for id in token_ids(data)]

    @property
    def text(self) -> str:
        return "".join(text_of(data) for data in self.data)


def choice_of(data: Any) -> dict[str, Any]:
    choices = data.get("choices") if isinstance(data, dict) else None
    return choices[0] if choices else {}


def token_ids(data: Any) -> list[int]:
    """Ids of the tokens that an event or a whole answer brings."""
    if not isinstance(data, dict) or "error" in data:
        return []
    if "token" in data:
        return [data["token"]["id"]]
    if "choices" in data:
        return list(choice_of(data).get("token_ids") or ())
    return [token["id"] for token in (data.get("details") or {}).get("tokens") or ()]


def text_of(data: Any) -> str:
    if not isinstance(data, dict) or "error" in data:
        return ""
    if "token" in data:
        return "" if data["token"]["special"] else str(data["token"]["text"])
    return (
        str(choice_of(data).get("text", ""))
        if "choices" in data
        else str(data.get("generated_text") or "")
    )


def is_error(data: Any) -> bool:
    return isinstance(data, dict) and "error" in data


def is_terminal(data: Any) -> bool:
    """Whether an event ends its stream: the text's end, or an error."""
    if not isinstance(data, dict):
        return False
    return (
        is_error(data)
        or data.get("generated_text") is not None
        or choice_of(data).get("finish_reason") is not None
    )


def requests(records: list[dict[str, Any]]) -> list[Told]:
    """The history's requests, each with all that it was told."""
    told: dict[int, Told] = {}
    for record in records:
        number, kind = record.get("request"), record["kind"]
        if kind == "sent":
            told[record["request"]] = Told(record["request"], record)
        elif number in told and kind == "event":
            told[number].events.append(record)
        elif number in told and kind in ("head", "end", "oracle") and record.get("status") != 204:
            # Nothing is left to be told.
            setattr(told[number], kind, record)
    return list(told.values())


def verdict(records: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a history, one sentence each; empty where nothing is."""
    front_killed = any(
        record["kind"] == "act" and record["act"] == "kill front" for record in records
    )
    all_told = requests(records)
    problems: list[str] = []
    for told in all_told:
        checks = [
            answered(told, front_killed),
            in_order(told),
            nothing_after_the_end(told),
            in_time(told),
            refusals(told),
            schema(told),
        ]
        checks += [as_undisturbed(told), counted(told)]
        problems += [f"request {told.number}: {problem}" for check in checks for problem in check]
    return problems + list(canaries(all_told))


def answered(told: Told, front_killed: bool) -> Iterator[str]:
    """I1: exactly one terminal event, however the request ends, unless its client left or what it
    was connected to was killed.
    """
    terminals = sum(map(is_terminal, told.data))
    if terminals > 1:
        yield f"I1: {terminals} terminal events"
    if told.ended == "left" or (told.ended == "cut" and front_killed):
        return
    if told.head is None:
        yield f"I1: no answer; the connection ended by {told.ended}"
    elif told.ended != "eof":
        yield f"I1: the answer was not completed; the connection ended by {told.ended}"
    elif terminals == 0:
        yield "I1: no terminal event"


def in_order(told: Told) -> Iterator[str]:
    """I2: event numbers without gap or repeat: TGI's index, and the ids of a resumable stream."""
    indexes = [data["index"] for data in told.data if isinstance(data, dict) and "token" in data]
    if indexes != list(range(1, len(indexes) + 1)):
        yield f"I2: indexes {indexes}"
    ids = [event["id"] for event in told.events if event.get("id") is not None]
    numbers = [int(id.rsplit(".", 1)[1]) for id in ids]
    if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        yield f"I2: event ids {numbers}"
    if ids and len(ids) != len(told.events):
        yield f"I2: {len(ids)} of {len(told.events)} events have an id"


def as_undisturbed(told: Told) -> Iterator[str]:
    """I3: tokens and text are those of a run that nothing disturbed, up to where the request ended;
    the parts make up the whole.
    """
    whole = [
        data["generated_text"]
        for data in told.data
        if isinstance(data, dict) and data.get("generated_text") is not None
    ]
    if whole and whole[-1] != told.text:
        yield f"I3: the parts make {told.text!r}, the whole is {whole[-1]!r}"
    if told.oracle is None:
        if told.ids:
            yield "I3: nobody asked an undisturbed server for this answer"
        return
    finished = any(is_terminal(data) and not is_error(data) for data in told.data)
    ids, expected = told.ids, told.oracle["tokens"]
    if ids != (expected if finished else expected[: len(ids)]):
        same = next(
            (i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]),
            min(len(ids), len(expected)),
        )
        yield f"I3: {len(ids)} tokens, {len(expected)} expected; they differ from number {same} on"
    if not (
        told.text == told.oracle["text"] if finished else told.oracle["text"].startswith(told.text)
    ):
        yield f"I3: the text {told.text!r} is not that of an undisturbed run"


def counted(told: Told) -> Iterator[str]:
    """I4: the number of tokens that was told is the number that came."""
    for data in told.data:
        counts = []
        if isinstance(data, dict) and data.get("details"):
            counts.append(data["details"]["generated_tokens"])
        if isinstance(data, dict) and data.get("usage"):
            counts.append(data["usage"]["completion_tokens"])
        if any(count != len(told.ids) for count in counts):
            yield f"I4: {counts} tokens are counted, {len(told.ids)} came"


def nothing_after_the_end(told: Told) -> Iterator[str]:
    """I5: after the terminal event only /v1's usage and its [DONE], which is there exactly once."""
    places = [place for place, data in enumerate(told.data) if is_terminal(data)]
    if not places:
        return
    rest = told.data[places[0] + 1 :]
    streamed_v1 = (
        told.sent["dialect"] == "openai" and told.head is not None and told.head["streamed"]
    )
    if streamed_v1 and told.ended == "eof" and rest[-1:] != [DONE]:
        yield f"I5: no {DONE} at the end"
    after = [
        data
        for data in rest
        if data != DONE
        and not (isinstance(data, dict) and data.get("choices") == [] and "usage" in data)
    ]
    if (
        after
        or rest.count(DONE) > int(streamed_v1)
        or (is_error(told.data[places[0]]) and len(rest) > int(streamed_v1))
    ):
        yield f"I5: after the end came {json.dumps(rest)}"


def canaries(all_told: list[Told]) -> Iterator[str]:
    """I7: no answer holds a word that only another request's prompt has."""
    for told in all_told:
        got = json.dumps([told.head, told.events])
        for other in all_told:
            if other.number != told.number and other.sent["canary"] and other.sent["canary"] in got:
                yield f"request {told.number}: I7: it was told the canary of request {other.number}"


def in_time(told: Told) -> Iterator[str]:
    """I8: something comes within the deadline."""
    first = told.head["t"] if told.head is not None else None
    if first is not None and first - told.sent["t"] > FIRST_EVENT_SECONDS:
        yield f"I8: the answer began after {first - told.sent['t']:.1f} s"


def refusals(told: Told) -> Iterator[str]:
    """I9: a reply that asks for a retry has Retry-After."""
    if (
        told.head is not None
        and told.head["status"] in (429, 503)
        and not told.head["headers"].get("retry-after", "").isdigit()
    ):
        yield f"I9: {told.head['status']} without Retry-After"


def schema(told: Told) -> Iterator[str]:
    """I12: every error has its dialect's body and a request id, and nothing of the server's or a
    prompt's inside.
    """
    if told.head is None:
        return
    if not told.head["headers"].get("x-request-id"):
        yield "I12: no x-request-id"
    if told.head["status"] >= 400 and not any(map(is_error, told.data)) and told.ended != "left":
        yield f"I12: a {told.head['status']} without an error's body: {told.data}"
    for data in filter(is_error, told.data):
        text = json.dumps(data)
        if not _fits(told.sent["dialect"], data):
            yield f"I12: no error of the {told.sent['dialect']} dialect: {text}"
        if (leak := LEAK.search(text)) or (told.sent["canary"] and told.sent["canary"] in text):
            yield f"I12: the error gives away {leak[0] if leak else 'the prompt'}: {text}"


def _fits(dialect: str, data: dict[str, Any]) -> bool:
    if dialect == "tgi":
        return set(data) == {"error", "error_type"} and all(
            isinstance(value, str) and value for value in data.values()
        )
    error = data["error"]
    return (
        set(data) == {"error"}
        and isinstance(error, dict)
        and {"message", "type", "param", "code"} <= set(error)
        and bool(error["message"])
    )


def main(paths: list[str]) -> int:
    problems = [f"{path}: {problem}" for path in paths for problem in verdict(read(Path(path)))]
    print("\n".join(problems) or f"{len(paths)} histories keep the invariants")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
