"""`onehead batch IN OUT`: a file of requests to a file of answers, without a server, in OpenAI's batch format.

Answers are kept in OUT.partial as they come, so a run that was killed goes on where it stopped; OUT appears when the last is there, in
the order of IN. Invariant: every line of IN has exactly one line in OUT.
"""

import asyncio
import hashlib
import json
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from server.config import EngineSettings, ServerSection
from server.errors import MalformedBody, RequestError, UsageError
from server.http.answer import Answers
from server.http.body import parse
from server.http.errors import error_body, error_status
from server.http.exchange import Dialect
from server.http.model_names import ModelNames
from server.http.openai.routes import OpenAIRoutes
from server.http.stream_buffer import Retention, StreamStore
from server.http.streams import StreamPublisher
from server.hub.download import model_id
from server.service import running_engine
from server.supervision.supervisor import State
from server.text.chat_template import ChatTemplate

MAX_OPEN = 100_000


class BatchSettings(EngineSettings):
    """onehead batch: answer a file of requests, in OpenAI's batch format.

    Exit status 1: OUTPUT is whole, and requests in it were refused or failed. A run that was stopped is resumed by the same command.
    """

    input: CliPositionalArg[Path] = Field(description="requests, one JSON object a line: custom_id, method, url, body")
    output: CliPositionalArg[Path] = Field(description="answers, in the same order")


@dataclass(frozen=True, slots=True)
class Line:
    """One request, and a digest of it by which a half-finished run is recognised."""

    custom_id: str
    url: str
    body: dict[str, Any]
    digest: str


def check_files(settings: BatchSettings) -> None:
    """Raises UsageError where a file that the run writes is the file of requests, by whatever path or link, or cannot be written. Opens
    nothing.
    """
    source, output = settings.input, settings.output
    if output.is_dir() or not output.parent.is_dir():
        raise UsageError(f"{output}: is not a file that can be written")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{output}: cannot be written; its folder is read-only")
    for written in (output, _partial(output), _whole(output)):
        if written.exists() and source.exists() and written.samefile(source):
            raise UsageError(f"{written}: is the file of requests, {source}, and would be overwritten; give another OUTPUT")


def _partial(output: Path) -> Path:
    """The answers of a run that has not ended."""
    return output.with_name(output.name + ".partial")


def _whole(output: Path) -> Path:
    """All answers, until they take the place of the output."""
    return output.with_name(output.name + ".whole")


def read_lines(path: Path) -> list[Line]:
    """The requests of a file. Raises UsageError naming the first line that is none."""
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    lines: dict[str, Line] = {}
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        line = _line(f"{path}:{number}", text)
        if line.custom_id in lines:
            raise UsageError(f"{path}:{number}: custom_id {line.custom_id!r} occurs twice")
        lines[line.custom_id] = line
    if not lines:
        raise UsageError(f"{path}: holds no requests")
    return list(lines.values())


def _line(where: str, text: bytes) -> Line:
    try:
        value = parse(text)
    except MalformedBody as error:
        raise UsageError(f"{where}: {error.message.replace('the body', 'the line')}") from None
    unknown = sorted(set(value) - {"custom_id", "method", "url", "body"})
    if unknown:
        raise UsageError(f"{where}: {unknown[0]!r} is not a known key")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise UsageError(f"{where}: custom_id must be a text that is not empty")
    if value.get("method", "POST") != "POST":
        raise UsageError(f"{where}: method must be POST")
    if not isinstance(url, str) or not isinstance(body, dict):
        raise UsageError(f"{where}: url must be a text and body an object")
    return Line(custom_id, url, body, hashlib.sha256(text.strip()).hexdigest())


