"""Whatever is sent to a real server, its answer fits, it comes soon, and the next request is served
as ever.

    python -m tests.trials.fuzz_http --output DIR [--minutes 30] [--seed N]

Takes turns between requests that Schemathesis makes of the server's own /openapi.json, good ones
and bad ones, and raw bytes: damaged requests of support/bad_inputs.py, JSON with odd types in every
field, broken framing, odd heads, noise. Up to 16 are sent at once. Each must get a status from 200
to 499 other than 429 (504 where its own `timeout_s` was over; 501 and 505 for another transfer
encoding or version of HTTP), with a body of the dialects' shapes, or no answer but the end of its
connection where it was no whole request; the engine's process must stay, the canary's answers must
be the same bytes, and memory must not grow. Writes fuzz-http.json: counts by kind and status, the
slowest, and every failure with its bytes in base64. Exit status 1 for any.
"""

import argparse
import base64
import copy
import json
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, Unsatisfiable
from hypothesis.strategies import SearchStrategy

from server.http.anthropic.fields import CountBody, MessagesBody
from server.http.decisions.fields import DecisionBody, DecisionQuestion, SystemBody, SystemQuestion
from server.http.embeddings import fields as vectors
from server.http.llama_cpp.fields import InfillBody, LlamaCppCompletionBody
from server.http.mistral.fim import FimBody
from server.http.ollama import fields as ollama
from server.http.openai.chat_fields import ChatBody, TemplateBody
from server.http.openai.fields import CompletionBody
from server.http.responses.fields import ResponsesBody
from server.http.tgi.fields import GenerateBody, Parameters
from server.http.token_fields import DetokenizeBody, TokenizeBody
from tests.support.bad_inputs import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    JSON,
    body_cases,
    choice_cases,
    document,
    post,
    prompt_cases,
    value_cases,
)
from tests.support.checkpoints import SHAPES, make_checkpoint, make_tokenizer
from tests.support.processes import ServerProcess
from tests.support.raw_http import answer_problem, exchange
from tests.support.report import Check, conclude, progress, show, usage

# --- what is sent

