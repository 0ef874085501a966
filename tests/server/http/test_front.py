"""Malformed and hostile requests, numbered B01 to B67, are sent as bytes over sockets to two real
servers, which must survive them.

Bad bodies are listed in tests/support/bad_inputs.py, bad HTTP here. One server is open; the other
has API keys, few pages and short timeouts. After the last request each must have its first engine
process, give the same bytes for fixed requests, have generated only what it answered with 200, and
have no secret, traceback or forged line in its log.
"""

import gzip
import json
import re
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from server.config import ServerSection
from server.http.connection import MAX_HEAD_BYTES
from tests.conftest import CHAT_TEMPLATE
from tests.support import bad_inputs
from tests.support.bad_inputs import (
    ALL,
    BEARER,
    COMPLETIONS,
    GENERATE,
    GOOD,
    JSON,
    KEYS,
    MAX_BODY,
    OK,
    SECRET,
    STREAM,
    Case,
    document,
    post,
)
from tests.support.checkpoints import N_POSITIONS, SHAPES, make_tokenizer
from tests.support.processes import ServerProcess, wait_until
from tests.support.raw_http import Reply, answer_problem, error_problem, exchange

STREAMS = "/v1/streams"
RETENTION = 3
BOMB = gzip.compress(b" " * 10**7)
SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}

# --- heads of requests whose bodies are good: (id, name, headers, status)

HEADERS: list[tuple[str, str, str, int]] = [
    ("B19", "charset=latin-1", "content-type: application/json; charset=latin-1\r\n", 415),
    ("B58", "no content-type", "", 415),
    ("B58", "an empty content-type", "content-type: \r\n", 415),
    ("B58", "text/plain", "content-type: text/plain\r\n", 415),
    ("B58", "multipart", "content-type: multipart/form-data; boundary=application/json\r\n", 415),
    ("B58", "two of them", f"{JSON}{JSON}", 415),
    ("B58", "two that differ", f"{JSON}content-type: text/plain\r\n", 415),
    ("B58", "with a parameter", "content-type: Application/JSON ; x=y\r\n", OK),
    ("B59", "gzip", f"{JSON}content-encoding: gzip\r\n", 415),
    ("B59", "br", f"{JSON}content-encoding: br\r\n", 415),
    ("B60", "accept: image/png", f"{JSON}accept: image/png\r\n", OK),  # Ignored.
    ("B60", "no accept", JSON, OK),
    # Another protocol is offered, and need not be taken: RFC 9110, 7.8.
    ("B62", "an upgrade to websocket", f"{JSON}upgrade: websocket\r\nconnection: upgrade\r\n", OK),
    ("B62", "an upgrade to HTTP/2", f"{JSON}upgrade: h2c\r\nconnection: upgrade\r\n", OK),
    ("B65", "x-request-id of 10 KB", f"{JSON}x-request-id: {'a' * 10**4}\r\n", OK),
    ("B65", "x-request-id that is no word", f"{JSON}x-request-id: {SECRET} \x80\r\n", OK),
    (
        "B65",
        "x-request-id with a line break",
        f"{JSON}x-request-id: a\r\nx-forged: {SECRET}\r\n",
        OK,
    ),
]

# --- whole requests that are no HTTP, or HTTP that may be read in two ways: (id, name, template,
# status). {path}, {body}, {length} and {chunks} are those of a good request, {second} is another
# one, which must not be run.

