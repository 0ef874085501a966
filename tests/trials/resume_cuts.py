"""A resumable stream cut at every event, read by real EventSource clients: what they join must be
what an uncut client gets.

    python -m tests.trials.resume_cuts --output DIR [--tokens 24] [--client httpx|chromium|all]

    httpx     httpx-sse: leaves after the n-th event,
    comes back with Last-Event-ID until it is told 204; and leaves after every event
    chromium  Debian's browser (`apt-get install chromium`), headless: a page starts the stream, follows it with EventSource, and reconnects
              by itself. A proxy in this process cuts its connection behind the n-th event,
              or in the middle of the one after it.

Both dialects, greedy and seeded. Exit status 1 for a text or token that differs, an id that is not
the one after the last, or a client that is not told to stop.
"""  # noqa: E501

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import aconnect_sse

from tests.support.live import Answer, Ask, Server, ask, asks
from tests.support.report import Check, Found, conclude, progress, show
from tests.support.wire import Event

AT_ONCE = 8
BROWSER_AT_ONCE = 4
"""A browser opens six connections to a host, and each stream has one at a time."""
BROWSER_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
]
BROWSER_FLAGS += ["--disable-background-networking", "--disable-component-update"]
BROWSER_SECONDS = 600
PAGE = """<!doctype html><title>cuts</title><script>
const jobs = JOBS;
async function one(job) {
  const left = new AbortController();
  const response = await fetch(job.path, {
    method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(job.body), signal: left.signal});
  const id = response.headers.get("x-stream-id");
  left.abort();
  const events = [];
  await new Promise((resolve) => {
    const source = new EventSource(`/cut/${job.kind}/${job.index}/v1/streams/${id}`);
    source.onmessage = (event) => events.push([event.lastEventId, event.data]);
    source.addEventListener("superseded", () => events.push(["", "superseded"]));
    source.onerror = (event) => {
      if (event.data !== undefined) events.push(["", event.data]);
      if (source.readyState === EventSource.CLOSED) resolve();
    };
  });
  await fetch("/result", {method: "POST", body: JSON.stringify({number: job.number, id, events})});
}
async function worker() { while (jobs.length) await one(jobs.shift()); }
for (let i = 0; i < AT_ONCE; i++) worker();
</script>"""  # noqa: E501


@dataclass(frozen=True, slots=True)
class Cut:
    """Where one stream is cut: after `index` events, or in the middle of the event after those, or
    after every event.
    """

    question: Ask
    kind: str
    index: int


@dataclass(slots=True)
class Joined:
    """What a client put together from all its connections."""

    cut: Cut
    answer: Answer
    stream_id: str = ""
    connections: int = 0
    stopped: bool = False
    """It was told 204."""

    def take(self, data: str, id: str) -> None:
        try:
            self.answer.take(Event(data, id))
        except (ValueError, KeyError) as error:
            self.answer.failure = self.answer.failure or f"{type(error).__name__}: {error}"

    def problem(self, oracle: Answer) -> str | None:
        expected = [
            f"{self.stream_id}.{number}" for number in range(1, len(self.answer.event_ids) + 1)
        ]
        if self.answer.event_ids != expected:
            return f"ids {[id.rpartition('.')[2] for id in self.answer.event_ids]}"
        if not self.answer.over:
            return self.answer.failure or f"no end after {len(self.answer.ids)} tokens"
        return self.answer.problem(oracle) or (None if self.stopped else "not told to stop")


# --- httpx-sse


async def cut_httpx(client: httpx.AsyncClient, cut: Cut) -> Joined:
    """Reads `index` events (or one on each connection), leaves, and comes back until there is
    nothing more.
    """
    joined = Joined(cut, Answer(cut.question))
    method, path, headers = "POST", cut.question.path, dict[str, str]()
    body: dict[str, Any] | None = cut.question.body
    while not joined.stopped and joined.connections < 10 * cut.question.tokens:
        leave_after = cut.index if joined.connections == 0 else 1 if cut.kind == "each" else None
        async with aconnect_sse(client, method, path, json=body, headers=headers) as source:
            joined.connections += 1
            joined.stopped = source.response.status_code == 204
            joined.stream_id = joined.stream_id or source.response.headers.get("x-stream-id", "")
            if not joined.stopped and leave_after != 0:
                await read_httpx(source, joined, leave_after)
        method, path, body = "GET", f"/v1/streams/{joined.stream_id}", None
        headers = {"Last-Event-ID": joined.answer.event_ids[-1]} if joined.answer.event_ids else {}
    return joined


