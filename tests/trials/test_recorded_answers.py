"""The comparison of recordings finds each kind of difference that is planted, and takes ids and
times for none.
"""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.generate_reference import DOCS
from tests.trials import recorded_corpus
from tests.trials.corpus import Row, http, post
from tests.trials.corpus_refusals import SERVERS
from tests.trials.recorded_answers import Answer, Comparison, compare, normal

# Routes that are younger than the corpus; tests of their own ask them.
YOUNGER = {
    *(
        "/v1/fim/completions",
        "/fim/completions",
        "/v1/decisions",
        "/v1/systemone",
        "/completion",
        "/apply-template",
        "/props",
    ),
    *("/v1/completions/render", "/v1/chat/completions/render", "/monitor", "/monitor/cache"),
}
PLAIN = post("plain", "/generate", {})
JSON, EVENTS, TEXT = ("application/json", "text/event-stream; charset=utf-8", "text/plain")


def answer(
    body: str, kind: str = JSON, status: int = 200, row: Row = PLAIN, **headers: str
) -> Answer:
    """The normal form of an answer with this body. In the name of a header, `_` stands for a
    hyphen.
    """
    named = {"content-type": kind, "content-length": str(len(body.encode()))} | headers
    pairs = [(name.replace("_", "-"), value) for name, value in named.items()]
    return normal(row, status, pairs, body.encode(), {})


def compared(before: Answer, after: Answer) -> Comparison:
    return compare({"a": before}, {"a": after})


def event(data: Any) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


def chunk(choice: int, text: str) -> str:
    return event({"choices": [{"index": choice, "text": text}]})


HEX = ("0123456789abcdef", "fedcba9876543210")
SAME = [
    pytest.param(
        *(
            answer("{}", date=f"Mon, {day}", x_request_id=id, x_total_time=f"{day}.5")
            for day, id in zip((1, 22), HEX, strict=True)
        ),
        id="head",
    ),
    pytest.param(
        *(answer(f'{{"id":"cmpl-{id * 2}","created":{len(id)}}}') for id in HEX), id="answer id"
    ),
    pytest.param(
        *(answer(f'{{"created":{time}}}') for time in (1, 1763862000)),
        id="created, of another length",
    ),
    pytest.param(
        *(answer(f'{{"timings":{{"prompt_n":1,"prompt_ms":{time}}}}}') for time in (0.5, "1e-03")),
        id="timings",
    ),
    pytest.param(
        *(answer(f'{{"seed":{seed}}}') for seed in (5 * 10**17, 6 * 10**18)), id="drawn seed"
    ),
    pytest.param(
        *(
            answer(f"id: {id}.1\ndata: 1\n\n", EVENTS, x_stream_id=id)
            for id in ("some-id", "another")
        ),
        id="stream id",
    ),
    pytest.param(
        *(answer("{}", status=429, retry_after=wait) for wait in ("1", "30")), id="estimated wait"
    ),
    pytest.param(
        answer(chunk(0, "a") + chunk(0, "b") + chunk(1, "c") + "data: [DONE]\n\n", EVENTS),
        answer(chunk(1, "c") + chunk(0, "a") + chunk(0, "b") + "data: [DONE]\n\n", EVENTS),
        id="order of choices",
    ),
    pytest.param(
        *(
            answer(
                f'# TYPE a counter\na_total{{x="1"}} {value}\n',
                TEXT,
                row=Row("m", b"GET /", metrics=True),
            )
            for value in (1, 2.5)
        ),
        id="samples",
    ),
]
DIFFERENT = [
    pytest.param(answer("{}"), answer("{}", status=201), id="status"),
    pytest.param(answer("{}"), answer("{}", JSON + "; charset=utf-8"), id="header"),
    pytest.param(answer("{}"), answer("{}", x_more="1"), id="another header"),
    pytest.param(
        answer("{}"), answer("{}", content_length="7"), id="content-length that is not the body's"
    ),
    pytest.param(
        answer("{}", x_request_id="mine"),
        answer("{}", x_request_id=HEX[0]),
        id="the client's own request id",
    ),
    pytest.param(
        answer("{}", status=503, retry_after="1"),
        answer("{}", status=503, retry_after="2"),
        id="fixed wait",
    ),
    pytest.param(answer('{"a":1,"b":2}'), answer('{"b":2,"a":1}'), id="order of keys"),
    pytest.param(answer('{"a":1}'), answer('{"a": 1}'), id="a space"),
    pytest.param(answer('{"logprob":-1.25}'), answer('{"logprob":-1.2500001}'), id="a last digit"),
    pytest.param(answer('{"seed":7}'), answer('{"seed":8}'), id="given seed"),
    pytest.param(
        answer('{"error":"a","error_type":"x"}'),
        answer('{"error":"b","error_type":"y"}'),
        id="type of an error",
    ),
    pytest.param(
        answer('{"error":{"message":"a","code":1}}'),
        answer('{"error":{"message":"b","code":2}}'),
        id="code of an error",
    ),
    pytest.param(
        answer('{"error":"a"}'), answer('{"error":{"message":"a"}}'), id="form of an error"
    ),
    pytest.param(answer(event(1) + event(2), EVENTS), answer(event(1), EVENTS), id="missing event"),
    pytest.param(
        answer(event(1) + event(2), EVENTS),
        answer(event(2) + event(1), EVENTS),
        id="order of events",
    ),
    pytest.param(
        answer(chunk(1, "a") + chunk(1, "b"), EVENTS),
        answer(chunk(1, "b") + chunk(1, "a"), EVENTS),
        id="order within a choice",
    ),
    pytest.param(answer("data: 1\n\n", EVENTS), answer("data: 1\r\n\r\n", EVENTS), id="line ends"),
    pytest.param(
        answer("id: x.1\ndata: 1\n\n", EVENTS),
        answer("id: x.2\ndata: 1\n\n", EVENTS),
        id="number of an event",
    ),
    *(
        pytest.param(
            *(
                answer(text, TEXT, row=Row("m", b"GET /", metrics=True))
                for text in ('# TYPE a counter\na_total{x="1"} 1\n', other)
            ),
            id=what,
        )
        for what, other in {
            "name of a metric": '# TYPE a counter\nb_total{x="1"} 1\n',
            "label of a metric": '# TYPE a counter\na_total{y="1"} 1\n',
            "type of a metric": '# TYPE a gauge\na_total{x="1"} 1\n',
        }.items()
    ),
    *(
        pytest.param(
            *(
                answer(json.dumps({"paths": paths}), row=Row("o", b"GET /", openapi=True))
                for paths in ({"/a": {"get": {}}}, other)
            ),
            id=what,
        )
        for what, other in {
            "path in OpenAPI": {"/b": {"get": {}}},
            "method in OpenAPI": {"/a": {"post": {}}},
            "more in OpenAPI": {"/a": {"get": {"deprecated": True}}},
        }.items()
    ),
]