FRAMED = "content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}{second}"
CHUNKED = "content-type: application/json\r\n{te}\r\n\r\n{chunks}{second}"
LINE = "POST {path} HTTP/1.1\r\nhost: localhost\r\n"
HTTP: list[tuple[str, str, str, int]] = [
    ("B35", "a negative length", LINE + JSON + "content-length: -5\r\n\r\n{body}", 400),
    ("B35", "a length with a sign", LINE + JSON + "content-length: +5\r\n\r\n{body}", 400),
    ("B35", "a length in hexadecimal", LINE + JSON + "content-length: 0x20\r\n\r\n{body}", 400),
    (
        "B35",
        "a length of 30 digits",
        LINE + JSON + f"content-length: {'9' * 30}\r\n\r\n" + "{body}",
        400,
    ),
    ("B35", "two lengths", LINE + "content-length: 5\r\n" + FRAMED, 400),
    ("B35", "two lengths in one", LINE + JSON + "content-length: 5, 5\r\n\r\n{body}", 400),
    ("B61", "a lower-case method", "post {path} HTTP/1.1\r\nhost: localhost\r\n" + FRAMED, 400),
    ("B61", "a proxy's method", "CONNECT {path} HTTP/1.1\r\nhost: localhost\r\n" + FRAMED, 405),
    ("B61", "an authority", "CONNECT a.example:443 HTTP/1.1\r\nhost: a.example\r\n\r\n", 405),
    ("B61", "an unknown method", "NONSENSE {path} HTTP/1.1\r\nhost: localhost\r\n" + FRAMED, 400),
    ("B62", "length and chunks", LINE + "transfer-encoding: chunked\r\n" + FRAMED, 400),
    (
        "B62",
        "chunked twice",
        LINE + CHUNKED.replace("{te}", "transfer-encoding: chunked\r\ntransfer-encoding: identity"),
        400,
    ),
    ("B62", "xchunked", LINE + CHUNKED.replace("{te}", "transfer-encoding: xchunked"), 400),
    (
        "B62",
        "chunked, and then not",
        LINE + CHUNKED.replace("{te}", "transfer-encoding: chunked, gzip"),
        400,
    ),
    ("B62", "a folded line", LINE + "x-a: b\r\n c: d\r\n" + FRAMED, 400),
    ("B62", "a space before the colon", LINE + "x-a : b\r\n" + FRAMED, 400),
    (
        "B62",
        "a space before transfer-encoding's colon",
        LINE + CHUNKED.replace("{te}", "transfer-encoding : chunked"),
        400,
    ),
    ("B62", "bare line feeds", (LINE + "x-a: b\r\n").replace("\r\n", "\n") + FRAMED, 400),
    ("B62", "a bare line feed", LINE + "x-a: b\nx-b: c\r\n" + FRAMED, 400),
    ("B62", "a bare carriage return", LINE + "x-a: b\rx-b: c\r\n" + FRAMED, 400),
    ("B62", "NUL in a header", LINE + "x-a: b\0c\r\n" + FRAMED, 400),
    ("B62", "NUL in a name", LINE + "x\0a: b\r\n" + FRAMED, 400),
    ("B62", "a header without a name", LINE + ": b\r\n" + FRAMED, 400),
    (
        "B62",
        "a chunk's size that overflows",
        LINE + JSON + f"transfer-encoding: chunked\r\n\r\n{'F' * 17}\r\n" + "{body}\r\n0\r\n\r\n",
        400,
    ),
    (
        "B62",
        "a chunk's size that is none",
        LINE + JSON + "transfer-encoding: chunked\r\n\r\n-1\r\n{body}\r\n0\r\n\r\n",
        400,
    ),
    (
        "B62",
        "a chunk that is longer",
        LINE + JSON + "transfer-encoding: chunked\r\n\r\n5\r\n{body}\r\n0\r\n\r\n{second}",
        400,
    ),
    ("B62", "101 headers", LINE + "".join(f"x-{i}: y\r\n" for i in range(101)) + FRAMED, 431),
    (
        "B62",
        "a header above the limit",
        LINE + f"x-a: {'b' * bad_inputs.MAX_HEADERS}\r\n" + FRAMED,
        431,
    ),
    ("B62", "a header of 64 KB", LINE + f"x-a: {'b' * 2**16}\r\n" + FRAMED, 431),
    ("B62", "a header of 3 MB", LINE + f"x-a: {'b' * 3 * 10**6}\r\n" + FRAMED, 431),
    ("B62", "a name of 3 MB", LINE + f"{'b' * 3 * 10**6}: a\r\n" + FRAMED, 431),
    ("B62", "TLS", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "\x00" * 60, 400),
    ("B62", "HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
]
# Targets beside the routes: (target, status with a key, status without), for the server that has
# keys. Whatever is routed is guarded.
TARGETS: list[tuple[str, int, int]] = [
    ("http://localhost{path}", OK, 401),  # Every server has to take it: RFC 9112, 3.2.2.
    ("/{path}", 404, 401),
    ("/v1/../health", 404, 401),
    ("/health/..{path}", 404, 401),
    ("/health%2f..%2f{path}", 404, 401),
    ("/live{path}", 404, 401),
    ("/live/", 404, 401),
    ("{path};/live", 404, 401),
    ("{path}%00/live", 404, 401),
    ("{path}?/live", OK, 401),
    ("{path}%3f/live", 404, 401),
]
# Without the right key: one answer to all of them.
NO_KEYS: list[tuple[str, str]] = [
    ("missing", ""),
    ("a wrong key", "authorization: Bearer wrong\r\n"),
    ("a wrong key, lower-case bearer", "authorization: bearer x\r\n"),
    ("the key in another case", f"authorization: Bearer {KEYS[0].lower()}\r\n"),
    ("the key twice", BEARER + BEARER),
    ("a wrong key and the right one", f"authorization: Bearer x\r\n{BEARER}"),
    ("the key and more", BEARER.replace("\r\n", "x\r\n")),
    ("the key's beginning", BEARER.replace(KEYS[0], KEYS[0][:-1])),
    ("no key", "authorization: Bearer \r\n"),
    ("no scheme", f"authorization: {KEYS[0]}\r\n"),
    ("another scheme", f"authorization: Basic {KEYS[0]}\r\n"),
    ("no ASCII", "authorization: Bearer \xe9\xff\r\n"),
    ("a key of 10 KB", f"authorization: Bearer {'a' * 10**4}\r\n"),
]


def chunks(body: str, size: int = 40) -> str:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return "".join(f"{len(part):x}\r\n{part}\r\n" for part in parts) + "0\r\n\r\n"


def whole(template: str, path: str) -> bytes:
    """An HTTP request as bytes, from a template."""
    body = GOOD[path]
    parts = {
        "path": path,
        "body": body,
        "length": str(len(body)),
        "chunks": chunks(body),
        "second": post(path, body).decode(),
    }
    return re.sub(r"\{(\w+)\}", lambda match: parts[match[1]], template).encode("latin-1")


def http_cases() -> Iterator[Case]:
    """Cases with malformed heads and framing."""
    for path in ALL:
        for id, name, headers, status in HEADERS:
            yield Case(id, name, path, post(path, GOOD[path], headers), status)
        for id, name, template, status in HTTP:
            yield Case(id, name, path, whole(template, path), status, protocol=True, closes=True)
        yield Case(
            "B59", "a bomb", path, post(path, BOMB, f"{JSON}content-encoding: gzip\r\n"), 415
        )
        for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS"):
            yield Case(
                "B61", method, path, post(path, GOOD[path], method=method), 405, headers=("allow",)
            )
        yield Case("B63", "the path in capitals", path, post(path.upper(), GOOD[path]), 404)
        yield Case("B63", "a second slash", path, post(f"/{path}", GOOD[path]), 404)
        yield Case("B63", "the whole URL", path, post(f"http://localhost{path}", GOOD[path]), OK)
        yield from size_cases(path)


def size_cases(path: str) -> Iterator[Case]:
    """Bodies of the wrong length."""
    body = GOOD[path]
    yield Case("B32", "as long as may be", path, post(path, body.ljust(MAX_BODY)), OK)
    yield Case(
        "B32",
        "a byte too long",
        path,
        post(path, body.ljust(MAX_BODY + 1)),
        413,
        ("server.max_body_bytes",),
    )
    # Of a body that is refused while it comes, the rest is waited for as long as for any, and
    # thrown away.
    head = whole(
        f"POST {{path}} HTTP/1.1\r\nhost: localhost\r\n{JSON}{BEARER}transfer-encoding: "
        "chunked\r\n\r\n",
        path,
    )
    yield Case(
        "B33",
        "a GB in chunks",
        path,
        head,
        413,
        closes=True,
        guarded=True,
        more=b"100000\r\n" + b" " * 2**20 + b"\r\n",
    )
    short = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}content-length: "
        f"{len(body) - 1}\r\n\r\n{body}"
    ).encode()
    yield Case("B34", "a length that is short", path, short, 400)
    long = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}{BEARER}content-length: "
        f"{len(body) + 9}\r\n\r\n{body}"
    ).encode()
    yield Case(
        "B34", "a length that is long", path, long, 408, protocol=True, closes=True, guarded=True
    )
    line = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}{BEARER}expect: 100-continue\r\n"
    for name, length in (
        ("too long, and asks first", MAX_BODY + 1),
        ("a GB, and asks first", 10**9),
    ):
        yield Case(
            "B67",
            name,
            path,
            f"{line}content-length: {length}\r\n\r\n".encode(),
            413,
            closes=True,
            guarded=True,
        )


