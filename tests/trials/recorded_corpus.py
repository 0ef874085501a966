"""The same bytes before and after a change of the code: records what servers answer to a corpus of
requests, and compares two recordings.

    python -m tests.trials.recorded_corpus record --tree FOLDER --output FILE.json[.gz] python -m
    tests.trials.recorded_corpus compare BEFORE.json[.gz] AFTER.json[.gz] [--output REPORT.md]

`record` starts `onehead serve` from the source tree in FOLDER, on the embedded model, once for each
server of the corpus, and sends it the requests one after another. `compare` exits with 1 where
anything differs but what tests.trials.recorded_answers lists; error texts, HELP texts and OpenAPI
descriptions that differ are listed apart. Log-probabilities are compared to the last bit, so both
recordings must come from one machine: /info, which is recorded, names the kernels.

Invariant: this module imports nothing of the server, so that it can record any tree. It knows
sockets and processes; the requests are in tests.trials.corpus, the normal form of answers in
tests.trials.recorded_answers.
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tests.support.wire import Response, Wire, exchange, http_request
from tests.trials.corpus import CHAT_TEMPLATE, Row, Server, post
from tests.trials.corpus_refusals import SERVERS
from tests.trials.recorded_answers import Answer, compare, normal

START_SECONDS = 120.0
ANSWER_SECONDS = 60.0


class Connection:
    """One TCP connection, with a request sent."""

    def __init__(self, port: int, request: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS)
        self._wire = Wire(self._socket)
        self._method = request.split(b" ", 1)[0].decode("latin-1")
        # The server may refuse a request before it has read all of it.
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(request)

    def response(self) -> Response:
        """The next response, its head read."""
        return self._wire.response(self._method)

    def close(self) -> None:
        self._socket.close()


def first_event(response: Response) -> bytes:
    """The bytes of a stream up to the end of its first event."""
    data = b""
    for piece in response.pieces():
        data += piece
        if b"\n\n" in data:
            return data[: data.index(b"\n\n") + 2]
    return data


class Recorder:
    """The answers of one running server."""

    def __init__(self, server: Server, port: int) -> None:
        self._server = server
        self._port = port
        self._ids: dict[str, str] = {}
        """Id of each resumable stream, by the name that the corpus gives it."""
        self.answers: dict[str, Answer] = {}

    def record(self, row: Row) -> None:
        """Sends one request and keeps its answers."""
        name = f"{self._server.name}: {row.name}"
        if name in self.answers:
            raise ValueError(f"two requests are called {name!r}")
        with contextlib.ExitStack() as held:
            for other in row.during:
                connection = held.enter_context(
                    contextlib.closing(Connection(self._port, other.request))
                )
                if not first_event(connection.response()):
                    raise RuntimeError(f"{name}: the stream that is held open has no event")
            found = self._ask(row)
        end = time.monotonic() + ANSWER_SECONDS
        while row.until and found[0]["status"] != row.until and time.monotonic() < end:
            time.sleep(0.05)
            found = self._ask(row)
        for number, answer in enumerate(found):
            answer["request"] = hashlib.sha256(row.request).hexdigest()[:16]
            self.answers[name if row.responses == 1 else f"{name} {number}"] = answer
        if row.settle:
            self._settle()

    def _ask(self, row: Row) -> list[Answer]:
        request = row.request
        for name, id in self._ids.items():
            request = request.replace(f"{{{name}}}".encode(), id.encode())
        answers: list[Answer] = []
        with contextlib.closing(Connection(self._port, request)) as connection:
            for _ in range(row.responses):
                try:
                    response = connection.response()
                    body = first_event(response) if row.first_event else response.body()
                except (EOFError, ConnectionError) as error:
                    answers.append({"status": type(error).__name__})
                    continue
                if row.saves:
                    self._ids[row.saves] = response.header("x-stream-id") or ""
                names = {id: name for name, id in self._ids.items()}
                answers.append(normal(row, response.status, response.headers, body, names))
        return answers

    def _settle(self) -> None:
        """Waits until the server has noticed that the streams held open were closed: until it takes
        two sequences at once again.
        """
        headers = (self._server.bearer,) if self._server.bearer else ()
        probe = post(
            "",
            "/v1/completions",
            {"prompt": "a", "n": 2, "max_tokens": 1, "temperature": 0},
            *headers,
        )
        end = time.monotonic() + ANSWER_SECONDS
        while self._ask(probe)[0]["status"] != 200:
            if time.monotonic() > end:
                raise RuntimeError("the server does not take requests again")
            time.sleep(0.02)


def status_of(port: int, path: str) -> int | None:
    """The status of a GET; None where nothing listens."""
    with contextlib.suppress(OSError, EOFError):
        return exchange(port, http_request("GET", path), ANSWER_SECONDS)[0].status
    return None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for_status(process: subprocess.Popen[bytes], port: int, accepted: bool, log: Path) -> None:
    """Waits until /ready is 200, or is not any more. Raises RuntimeError, with the end of the log,
    where the process ends before.
    """
    end = time.monotonic() + START_SECONDS
    while (status_of(port, "/ready") == 200) != accepted:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(
                f"the server is not ready: {log.read_text(errors='replace')[-2000:]}"
            )
        time.sleep(0.05)


def model_options(tree: Path, server: Server, scratch: Path) -> tuple[str, ...]:
    """The options that name the model: the embedded one, or a folder of links to its files and a
    chat template.
    """
    if not server.chat:
        return ()
    pretrained = next((tree / "model").rglob("pretrained/model.safetensors")).parent
    folder = scratch / "embedded"
    shutil.copytree(pretrained, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return "--model", str(folder)


@contextlib.contextmanager
def running(
    tree: Path, server: Server, scratch: Path
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server of the tree, ready, and its port. It is ended in any case."""
    module = "server.cli" if (tree / "server" / "cli.py").exists() else "commands.cli"
    port, log = free_port(), scratch / "server.log"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("ONEHEAD_")
    } | {"PYTHONPATH": str(tree)}
    options = (*model_options(tree, server, scratch), *server.options)
    command = [sys.executable, "-m", module, "serve", "--port", str(port), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=output, stderr=output)
    try:
        wait_for_status(process, port, True, log)
        yield process, port
    finally:
        if process.poll() is None:
            process.terminate()
            process.terminate()
        try:
            process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def record_server(tree: Path, server: Server) -> dict[str, Answer]:
    """The answers of one server of the corpus, and the status that its process exits with."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        with running(tree, server, scratch) as (process, port):
            recorder = Recorder(server, port)
            for row in server.rows:
                recorder.record(row)
            process.send_signal(signal.SIGTERM)
            if server.draining:
                wait_for_status(process, port, False, scratch / "server.log")
            for row in server.draining:
                recorder.record(row)
            status = process.wait(ANSWER_SECONDS)
    return recorder.answers | {f"{server.name}: exit": {"status": status}}


def record(tree: Path) -> dict[str, Any]:
    """The recording of a source tree."""
    answers: dict[str, Answer] = {}
    for server in SERVERS:
        began = time.monotonic()
        found = record_server(tree, server)
        answers |= found
        print(
            f"{server.name}: {len(found)} answers in {time.monotonic() - began:.1f} s", flush=True
        )
    git = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {"commit": git.stdout.strip(), "python": sys.version.split()[0], "answers": answers}


def kernels(answers: dict[str, Answer]) -> str:
    """The kernels that a recording was computed with, as its /info names them."""
    found = re.search(r'"kernels":"([^"]*)"', answers.get("open: GET /info", {}).get("text", ""))
    return found[1] if found else "unknown"


def written(recording: dict[str, Any]) -> str:
    return json.dumps(recording, ensure_ascii=False, indent=0)


def save(path: Path, recording: dict[str, Any]) -> None:
    data = written(recording).encode()
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return cast(dict[str, Any], json.loads(gzip.decompress(data) if path.suffix == ".gz" else data))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.recorded_corpus", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser(
        "record", help="record the answers of the servers of one source tree"
    )
    recording.add_argument("--tree", type=Path, required=True, help="folder of the source tree")
    recording.add_argument(
        "--output",
        type=Path,
        required=True,
        help="file to write; compressed if its name ends in .gz",
    )
    comparing = commands.add_parser(
        "compare", help="compare two recordings; exit status 1 where answers differ"
    )
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument(
        "--output", type=Path, help="file of the report in Markdown; default: standard output"
    )
    options = parser.parse_args(argv)
    if options.command == "record":
        save(options.output, record(options.tree.resolve()))
        return 0
    before, after = (read(path)["answers"] for path in (options.before, options.after))
    if kernels(before) != kernels(after):
        print(
            f"other kernels, so other last bits: {kernels(before)} before, {kernels(after)} after",
            file=sys.stderr,
        )
    comparison = compare(before, after)
    if options.output is None:
        print(comparison.report(), end="")
    else:
        options.output.write_text(comparison.report(), encoding="utf-8")
    return 1 if comparison.differences else 0


if __name__ == "__main__":
    sys.exit(main())
