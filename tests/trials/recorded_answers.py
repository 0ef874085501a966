"""Answers of the recorded corpus: their normal form, and the comparison of two recordings.

Invariant: the normal form hides only what differs between two runs of the same server, each by its
own rule below; everything else is kept as it was sent. It knows HTTP heads, JSON, server-sent
events and the text format of Prometheus; it starts and asks no server.

Not compared: the value of dates, request ids, stream ids, answer ids, `created`, seeds that the
server drew, measured times, the wait in `retry-after` of a 429, `x-generated-tokens` of a request
with stop strings (it includes tokens that the engine computed before it heard of the stop), the
samples of metrics, the order of headers, the order of keys in /openapi.json, and, in streams of
several choices, which choice's event comes first: the order within a choice is compared. Where
bytes are cut into chunks or TCP segments is not recorded. `content-length` is compared with the
body of the same answer.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.trials.corpus import Row

Answer = dict[str, Any]
LARGEST_SEED = 2**63 - 1
MAX_TEXT = 100_000
"""Bytes above which a body that needs no normal form is kept as its digest."""
TIMES = re.compile("x-(compute|total|validation|queue|inference)-time|x-time-per-token")
RULES = [
    (re.compile(r'"id":"(cmpl|chatcmpl)-[0-9a-f]{32}"'), r'"id":"\1-ID"'),
    (re.compile(r'"created":[0-9]+'), '"created":TIME'),
    (re.compile(r'"(prompt|predicted)_(ms|per_token_ms|per_second)":[-+.0-9eE]+'), r'"\1_\2":TIME'),
    (re.compile(rf'"seed":(?!{LARGEST_SEED}\b)[0-9]{{12,}}'), '"seed":DRAWN'),
]
ERROR_TEXT = "(error text)"


def normal(
    row: Row, status: int, headers: list[tuple[str, str]], body: bytes, streams: dict[str, str]
) -> Answer:
    """The normal form of one answer. `streams`: name of each resumable stream by its id."""
    named = {name.lower(): value for name, value in headers}
    own = named.get("x-stream-id")
    streams = ({own: "own"} if own else {}) | streams
    answer: Answer = {
        "status": status,
        "headers": sorted(
            [name, _header(row, status, body, name, value)] for name, value in headers
        ),
    }
    text = _text(body)
    for id, name in streams.items():
        answer["headers"] = [
            [header, value.replace(id, f"STREAM-{name}")] for header, value in answer["headers"]
        ]
        text = None if text is None else text.replace(id, f"STREAM-{name}")
    return (
        answer
        if row.head
        else answer | _body(row, status, named.get("content-type", ""), body, text)
    )


def _header(row: Row, status: int, body: bytes, name: str, value: str) -> str:
    lower = name.lower()
    if lower == "content-length" and row.request.startswith(b"HEAD "):
        return "LENGTH" if row.metrics else value
    if lower == "content-length":
        return "as the body" if value == str(len(body)) else f"{value}, of which {len(body)} came"
    if lower == "x-generated-tokens" and b'"stop":' in row.request:
        return "COUNT"
    if (
        lower in ("date", "last-modified", "etag")
        or TIMES.fullmatch(lower)
        or (lower == "retry-after" and status == 429)
    ):
        return lower.upper()
    return "ID" if lower == "x-request-id" and re.fullmatch("[0-9a-f]{16}", value) else value


def _text(body: bytes) -> str | None:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _body(row: Row, status: int, kind: str, body: bytes, text: str | None) -> Answer:
    """The body's part of an answer: its text, the lines of a stream, a digest, or the parts of a
    document whose words are apart.
    """
    if text is not None and row.openapi and status == 200:
        words: dict[str, str] = {}
        document = _without_words(json.loads(text), "", words)
        return {
            "text": json.dumps(document, sort_keys=True, ensure_ascii=False, indent=0),
            "words": words,
        }
    if text is not None and row.metrics and status == 200:
        return _metrics(text)
    if text is None or (
        len(body) > MAX_TEXT and not kind.startswith(("application/json", "text/event-stream"))
    ):
        return {"text": f"{len(body)} bytes, SHA-256 {hashlib.sha256(body).hexdigest()}"}
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return (
        {"lines": _ordered(text, row.ends)}
        if kind.startswith("text/event-stream")
        else {"text": text}
    )


def _without_words(value: Any, path: str, words: dict[str, str]) -> Any:
    """An OpenAPI document without its descriptions and the error texts of its examples, which go to
    `words` by their place.
    """
    if isinstance(value, list):
        return [_without_words(item, f"{path}/{index}", words) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        is_text = key in ("description", "summary") or (
            "/example" in path and key in ("error", "message")
        )
        if is_text and isinstance(item, str):
            words[f"{path}/{key}"] = item
        else:
            kept[key] = _without_words(item, f"{path}/{key}", words)
    return kept


def _metrics(text: str) -> Answer:
    """Names, types and labelled series in their order, without values; the HELP texts apart."""
    words, kept = {}, []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, words[name] = [*line.split(" ", 3), ""][:4]
        else:
            kept.append(line if line.startswith("#") else line.rsplit(" ", 1)[0])
    return {"text": "\n".join(kept), "words": words}


def _ordered(text: str, ends: bool) -> list[str]:
    """The lines of a stream, its events in the order of choices. With `ends`, only those from the
    first error on.
    """
    events = re.split(r"(?<=\n\n)", text)
    if ends:
        first = next((number for number, event in enumerate(events) if '"error":' in event), 0)
        events = [
            re.sub(r"(?m)^(id: STREAM-[\w-]+)\.[0-9]+$", r"\1.N", event) for event in events[first:]
        ]
    return "".join(sorted(events, key=_choice)).split("\n")


def _choice(event: str) -> int:
    """The choice that an event of OpenAI's dialect belongs to; 0 for all events of a stream with
    one choice.
    """
    found = re.search(r'"choices":\[(?:\{"index":([0-9]+))?', event)
    if found is None:
        return 10**6 if event.startswith("data: [DONE]") or not event else 0
    return int(found[1]) if found[1] else 10**5


@dataclass
class Comparison:
    """What differs between two recordings: `differences` by answer, and apart from them the texts
    that a person reads.
    """

    num_answers: int = 0
    differences: list[tuple[str, list[str]]] = field(default_factory=list)
    error_texts: list[tuple[str, str, str]] = field(default_factory=list)
    words: list[tuple[str, str, str]] = field(default_factory=list)

    def report(self) -> str:
        """The comparison in Markdown."""
        lines = [
            "# Recorded corpus, before and after",
            "",
            f"{self.num_answers} answers; {len(self.differences)} differ, {len(self.error_texts)} "
            "have another error text and are "
            f"otherwise equal, {len(self.words)} descriptions (HELP of metrics, OpenAPI) changed.",
        ]
        if self.differences:
            lines += ["", "## Differences"]
        for name, found in self.differences:
            lines += ["", f"### {name}", "", "```diff", *found, "```"]
        for title, changes in (("Error texts", self.error_texts), ("Descriptions", self.words)):
            if changes:
                lines += ["", f"## {title}", "", "| where | before | after |", "|---|---|---|"]
            for pair, places in _grouped(changes).items():
                where = places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")
                lines.append("| " + " | ".join(_cell(text) for text in (where, *pair)) + " |")
        return "\n".join(lines) + "\n"


def _grouped(changes: list[tuple[str, str, str]]) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for where, before, after in changes:
        groups.setdefault((before, after), []).append(where)
    return groups


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def compare(before: dict[str, Answer], after: dict[str, Answer]) -> Comparison:
    """Compares the answers of two recordings by name."""
    comparison = Comparison(len(before.keys() | after.keys()))
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in before or name not in after:
            comparison.differences.append(
                (name, ["only before" if name in before else "only after"])
            )
            continue
        old, old_errors = _without_errors(before[name])
        new, new_errors = _without_errors(after[name])
        old_words, new_words = old.pop("words", {}), new.pop("words", {})
        for key in [*old_words, *(key for key in new_words if key not in old_words)]:
            if old_words.get(key) != new_words.get(key):
                comparison.words.append(
                    (f"{name} {key}", old_words.get(key, ""), new_words.get(key, ""))
                )
        if old != new:
            comparison.differences.append((name, list(_changes(before[name], after[name]))))
            continue
        for text, other in zip(old_errors, new_errors, strict=True):
            if text != other:
                comparison.error_texts.append((name, text, other))
    return comparison


def _without_errors(answer: Answer) -> tuple[Answer, list[str]]:
    """An answer with the texts of its errors taken out, and these texts."""
    texts: list[str] = []
    answer = dict(answer)
    if "text" in answer:
        answer["text"] = _without_error(answer["text"], "", texts)
    if "lines" in answer:
        answer["lines"] = [_without_error(line, "data: ", texts) for line in answer["lines"]]
    return answer, texts


def _without_error(text: str, prefix: str, texts: list[str]) -> str:
    if not text.startswith(prefix + '{"error":'):
        return text
    try:
        error = json.loads(text.removeprefix(prefix))["error"]
    except ValueError:
        return text
    message = error.get("message") if isinstance(error, dict) else error
    written = json.dumps(message, ensure_ascii=False)
    if not isinstance(message, str) or written not in text:
        return text
    texts.append(message)
    return text.replace(written, ERROR_TEXT, 1)


def _changes(before: Answer, after: Answer) -> Iterator[str]:
    """Lines of a diff of two answers, cut to a readable length."""
    lines = (_printed(before), _printed(after))
    for number, line in enumerate(difflib.unified_diff(*lines, n=0, lineterm="")):
        if number == 40:
            yield "..."
            return
        if number > 1 and not line.startswith("@@"):
            yield line if len(line) <= 600 else f"{line[:600]}..."


def _printed(answer: Answer) -> list[str]:
    """An answer as lines: each header, and each line of the body, by itself."""
    head = [
        f"{key}: {value}"
        for key, value in answer.items()
        if key not in ("headers", "text", "lines", "words")
    ]
    body = answer["lines"] if "lines" in answer else re.split(r"(?<=,)|\n", answer.get("text", ""))
    return [*head, *(f"{name}: {value}" for name, value in answer.get("headers", ())), *body]