def key_cases() -> Iterator[Case]:
    """Cases for the server with API keys."""
    for path in ALL:
        yield Case("B64", "the key", path, post(path, GOOD[path], JSON + BEARER), OK, guarded=True)
        for name, header in NO_KEYS:
            request = post(path, GOOD[path], JSON + header)
            yield Case("B64", name, path, request, 401, headers=("www-authenticate",), guarded=True)
        request = post(f"{path}?api_key={KEYS[0]}&key={KEYS[0]}", GOOD[path])
        yield Case(
            "B64",
            "the key in the query",
            path,
            request,
            401,
            headers=("www-authenticate",),
            guarded=True,
        )
        request = post(path, GOOD[path], f"{JSON}authorization: Bearer {'a' * 10**6}\r\n")
        yield Case(
            "B64", "a key of 1 MB", path, request, 431, protocol=True, closes=True, guarded=True
        )
        yield Case("B64", "a bad body and no key", path, post(path, "{"), 401, guarded=True)
        for target, known, unknown in TARGETS:
            at = target.replace("{path}", path)
            for header, status in ((BEARER, known), ("", unknown)):
                yield Case(
                    "B63",
                    f"{target} {header[:13]}",
                    path,
                    post(at, GOOD[path], JSON + header),
                    status,
                    guarded=True,
                )