@pytest.mark.parametrize(("before", "after"), SAME)
def test_ids_and_times_are_no_difference(before: Answer, after: Answer) -> None:
    assert compared(before, after) == Comparison(1)


@pytest.mark.parametrize(("before", "after"), DIFFERENT)
def test_a_planted_difference_is_found(before: Answer, after: Answer) -> None:
    (found,) = compared(before, after).differences
    assert found[0] == "a" and len(found[1]) >= 1
    assert not compared(before, before).differences


def test_a_missing_answer_is_a_difference() -> None:
    assert compare({"a": answer("{}")}, {}).differences == [("a", ["only before"])]
    assert compare({}, {"a": answer("{}")}).differences == [("a", ["only after"])]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            answer('{"error":"old \\"é\\"","error_type":"x"}', status=422),
            answer('{"error":"a new","error_type":"x"}', status=422),
        ),
        (
            answer('{"error":{"message":"old \\"é\\"","code":1}}'),
            answer('{"error":{"message":"a new","code":1}}'),
        ),
        (
            answer('data: {"error":"old \\"é\\""}\n\n', EVENTS),
            answer('data: {"error":"a new"}\n\n', EVENTS),
        ),
    ],
)
def test_error_texts_are_listed_apart(before: Answer, after: Answer) -> None:
    comparison = compared(before, after)
    assert comparison == Comparison(1, error_texts=[("a", 'old "é"', "a new")])
    assert '| a | old "é" | a new |' in comparison.report()


def test_descriptions_are_listed_apart() -> None:
    metrics, openapi = Row("m", b"GET /", metrics=True), Row("o", b"GET /", openapi=True)
    help_texts = [
        answer(f"# HELP a {text}\n# TYPE a gauge\na 1\n", TEXT, row=metrics)
        for text in ("Old.", "New.")
    ]
    assert compared(*help_texts) == Comparison(1, words=[("a a", "Old.", "New.")])
    documents = [
        answer(
            json.dumps(
                {"paths": {"/a": {"description": text, "x": {"description": {"type": "string"}}}}}
            ),
            row=openapi,
        )
        for text in ("old", "new")
    ]
    assert compared(*documents) == Comparison(1, words=[("a /paths//a/description", "old", "new")])


def test_of_a_stream_that_is_ended_only_the_end_is_kept() -> None:
    row = Row("ended", http("GET", "/v1/streams/x"), ends=True)
    error = event({"error": "cancelled"})
    bodies = [f"id: s.1\n{event(1)}id: s.2\n{error}", f"id: s.1\n{error}"]
    first, second = (
        normal(row, 200, [("content-type", EVENTS)], body.encode(), {"s": "a"}) for body in bodies
    )
    assert first == second and first["lines"][0] == "id: STREAM-a.N"


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    names = [
        f"{server.name} {row.name}"
        for server in SERVERS
        for row in (*server.rows, *server.draining)
    ]
    assert len(names) >= 300 and len(set(names)) == len(names)


def test_every_route_is_asked() -> None:
    """Methods and paths of the reference's routes, against the table."""
    asked = [
        row.request.decode("latin-1").split(" ", 2)[:2] for server in SERVERS for row in server.rows
    ]
    operations = re.findall(
        r"^### `(\w+) (/\S*)`", (DOCS / "reference" / "http.md").read_text(), re.MULTILINE
    )
    assert len(operations) > 15
    for method, path in operations:
        if path not in YOUNGER:
            pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))
            assert any(
                other == method and re.fullmatch(pattern, target.split("?")[0])
                for other, target in asked
            ), (method, path)


def test_the_command_compares_files(tmp_path: Path) -> None:
    before = tmp_path / "before.json.gz"
    after = tmp_path / "after.json"
    report = tmp_path / "report.md"
    before.write_bytes(gzip.compress(json.dumps({"answers": {"a": answer("{}")}}).encode()))
    for status, exit_status in ((200, 0), (400, 1)):
        after.write_text(json.dumps({"answers": {"a": answer("{}", status=status)}}))
        assert (
            recorded_corpus.main(["compare", str(before), str(after), "--output", str(report)])
            == exit_status
        )
    assert "### a" in report.read_text() and "+status: 400" in report.read_text()