class Journal:
    """The answers so far, in a file that survives a kill: a last line that was cut is forgotten. `maker` is a digest of the model and
    its settings: answers of two of them are not mixed.
    """

    def __init__(self, path: Path, lines: list[Line], maker: str) -> None:
        self.path = path
        self.maker = maker
        self.answers: dict[str, dict[str, Any]] = {}
        wanted = {line.digest for line in lines}
        whole = 0
        for text in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            try:
                entry = json.loads(text)
                digest, answer, made_by = entry["digest"], entry["answer"], entry["maker"]
            except (ValueError, KeyError, TypeError):
                break
            if not text.endswith(b"\n"):
                break
            if digest not in wanted or made_by != maker:
                what = "to other requests" if digest not in wanted else "of another model or of other options"
                raise UsageError(f"{path}: holds answers {what}; remove it to begin anew")
            whole += len(text)
            self.answers[digest] = answer
        self._file = path.open("ab")
        self._file.truncate(whole)

    def add(self, line: Line, answer: dict[str, Any]) -> None:
        """Keeps one answer."""
        self.answers[line.digest] = answer
        self._file.write(json.dumps({"digest": line.digest, "maker": self.maker, "answer": answer}).encode() + b"\n")
        self._file.flush()

    def finish(self, output: Path, lines: list[Line]) -> None:
        """Writes every answer to `output`, in order, and removes the journal."""
        self._file.close()
        whole = _whole(output)
        with whole.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(self.answers[line.digest]) + "\n")
        os.replace(whole, output)
        self.path.unlink()


def _maker(settings: BatchSettings) -> str:
    """A digest of what answers depend on besides their requests."""
    engine = settings.engine
    made_by: tuple[object, ...] = (str(settings.model.resolve()), engine.device, engine.dtype, engine.quantization, settings.cache.dtype)
    made_by += engine.deterministic, engine.max_context
    return hashlib.sha256(repr(made_by).encode()).hexdigest()


async def answer(routes: OpenAIRoutes, line: Line) -> dict[str, Any]:
    """OpenAI's line for one request, whatever came of it."""
    try:
        status, body = 200, await routes.response_without_http(line.url, line.body, "onehead batch")
    except RequestError as error:
        status, body = error_status(error, Dialect.OPENAI), error_body(error, Dialect.OPENAI)
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}


async def batch(settings: BatchSettings) -> int:
    """Answers every line that has no answer yet; the exit status, which is 1 where requests were refused or failed. Raises UsageError for
    files that cannot be used.
    """
    lines = read_lines(settings.input)
    journal = Journal(_partial(settings.output), lines, _maker(settings))
    missing = [line for line in lines if line.digest not in journal.answers]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    section = ServerSection(max_waiting=MAX_OPEN, max_waiting_tokens=sys.maxsize, max_queue_wait=86400, log_level="warning")
    async with running_engine(settings, section) as engine:
        template = ChatTemplate(engine.generation.codec)
        nowhere = Answers(StreamPublisher(StreamStore(Retention()), keep_alive=0.0))
        name = model_id(settings.model)
        routes = OpenAIRoutes(engine.generation, section, ModelNames.of((name,), (settings.given, name)), template, nowhere)
        # Twice as many as run, so that the next are tokenized when a place is free.
        places = asyncio.Semaphore(2 * settings.engine.max_running)
        with Progress(*columns) as progress:
            task = progress.add_task("answering", total=len(lines), completed=len(lines) - len(missing))

            async def one(line: Line) -> None:
                async with places:
                    result = await answer(routes, line)
                # Answers of an engine that is gone for good are none: the next run asks again.
                if engine.supervisor.state in (State.STARTING, State.READY):
                    journal.add(line, result)
                    progress.advance(task)

            async with asyncio.TaskGroup() as group:
                for line in missing:
                    group.create_task(one(line))
        engine.generation.raise_if_over()
    refused = sum(journal.answers[line.digest]["response"]["status_code"] != 200 for line in lines)
    journal.finish(settings.output, lines)
    if refused:
        print(f"onehead batch: {refused} of {len(lines)} requests were refused or failed; {settings.output} says why", file=sys.stderr)
    return 1 if refused else 0