def stream_cases() -> Iterator[Case]:
    """A stream's id and place, for a finished stream of the first key on each route."""
    wrong = (
        "garbage",
        "1",
        ".1",
        "{stream}",
        "{stream}.",
        "{stream}.x",
        "{stream}.-1",
        "{stream}.99999",
        "{stream}x.1",
        "{stream}.1.1",
    )
    own, other = BEARER, BEARER.replace(*KEYS)
    for path in ALL:
        for value in wrong:
            yield follow(path, f"last-event-id {value}", 400, f"{own}last-event-id: {value}\r\n")
        for value in ("x", "-1", "99999", "1.5", ""):
            yield follow(path, f"after {value!r}", 400, own, f"?after={value}")
        yield follow(path, "NUL", 400, f"{own}last-event-id: {{stream}}.1\0\r\n", protocol=True)
        yield follow(path, "1 MB", 431, f"{own}last-event-id: {'1' * 10**6}\r\n", protocol=True)
        for headers, name in (
            (other, "another's"),
            (f"{other}last-event-id: {{stream}}.1\r\n", "another's, with its id"),
        ):
            yield follow(path, name, 404, headers)
        yield follow(path, "no key", 401, "")
        yield follow(path, "another's, to be cancelled", 404, other, method="DELETE")
        yield follow(path, "none such", 404, own, "-none")


def follow(
    path: str,
    name: str,
    status: int,
    headers: str,
    behind: str = "",
    method: str = "GET",
    protocol: bool = False,
) -> Case:
    line = f"{method} {STREAMS}/{{stream}}{behind} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n"
    return Case(
        "B66",
        name,
        path,
        line.encode("latin-1"),
        status,
        protocol=protocol,
        closes=protocol,
        guarded=True,
    )


CASES = [
    *bad_inputs.body_cases(),
    *bad_inputs.value_cases(),
    *bad_inputs.choice_cases(),
    *bad_inputs.prompt_cases(),
]
CASES += [*http_cases(), *key_cases(), *stream_cases()]