async def read_httpx(source: Any, joined: Joined, leave_after: int | None) -> None:
    count = 0
    async for event in source.aiter_sse():
        joined.take(event.data, event.id)
        count += 1
        if count == leave_after:
            return


async def all_httpx(server: Server, cuts: list[Cut]) -> list[Joined]:
    places = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=60
    ) as client:
        with progress() as bar:
            task = bar.add_task("httpx-sse", total=len(cuts))

            async def one(cut: Cut) -> Joined:
                async with places:
                    joined = await cut_httpx(client, cut)
                bar.advance(task)
                return joined

            return await asyncio.gather(*(one(cut) for cut in cuts))


# --- a browser, behind a proxy that cuts


@dataclass(slots=True)
class Proxy:
    """Hands requests on to the server; cuts the first connection of a stream where its path says.
    Serves the page and takes its results.
    """

    server_port: int
    page: str
    joined: list[Joined]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    results: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """Connections of each stream."""
    stopped: set[str] = field(default_factory=set)
    tasks: set[Any] = field(default_factory=set)
    """The loop itself holds its tasks but weakly."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self.tasks.add(task)
        with suppress(OSError, EOFError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
            if path == "/page":
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n"
                    + self.page.encode()
                )
            elif path == "/result":
                self.take(json.loads(body))
                writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
            else:
                await self.hand_on(method, path, head, body, writer)
        writer.close()
        self.tasks.discard(task)

    def take(self, result: Found) -> None:
        joined = self.joined[result["number"]]
        joined.stream_id = result["id"]
        for id, data in result["events"]:
            joined.take(data, id)
        joined.connections = self.seen[joined.stream_id]
        joined.stopped = joined.stream_id in self.stopped
        self.results += 1
        if self.results == len(self.joined):
            self.over.set()

    async def hand_on(
        self, method: str, path: str, head: bytes, body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        """Pipes the reply through, up to the cut."""
        match = re.fullmatch(r"/cut/(\w+)/(\d+)(/v1/streams/(.+))", path)
        kind, index, stream_id = "", 0, ""
        if match is not None:
            kind, index, path, stream_id = match[1], int(match[2]), match[3], match[4]
            self.seen[stream_id] += 1
        lines = [
            line
            for line in head.split(b"\r\n")[1:-2]
            if not line.lower().startswith((b"connection:", b"host:"))
        ]
        first = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close".encode()
        theirs, ours = await asyncio.open_connection("127.0.0.1", self.server_port)
        try:
            ours.write(b"\r\n".join([first, *lines]) + b"\r\n\r\n" + body)
            reply = await theirs.readuntil(b"\r\n\r\n")
            if reply.startswith(b"HTTP/1.1 204"):
                self.stopped.add(stream_id)
            writer.write(reply)
            if stream_id and self.seen[stream_id] == 1:
                await self.pipe_up_to(theirs, writer, kind, index)
            else:
                while data := await theirs.read(65536):
                    writer.write(data)
                    await writer.drain()
        finally:
            ours.close()

    async def pipe_up_to(
        self, theirs: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str, index: int
    ) -> None:
        """`index` events, and half of the next one if that is wanted; then the connection is closed
        in mid-reply.
        """
        with suppress(asyncio.IncompleteReadError):
            for _ in range(index):
                writer.write(await theirs.readuntil(b"\n\n"))
            if kind == "middle":
                event = await theirs.readuntil(b"\n\n")
                writer.write(event[: len(event) // 2])
        await writer.drain()


async def all_chromium(server: Server, cuts: list[Cut], scratch: Path) -> list[Joined]:
    program = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if program is None:
        raise SystemExit("this needs a browser: apt-get install chromium")
    joined = [Joined(cut, Answer(cut.question)) for cut in cuts]
    jobs = [
        {
            "number": number,
            "path": cut.question.path,
            "body": cut.question.body,
            "kind": cut.kind,
            "index": cut.index,
        }
        for number, cut in enumerate(cuts)
    ]
    page = PAGE.replace("JOBS", json.dumps(jobs)).replace("AT_ONCE", str(BROWSER_AT_ONCE))
    proxy = Proxy(server.port, page, joined)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=2**20)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/page"
    browser = subprocess.Popen(
        [program, *BROWSER_FLAGS, f"--user-data-dir={scratch}/browser", url],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with progress() as bar, suppress(TimeoutError):
            task = bar.add_task("chromium", total=len(cuts))
            async with asyncio.timeout(BROWSER_SECONDS):
                while not proxy.over.is_set():
                    bar.update(task, completed=proxy.results)
                    await asyncio.sleep(0.2)
    finally:
        browser.terminate()
        browser.wait(10)
        listener.close()
    return joined


def browser_version() -> str | None:
    program = shutil.which("chromium")
    if program is None:
        return None
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


# --- the run


def cuts_of(oracles: list[Answer], kinds: tuple[str, ...]) -> list[Cut]:
    """Every place of every stream: from before the first event to after the last."""
    cuts = []
    for oracle in oracles:
        # A /v1 stream ends with [DONE].
        events = len(oracle.ids) + (oracle.ask.dialect == "openai")
        question = replace(oracle.ask, resumable=True)
        for kind in kinds:
            cuts += (
                [Cut(question, kind, 1)]
                if kind == "each"
                else [Cut(question, kind, index) for index in range(events + 1)]
            )
    return cuts


def checks_of(name: str, results: list[Joined], oracles: dict[str, Answer]) -> list[Check]:
    problems = [
        (each.cut, problem)
        for each in results
        if (problem := each.problem(oracles[str(each.cut.question.prompt)]))
    ]
    wrong = {cut for cut, _ in problems}
    groups: dict[tuple[str, str], list[Joined]] = {}
    for each in results:
        groups.setdefault((each.cut.question.dialect, each.cut.kind), []).append(each)
    rows = [
        (
            f"{dialect}, {kind}",
            len(group),
            sum(each.connections for each in group),
            sum(each.cut in wrong for each in group),
        )
        for (dialect, kind), group in groups.items()
    ]
    show((name, "cuts", "connections", "differ"), rows)
    told = [
        f"{cut.question.dialect} {cut.kind} {cut.index}: {problem}" for cut, problem in problems
    ]
    again = sum(each.connections > 1 for each in results)
    return [
        Check(
            f"{name}: what is joined is what was not cut, ids consecutive, told to stop",
            not problems,
            f"{len(results)} cuts; {told[:5]}",
        ),
        Check(
            f"{name}: every client came back", again == len(results), f"{again} of {len(results)}"
        ),
    ]


async def run(options: argparse.Namespace, scratch: Path) -> int:
    server = await Server.start(
        (options.output or scratch) / "resume_cuts.log",
        "--server.keep_alive",
        "3600",
        "--server.lb_grace",
        "0",
    )
    checks: list[Check] = []
    result: Found = {
        "tokens": options.tokens,
        "clients": {"httpx-sse": version("httpx-sse"), "chromium": browser_version()},
        "cuts": {},
    }
    try:
        info = await server.info()
        oracles = [await ask(server.port, question) for question in asks(4, options.tokens, seed=9)]
        by_prompt: dict[str, Answer] = {str(oracle.ask.prompt): oracle for oracle in oracles}
        for name in ("httpx", "chromium") if options.client == "all" else (options.client,):
            if name == "httpx":
                results = await all_httpx(server, cuts_of(oracles, ("behind", "each")))
            else:
                results = await all_chromium(
                    server, cuts_of(oracles[1:3], ("behind", "middle")), scratch
                )
            checks += checks_of(name, results, by_prompt)
            result["cuts"][name] = [
                {
                    "dialect": r.cut.question.dialect,
                    "kind": r.cut.kind,
                    "index": r.cut.index,
                    "connections": r.connections,
                }
                | {"problem": r.problem(by_prompt[str(r.cut.question.prompt)])}
                for r in results
            ]
        idle = await server.until_idle()
    finally:
        status = await server.stop()
    checks.append(
        Check(
            "idle afterwards, exit status 0", idle and status == 0, f"idle {idle}, status {status}"
        )
    )
    return conclude("resume_cuts", options.output, info, result, checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="an existing folder")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--client", choices=("httpx", "chromium", "all"), default="all")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        sys.exit(asyncio.run(run(options, Path(scratch))))


if __name__ == "__main__":
    main()