FIELDS: dict[str, Any] = {
    "/generate": GenerateBody,
    "/generate_stream": GenerateBody,
    "/": GenerateBody,
}
FIELDS["/v1/decisions"], FIELDS["/v1/systemone"] = DecisionBody, SystemBody
FIELDS |= {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/infill": InfillBody,
}
FIELDS |= {
    "/completion": LlamaCppCompletionBody,
    "/v1/fim/completions": FimBody,
    "/fim/completions": FimBody,
}
FIELDS |= {
    "/apply-template": TemplateBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
FIELDS |= {"/api/generate": ollama.GenerateBody, "/api/chat": ollama.ChatBody}
FIELDS |= {"/v1/messages": MessagesBody, "/v1/messages/count_tokens": CountBody}
FIELDS["/v1/responses"] = ResponsesBody
FIELDS |= {"/api/embed": ollama.EmbedBody, "/api/embeddings": ollama.EmbeddingBody}
FIELDS |= {"/v1/embeddings": vectors.EmbeddingsBody, "/embed": vectors.EmbedBody}
FIELDS |= {"/embedding": vectors.EmbeddingBody, "/v1/rerank": vectors.RerankBody}
FIELDS["/classify"] = vectors.ClassifyBody
FIELDS |= {"/api/show": ollama.ShowBody, "/api/pull": ollama.PullBody}
REQUIRED: dict[str, dict[str, Any]] = {
    path: {"inputs": "def f", "parameters": {"max_new_tokens": 4}} for path in list(FIELDS)[:3]
}
REQUIRED |= {
    "/v1/completions": {"prompt": "def f"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
REQUIRED |= {
    "/v1/decisions": {"input": "x", "questions": [{"type": "predicate", "instructions": "a"}]}
}
REQUIRED |= {"/v1/systemone": {"state": "x", "questions": {"q": {"type": "noul"}}}}
REQUIRED |= {
    "/infill": {"input_prefix": "def f", "input_suffix": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
REQUIRED |= {
    "/completion": {"prompt": "def f"},
    "/apply-template": {"messages": [{"role": "user", "content": "hi"}]},
}
REQUIRED |= {"/api/generate": {"prompt": "def f", "options": {"num_predict": 4}}}
REQUIRED |= {"/api/chat": REQUIRED["/v1/chat/completions"] | {"options": {"num_predict": 4}}}
REQUIRED |= {"/v1/messages": REQUIRED["/v1/chat/completions"] | {"max_tokens": 4}}
REQUIRED |= {"/v1/messages/count_tokens": REQUIRED["/v1/chat/completions"]}
REQUIRED["/v1/responses"] = {"input": "a", "max_output_tokens": 4}
REQUIRED |= {"/api/show": {}, "/api/pull": {}, "/api/embeddings": {"prompt": "a"}}
REQUIRED |= {path: {"input": "a"} for path in ("/v1/embeddings", "/classify", "/api/embed")}
REQUIRED |= {"/embed": {"inputs": "a"}, "/embedding": {"content": "a"}}
REQUIRED["/v1/rerank"] = {"query": "a", "documents": ["b"]}
REQUIRED |= {
    "/v1/fim/completions": {"prompt": "def f", "suffix": "x"},
    "/fim/completions": {"prompt": "def f"},
}
MOST = {
    "max_tokens": 8,
    "max_completion_tokens": 8,
    "max_new_tokens": 8,
    "max_output_tokens": 8,
    "n_predict": 8,
    "num_predict": 8,
    "n": 3,
    "n_cmpl": 3,
    "best_of": 3,
}
LENGTHS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/infill": "n_predict",
}
LENGTHS |= {
    "/completion": "n_predict",
    "/v1/fim/completions": "max_tokens",
    "/fim/completions": "max_tokens",
}
EXTREMES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**31,
    2**63,
    10**400,
    1e308,
    5e-324,
    -0.0,
    "",
    "\0",
    "1",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": None},
]
JSON_VALUES: SearchStrategy[Any] = st.recursive(
    st.sampled_from(EXTREMES) | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
QUESTION_VALUES = JSON_VALUES | st.sampled_from(
    [
        "choice",
        "score",
        "noul",
        "predicate",
        [{"value": "a"}, {"value": True, "description": "b"}],
        [{"value": str(number)} for number in range(30)],
        [{"label": "a"}, {"label": "b"}],
        ["a", "b", "a"],
        {"a": None, "b": "c"},
        {"true": "a"},
    ]
)
TOKENS = (
    b"\r\n|\n|\r|\0|\r\n\r\n|content-length: 5\r\n|transfer-encoding: chunked\r\n|expect: "
    b"100-continue\r\n|connection: close\r\n"
)
TOKENS += (
    b"|host: y\r\n|connection: upgrade\r\nupgrade: websocket\r\n|upgrade: "
    b"h2c\r\n|HTTP/1.0|HTTP/9.9|%00|%2e%2e/|?|#|//|HEAD|CONNECT"
)
TOKENS += b'|\xff|\xed\xa0\x80|"|{|[|\\ud800|1e999|NaN|-1|99999999999999999999|"stream":true,|"n":3,|"temperature":0,'  # noqa: E501
GETS = [
    "/info",
    "/live",
    "/health",
    "/props",
    "/metrics",
    "/v1/models",
    "/v1/models/x",
    "/docs",
    "/v1/streams/x",
    "/plan",
    "/none",
    "*",
]
COMPLETE = ("JSON", "body", "openapi")
"""Kinds that are whole requests, which have to be answered."""
Edit = tuple[str, int, int, bytes]


def bounded(body: Any) -> Any:
    """A body that asks for few tokens, where it is a body."""
    if not isinstance(body, dict):
        return body
    small = {
        key: MOST[key] if key in MOST and type(value) is int and value > MOST[key] else value
        for key, value in body.items()
    }
    return small | {key: bounded(small[key]) for key in ("parameters", "options") if key in small}


def values_of(value: Any) -> list[Any]:
    """The items of a list, or the values of an object."""
    return (
        [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    )


@st.composite
def documents(draw: Any) -> bytes:
    """A request with odd values in some of a route's fields, and now and then one that there is
    not.
    """
    path = draw(st.sampled_from(sorted(FIELDS)))
    body: dict[str, Any] = copy.deepcopy(REQUIRED[path]) | (
        {LENGTHS[path]: 4} if path in LENGTHS else {}
    )
    for name in draw(
        st.lists(
            st.sampled_from(sorted(FIELDS[path].model_fields)) | st.text(max_size=4), max_size=4
        )
    ):
        body[name] = draw(JSON_VALUES)
    if "inputs" in body and draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(sorted(Parameters.model_fields)), max_size=4))
        body["parameters"] = {"max_new_tokens": 4} | {name: draw(JSON_VALUES) for name in names}
    for question in (
        [q for q in values_of(body.get("questions")) if isinstance(q, dict)][:3]
        if draw(st.booleans())
        else ()
    ):
        own = DecisionQuestion if path == "/v1/decisions" else SystemQuestion
        question |= {
            name: draw(QUESTION_VALUES)
            for name in draw(st.lists(st.sampled_from(sorted(own.model_fields)), max_size=3))
        }
    text = json.dumps(bounded(body), ensure_ascii=draw(st.booleans()))
    return post(path, text.encode("utf-8", "surrogatepass"))


def edited(data: bytes, edits: list[Edit]) -> bytes:
    changed = bytearray(data)
    for kind, place, size, token in edits:
        at = place % (len(changed) + 1)
        if kind == "insert":
            changed[at:at] = token
        elif kind == "repeat":
            changed[at:at] = changed[at : at + size] * 3
        else:
            changed[at : at + size] = token[:1] * size if kind == "flip" else b""
    return bytes(changed)


def _reframed(request: bytes, edits: list[Edit]) -> bytes:
    """The body damaged, in a head that fits it."""
    head, _, body = request.partition(b"\r\n\r\n")
    return post(head.split(b" ", 2)[1].decode(), edited(body, edits))


def _chunked(path: str, parts: list[tuple[bytes | None, bytes, bytes]], end: bytes) -> bytes:
    """A body in chunks, each of the size that it has or of another."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}transfer-encoding: chunked\r\n\r\n".encode()  # noqa: E501
    chunks = [
        (b"%x" % len(data) if size is None else size) + b"\r\n" + data + behind
        for size, data, behind in parts
    ]
    return head + b"".join(chunks) + end


def _headed(
    method: bytes,
    path: str,
    query: bytes,
    version: bytes,
    headers: list[tuple[bytes, bytes, bytes]],
    body: bytes,
) -> bytes:
    lines = [
        method + b" " + path.encode() + query + b" " + version,
        b"host: localhost",
        *(b"".join(header) for header in headers),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def raw_strategies() -> dict[str, SearchStrategy[bytes]]:
    """Kind -> requests. All but those of COMPLETE may be anything."""
    cases = (*body_cases(), *value_cases(), *choice_cases(), *prompt_cases())
    known = [case for case in cases if len(case.request) < 2000 and not case.guarded]
    seeds = st.sampled_from(
        [case.request for case in known if case.status == 200]
    ) | st.sampled_from([case.request for case in known])
    kinds = st.sampled_from(["cut", "flip", "insert", "repeat"])
    token = st.sampled_from(TOKENS.split(b"|"))
    edits = st.lists(
        st.tuples(kinds, st.integers(0, 3000), st.integers(1, 6), token), min_size=1, max_size=3
    )
    paths = st.sampled_from([*FIELDS, *GETS])
    sizes = (
        st.none()
        | st.sampled_from(b"5|0|-1|ffffffffffffffff|10000000|5;x=y|5 |x|".split(b"|"))
        | st.binary(max_size=3)
    )
    data = st.binary(max_size=9) | st.sampled_from(
        [b'{"inputs":"a",', b'"prompt":"a"}', b'"parameters":{"max_new_tokens":2}}', b"{"]
    )
    chunks = st.lists(
        st.tuples(sizes, data, st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b""])), max_size=4
    )
    ends = st.sampled_from([b"0\r\n\r\n", b"0\r\nx: \0\r\n\r\n", b"", b"0\r\n"])
    names = st.sampled_from(
        b"x host content-length transfer-encoding accept authorization x-request-id range te".split()  # noqa: E501
    )
    colons = st.sampled_from([b": ", b":", b" : ", b""])
    headers = st.lists(
        st.tuples(names | st.binary(max_size=6), colons, st.binary(max_size=20)), max_size=8
    )
    methods = st.sampled_from(
        b"GET POST PUT HEAD DELETE OPTIONS TRACE PATCH CONNECT get M-SEARCH PRI".split()
    )
    versions = st.sampled_from(
        b"HTTP/1.1 HTTP/1.1 HTTP/1.1 HTTP/1.0 HTTP/2.0 HTTP/0.9 http/1.1".split()
    )
    query = st.just(b"") | st.binary(max_size=9)
    return {
        "JSON": documents(),
        "body": st.builds(_reframed, seeds, edits),
        "request": st.builds(edited, seeds, edits),
        "several": st.builds(edited, st.lists(seeds, min_size=2, max_size=4).map(b"".join), edits),
        "chunks": st.builds(_chunked, paths, chunks, ends),
        "head": st.builds(
            _headed, methods, paths, query, versions, headers, st.binary(max_size=20)
        ),
        "noise": st.binary(min_size=1, max_size=300),
    }


def schema_requests(operation: Any, mode: Any) -> SearchStrategy[bytes]:
    """What Schemathesis makes of an operation, as bytes."""
    import requests

    def raw(case: Any) -> bytes:
        parts = case.as_transport_kwargs(base_url="http://x")
        known = {
            key: parts[key]
            for key in ("method", "url", "headers", "params", "cookies", "data", "files")
            if parts.get(key)
        }
        if "json" in parts:
            known["data"] = json.dumps(bounded(parts["json"])).encode()
            known["headers"] = {"content-type": "application/json", **known.get("headers", {})}
        prepared = requests.Request(**known).prepare()
        body: Any = (
            prepared.body.encode() if isinstance(prepared.body, str) else prepared.body or b""
        )
        lines = [f"{prepared.method} {prepared.path_url} HTTP/1.1", "host: localhost"]
        headers: dict[str, Any] = dict(prepared.headers)
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body

    return operation.as_strategy(generation_mode=mode).map(raw)  # type: ignore[no-any-return]


# --- the server, and what is known of it

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|endoftext|>{% "
    "endfor %}"
)
CANARY = '"max_tokens":8,"seed":3,"temperature":1.5'
# What is incomplete must not be waited for, and a request that got past every check must not take
# long.
ARGUMENTS = ["--engine.max_context=192", "--engine.threads=1"]
CONSTANTS = {f"server.http.connection.{name}": 0.5 for name in ("HEAD_SECONDS", "BODY_SECONDS")}
ROUND, AT_ONCE, MOST_FAILURES = 200, 16, 50
GROWTH = 64 * 2**20
"""Bytes that a process may hold more in the last quarter of a run than in the second."""


class Found(Exception):
    """A request whose answer is wrong."""


@dataclass
class Watched:
    """A server under fire. `asked`: the requests of this round, for what cannot be laid to one of
    them.
    """

    server: ServerProcess
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[dict[str, Any]] = field(default_factory=list)
    slowest: list[tuple[float, str, str]] = field(default_factory=list)
    num_slow: int = 0
    memory: list[tuple[int, ...]] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    found: tuple[str, bytes] = ("", b"")

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.reader = Thread(target=lambda: self.log.extend(self.server.process.stderr or ()))
        self.reader.start()
        self.engine_pid = self.server.engine_pid
        self.canaries = self.sing()

    def sing(self) -> list[Any]:
        """The text of fixed requests."""
        requests = [
            post(path, document(path, CANARY, '"def f("')) for path in (GENERATE, COMPLETIONS, CHAT)
        ]
        replies = [exchange(self.server.port, request) for request in requests]
        bodies = [
            json.loads(reply.body) if reply and reply.status == 200 else {"choices": reply}
            for reply in replies
        ]
        return [body.get("generated_text", body.get("choices")) for body in bodies]

    def one(self, kind: str, request: bytes) -> tuple[float, str, str | None]:
        """Sends a request; the seconds it took, the status, and what is wrong with the answer."""
        began, status = time.monotonic(), "none"
        try:
            reply = exchange(self.server.port, request)
            problem = (
                ("no answer" if kind in COMPLETE else None)
                if reply is None
                else answer_problem(reply)
            )
            status = str(reply.status) if reply else "closed"
        except (TimeoutError, EOFError, ValueError) as error:
            problem = {TimeoutError: "no answer in 10 s", EOFError: "an answer cut short"}.get(
                type(error), str(error)[:200]
            )
        return time.monotonic() - began, status, problem

    def send(self, kind: str, requests: list[bytes]) -> None:
        """Sends requests together. Raises Found for the first problem that has not been seen
        before.
        """
        self.asked += requests
        known = {(failure["kind"], failure["problem"]) for failure in self.failures}
        answers = self.pool.map(lambda request: self.one(kind, request), requests)
        for request, (seconds, status, problem) in zip(requests, answers, strict=True):
            self.counts[kind][status] += 1
            if status != "408":  # It waited for what does not come.
                self.num_slow += seconds > 1
                self.slowest = sorted(
                    [
                        *self.slowest,
                        (round(seconds, 3), kind, base64.b64encode(request[:2000]).decode()),
                    ]
                )[-10:]
            if problem and (kind, problem) not in known:
                self.found = (problem, request)
                raise Found(problem)

    def fail(self, kind: str, problem: str, requests: list[bytes]) -> None:
        self.failures.append(
            {
                "kind": kind,
                "problem": problem,
                "requests": [base64.b64encode(request).decode() for request in requests],
            }
        )

    def round(self, kind: str, strategy: SearchStrategy[bytes], number: int) -> None:
        """Some 200 requests of one kind; then the server must be as it was."""
        self.asked, num_lines = [], len(self.log)

        @seed(number)
        @settings(
            max_examples=ROUND // 4,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(st.lists(strategy, min_size=1, max_size=AT_ONCE))
        def batch(requests: list[bytes]) -> None:
            self.send(kind, requests)

        try:
            batch()
        except (Found, Flaky):  # Flaky: it went wrong once, and not again.
            self.fail(kind, self.found[0], [self.found[1]])
        known = {failure["problem"] for failure in self.failures}
        for problem in self.changes(num_lines):
            if problem not in known:
                self.fail(kind, problem, self.asked)
        held = [usage(pid) for pid in (self.server.process.pid, self.engine_pid)]
        if all(held):
            self.memory.append(tuple(process.rss for process in held if process))

    def changes(self, num_lines: int) -> Iterator[str]:
        """What is not as it was before this round, whose log begins after so many lines."""
        try:
            if self.server.engine_pid != self.engine_pid:
                yield "the engine's process is another"
                self.engine_pid = self.server.engine_pid
            if (sung := self.sing()) != self.canaries:
                yield f"the canary sings {sung}"[:500]
        except (OSError, EOFError, ValueError, AssertionError) as error:
            yield f"the server does not answer any more: {error!r}"[:500]
        lines = self.log[num_lines:]
        # What the client did wrong may stand in it, as what an error was made from.
        errors = {
            line.strip() for line in lines if re.match(r"(?!server\.errors)\w+(\.\w+)*: ", line)
        }
        if any("Traceback" in line for line in lines):
            yield f"a traceback in the log: {sorted(errors)}"[:500]

    def close(self) -> list[Check]:
        """Ends the server; what holds of the whole run."""
        metrics = self.server.get("/metrics")[1] if self.server.process.poll() is None else ""
        status = self.server.stop(signal.SIGINT)
        self.reader.join(10)
        self.pool.shutdown()
        quarter = max(1, len(self.memory) // 4)
        columns = list(zip(*self.memory, strict=True))
        grown = [
            median(column[-quarter:]) - median(column[quarter : 2 * quarter] or column)
            for column in columns
        ]
        failed = [
            line
            for line in metrics.splitlines()
            if line.startswith('onehead_requests_total{outcome="failed"}')
        ]
        total = sum(sum(counter.values()) for counter in self.counts.values())
        return [
            Check(
                "every answer fits, and nothing changes",
                not self.failures,
                f"{len(self.failures)} kinds of failure in {total} requests",
            ),
            Check(
                "no request failed in the engine",
                bool(metrics) and not failed,
                " ".join(failed) or "none",
            ),
            Check(
                "memory does not grow",
                max(grown) < GROWTH,
                ", ".join(f"{bytes / 2**20:+.1f} MiB" for bytes in grown),
            ),
            Check("the exit status is 0", status == 0, str(status)),
        ]


def make_folder(folder: Path) -> Path:
    """A tiny checkpoint with a chat template and marks for the middle, so that every route has
    something to do.
    """
    make_checkpoint(SHAPES[0], folder)
    make_tokenizer(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), 261).save(
        str(folder / "tokenizer.json")
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def unresolved(value: Any, whole: Any) -> Iterator[str]:
    """The references of a document that lead nowhere in it."""
    for key, item in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        if key == "$ref":
            place = whole
            for part in item.removeprefix("#/").split("/"):
                place = place.get(part, {}) if isinstance(place, dict) else {}
            if not place:
                yield item
        yield from unresolved(item, whole)


def strategies(watched: Watched) -> Iterator[tuple[str, str, SearchStrategy[bytes]]]:
    """Kind, name and requests, for ever: raw ones and Schemathesis's in turn."""
    import schemathesis

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{watched.server.port}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    made = [
        (f"{operation.label} {mode.value}", schema_requests(operation, mode))
        for operation in operations
        for mode in schemathesis.GenerationMode
        if mode is schemathesis.GenerationMode.POSITIVE or operation.body
    ]
    raw, number = raw_strategies(), 0
    while True:
        kind = list(raw)[number % len(raw)]
        yield kind, kind, raw[kind]
        yield "openapi", *made[number % len(made)]
        number += 1


def fuzz(watched: Watched, minutes: float, first: int) -> list[str]:
    """Rounds until the time is over; the operations that nothing could be made for."""
    began, unusable = time.monotonic(), set()
    with progress() as bar:
        task = bar.add_task("seconds", total=round(minutes * 60))
        for number, (kind, name, strategy) in enumerate(strategies(watched), first):
            try:
                watched.round(kind, strategy, number)
            except Unsatisfiable:
                unusable.add(name)
            seconds = time.monotonic() - began
            bar.update(
                task,
                completed=min(round(minutes * 60), int(seconds)),
                description=name[:30].ljust(30),
            )
            if (
                seconds > minutes * 60
                or watched.server.process.poll() is not None
                or len(watched.failures) >= MOST_FAILURES
            ):
                break
    return sorted(unusable)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_folder(Path(scratch))
        server = ServerProcess(folder, *ARGUMENTS, constants=CONSTANTS)
        watched = Watched(server)
        described = json.loads(server.get("/openapi.json")[1])
        try:
            unusable = fuzz(watched, options.minutes, options.seed * 10**6)
        finally:
            checks = watched.close()
    dangling = sorted(set(unresolved(described, described)))
    checks.append(
        Check(
            "every reference of /openapi.json resolves",
            not dangling,
            ", ".join(dangling) or "all do",
        )
    )
    checks.append(
        Check("every operation of it can be tried", not unusable, ", ".join(unusable) or "all were")
    )
    statuses = sorted({status for counter in watched.counts.values() for status in counter})
    show(
        ("kind", *statuses),
        [
            (kind, *(counter[status] for status in statuses))
            for kind, counter in watched.counts.items()
        ],
    )
    result = {
        "counts": watched.counts,
        "over_1_s": watched.num_slow,
        "slowest": watched.slowest,
        "failures": watched.failures,
    }
    result |= {"seed": options.seed, "minutes": options.minutes, "memory": watched.memory}
    return conclude(
        "fuzz-http",
        options.output,
        {"arguments": ARGUMENTS, "constants": CONSTANTS},
        result,
        checks,
    )


if __name__ == "__main__":
    sys.exit(main())