class Door:
    """A server, its initial state, and its replies so far."""

    def __init__(self, folder: Path, headers: str, *arguments: str, **named: Any) -> None:
        self.server = ServerProcess(folder, *arguments, **named)
        self.headers = headers
        self.log: list[str] = []
        self.sequences = 0
        # The different ones of each id, status and path.
        self.bodies: dict[tuple[str, int, str], set[bytes]] = defaultdict(set)
        self._reader = Thread(target=lambda: self.log.extend(self.server.process.stderr or ()))
        self._reader.start()  # A pipe that nobody reads fills up.
        self.engine_pid = self.server.engine_pid
        self.canaries = self.sing()

    def sing(self) -> list[object]:
        """The text of a fixed request on each route."""
        said: list[object] = []
        for path in ALL:
            request = post(
                path,
                document(path, '"max_tokens":8,"temperature":1.5,"seed":3', '"def f("'),
                JSON + self.headers,
            )
            reply = exchange(self.server.port, request)
            assert reply is not None and reply.status == OK, reply
            self.sequences += 1
            body = json.loads(reply.body)
            said.append(body["generated_text"] if path == GENERATE else body["choices"])
        return said

    def stream(self, path: str) -> bytes:
        """The id of a finished resumable stream of the first key."""
        body = f'{GOOD[path][:-1]},"stream":true,"resumable":true}}'
        reply = exchange(self.server.port, post(path, body, JSON + BEARER))
        assert reply is not None and reply.status == OK, reply
        self.sequences += 1
        return (reply.header("x-stream-id") or "").encode()

    def generated(self) -> tuple[int, int]:
        """Numbers of sequences that were submitted to the engine and that failed."""
        found = re.findall(
            r'^onehead_requests_total\{outcome="(\w+)"\} ([0-9.]+)$',
            self.server.get("/metrics")[1],
            re.M,
        )
        outcomes = {name: int(float(count)) for name, count in found if name != "refused"}
        return sum(outcomes.values()), outcomes.get("failed", 0)

    def close(self) -> None:
        """Checks the state of the server, and ends it."""
        try:
            assert self.sing() == self.canaries
            assert self.server.engine_pid == self.engine_pid
            assert self.generated() == (self.sequences, 0)
            # Not of HTTP as it is spoken here.
            assert not [key for key in self.bodies if key[1] >= 500 and key[1] not in (501, 505)]
            # Who has no key is told no more than that, and neither is whoever asks for a stream
            # that is not theirs.
            assert all(
                len(bodies) == 1
                for key, bodies in self.bodies.items()
                if key[:2] in (("B64", 401), ("B66", 404))
            )
        finally:
            status = self.server.stop(signal.SIGINT)
            self._reader.join(10)
        assert status == 0
        known = re.compile(
            r"(\d{4}-\d\d-\d\dT[0-9:.]+Z [A-Z]+ [a-z.]+|tiny): [^\x00-\x1f\x7f-\x9f]*\n"
        )
        assert not [line for line in self.log if not known.fullmatch(line)]
        assert not [
            line for line in self.log if any(word in line for word in ("Traceback", SECRET, *KEYS))
        ]


@pytest.fixture(scope="module")
def chat_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a chat template, under the name that the table calls it by."""
    folder = tmp_path_factory.mktemp("front") / bad_inputs.MODEL
    folder.mkdir()
    for path in tiny_folder.iterdir():
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def open_door(chat_folder: Path) -> Iterator[Door]:
    door = Door(chat_folder, "")
    yield door
    door.close()


@pytest.fixture(scope="module")
def guarded_door(chat_folder: Path) -> Iterator[Door]:
    keys = f"--server.api_keys={bad_inputs.KEY_HASHES}"
    pages = f"--cache.pages={bad_inputs.FEW_PAGES}"
    constants = {"server.http.connection.BODY_SECONDS": 0.3}
    door = Door(
        chat_folder,
        BEARER,
        keys,
        pages,
        f"--server.resume_retention={RETENTION}",
        constants=constants,
    )
    yield door
    door.close()


def check(case: Case, reply: Reply) -> None:
    """Fails if an answer is not the expected one."""
    assert reply.status == case.status, (reply.status, reply.body[:300])
    for name, value in SECURITY.items():
        assert reply.header(name) == value, name
    assert all(reply.header(name) for name in case.headers)
    assert not [name for name, _ in reply.headers if name.startswith("access-control")]
    if case.closes:
        assert reply.closed and reply.rest == b"", (
            "the connection goes on",
            reply.closed,
            reply.rest[:80],
        )
    if case.id == "B65":
        assert re.fullmatch("[0-9a-f]{16,64}|a", reply.header("x-request-id") or "")
    if reply.status == OK:
        assert answer_problem(reply) is None
        assert case.shows is None or case.shows(json.loads(reply.body)), reply.body[:500]
    else:
        check_refusal(case, reply)


def check_refusal(case: Case, reply: Reply) -> None:
    """Fails if a refusal has the wrong form or reveals a key or a prompt."""
    # What is no route may be asked for in either dialect, and what follows a short body may be
    # refused before it.
    openai: bool | None = case.protocol or case.id == "B66" or case.path != GENERATE
    openai = None if case.status in (401, 404) or case.id == "B34" else openai
    assert error_problem(reply, openai) is None, reply
    assert SECRET.encode() not in reply.body and not any(key.encode() in reply.body for key in KEYS)
    error = json.loads(reply.body)["error"]
    message = error["message"] if isinstance(error, dict) else error
    assert not [word for word in case.words if word not in message], message
    assert case.code is None or not isinstance(error, dict) or error["code"] == case.code, error
    assert not case.more or reply.num_sent < 8 * MAX_BODY
    assert case.id != "B67" or not reply.interim


def ask(door: Door, case: Case) -> Reply:
    """The reply to a case's request, recorded for the checks of Door.close."""
    request = case.request
    if STREAM in request:
        request = request.replace(STREAM, door.stream(case.path))
    reply = exchange(door.server.port, request, case.more, to_end=case.closes)
    assert reply is not None, "the connection ended without an answer"
    door.bodies[case.id, reply.status, case.path].add(reply.body)
    door.sequences += case.sequences * (reply.status == OK)
    return reply


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case.label)[1:-1])
def test_input(case: Case, request: pytest.FixtureRequest) -> None:
    door: Door = request.getfixturevalue("guarded_door" if case.guarded else "open_door")
    check(case, ask(door, case))


def test_requests_that_do_not_wait(open_door: Door) -> None:
    """Also case B62: many pipelined requests on one connection. Door.close checks the log."""
    get = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"
    upgrade = get + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
    reply = exchange(
        open_door.server.port,
        upgrade * 128 + get + b"connection: close\r\n\r\n",
        to_end=True,
    )
    assert reply is not None and reply.closed and reply.rest.count(b"HTTP/1.1 200 OK\r\n") == 128
    reply = exchange(open_door.server.port, (get + b"\r\n") * 3 + b"\0\r\n\r\n", to_end=True)
    assert reply is not None and reply.closed


def test_an_expired_stream(guarded_door: Door) -> None:
    """Also case B66: an expired stream answers 410 to its owner and 404 to other callers."""
    id = guarded_door.stream(COMPLETIONS)

    def get(header: str) -> Reply:
        reply = exchange(
            guarded_door.server.port,
            f"GET {STREAMS}/{id.decode()} HTTP/1.1\r\nhost: localhost\r\n{header}\r\n".encode(),
        )
        assert reply is not None
        return reply

    assert get(BEARER).status == OK
    reply = wait_until(
        lambda: (reply := get(BEARER)).status != OK and reply, "the stream expires", 10 * RETENTION
    )
    assert reply.status == 410 and json.loads(reply.body)["error"]["code"] == "stream_expired"
    assert get(BEARER.replace(*KEYS)).status == 404


def test_nothing_is_forgotten() -> None:
    """The table has every input on every route where it applies, and its constants fit the
    checkpoint.
    """
    routes = defaultdict(set)
    for case in CASES:
        routes[case.id].add(case.path)
    # Of messages, which /generate has none of.
    assert {id for id, paths in routes.items() if paths != set(ALL)} == {"B56"}
    assert make_tokenizer().token_to_id("a") == bad_inputs.LETTER_A
    assert (N_POSITIONS, SHAPES[0].vocab_size) == (bad_inputs.CONTEXT, bad_inputs.VOCABULARY)
    assert (ServerSection().max_body_bytes, MAX_HEAD_BYTES) == (MAX_BODY, bad_inputs.MAX_HEADERS)
