"""`onehead batch IN OUT`: a file of requests to a file of answers, without a server, in OpenAI's
batch format.

Answers are kept in OUT.partial as they come, so a run that was killed goes on where it stopped; OUT
appears when the last is there, in the order of IN. Invariant: every line of IN has exactly one line
in OUT, and one model has made all of them.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import sys
import uuid
from collections import Counter
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import CliImplicitFlag, CliPositionalArg
from rich.console import Console
from rich.table import Table

from commands.progress import progress
from server.config import EngineSettings, ServerSection
from server.errors import (
    EngineGaveUp,
    MalformedBody,
    Overloaded,
    RequestError,
    ResourceError,
    Unavailable,
    UsageError,
)
from server.generation.engine_client import EngineClient
from server.generation.generation import Generation
from server.http.body import parse
from server.http.errors import OPENAI
from server.http.handlers import Answers, Context
from server.http.model_names import ModelNames
from server.http.openai.routes import OpenAIRoutes
from server.http.stream_buffer import Retention, StreamStore
from server.http.streams import StreamPublisher
from server.hub.download import model_id
from server.option_types import Seconds
from server.service import running_engine

MAX_OPEN = 100_000
CUT = "cut at max_tokens, or at the end of the context"


class BatchSettings(EngineSettings):
    """onehead batch: answer a file of requests, in OpenAI's batch format.

    Exit status 1: OUTPUT is whole, and requests in it were refused or failed; those that were cut
    at max_tokens are counted at the end. A run that was stopped is resumed by the same command.
    """

    input: CliPositionalArg[Path] = Field(
        description="requests, one JSON object a line: custom_id, method, url, body"
    )
    output: CliPositionalArg[Path] = Field(description="answers, in the same order")
    overwrite: CliImplicitFlag[bool] = Field(
        False,
        description="replace an OUTPUT that holds something else than answers to INPUT",
    )
    recovery_timeout: Seconds = Field(
        600.0, description="seconds that requests wait for an engine that is replaced"
    )


@dataclass(frozen=True, slots=True)
class Line:
    """One request, and a digest of it by which a half-finished run is recognised."""

    custom_id: str
    url: str
    body: dict[str, Any]
    digest: str

    @property
    def id(self) -> str:
        """The id of the answer, by which the output of a batch is recognised."""
        return f"batch_req_{self.digest[:32]}"


def check_files(settings: BatchSettings) -> list[Line]:
    """The requests. Raises UsageError for a file that holds none; and, before it opens any, where a
    file that the run writes is the file of requests, by whatever path or link, or cannot be
    written; and for an output that holds something else.
    """
    source, output = settings.input, settings.output
    try:
        target = output.resolve()  # A link is written through, not replaced.
        if not target.parent.is_dir():
            raise UsageError(f"{output}: is not a file that can be written")
        for written in (target, _partial(target), _whole(target)):
            if written.exists() and source.exists() and written.samefile(source):
                raise UsageError(
                    f"{written}: is the file of requests, {source}, and would be overwritten; "
                    "give another OUTPUT"
                )
            if os.path.lexists(written) and not written.is_file():
                raise UsageError(f"{written}: is not a file that can be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other.
        raise UsageError(
            f"{output}: {getattr(error, 'strerror', None) or 'is a link to itself'}"
        ) from None
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{output}: cannot be written; its folder is read-only")
    lines = read_lines(source)
    if not settings.overwrite and target.exists() and not _is_output(target, lines):
        remedy = "give another OUTPUT, or --overwrite"
        raise UsageError(f"{output}: holds something else than answers to {source}; {remedy}")
    return lines


def _is_output(path: Path, lines: list[Line]) -> bool:
    """Whether a file is empty, or the output of these requests."""
    try:
        ids = [json.loads(text)["id"] for text in path.read_bytes().splitlines()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return not ids or ids == [line.id for line in lines]


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
    """The answers so far, in a file that survives a kill: a last line that was cut is forgotten.
    Each has a `maker`, the digest of what answers depend on besides their requests: answers of two
    of them are not mixed. It is locked while it is open.
    """

    def __init__(self, path: Path, lines: list[Line]) -> None:
        """Raises UsageError for a file that another run writes, that cannot be opened, or that
        holds answers to other requests.
        """
        self.path = path
        self.answers: dict[str, dict[str, Any]] = {}
        self._makers: set[str] = set()
        with contextlib.ExitStack() as opened:
            self._file = self._open(opened)
            self._file.truncate(self._read({line.digest for line in lines}, self._file.read()))
            opened.pop_all()  # It stays open.

    def _open(self, opened: contextlib.ExitStack) -> FileIO:
        """The file, locked, at its begin."""
        try:
            file = opened.enter_context(FileIO(self.path, "a+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
        except BlockingIOError:
            raise UsageError(
                f"{self.path}: another run of this command writes it; wait for its end, or give "
                "another OUTPUT"
            ) from None
        except OSError as error:
            raise UsageError(f"{self.path}: {error.strerror}") from None
        return file

    def _read(self, wanted: set[str], data: bytes) -> int:
        """Takes the answers in `data`; returns the bytes that they fill."""
        whole = 0
        for text in data.splitlines(keepends=True):
            try:
                entry = json.loads(text)
                digest, answer, maker = entry["digest"], entry["answer"], str(entry["maker"])
            except (ValueError, KeyError, TypeError):
                break
            if not text.endswith(b"\n"):
                break
            if digest not in wanted:
                raise UsageError(
                    f"{self.path}: holds answers to other requests; remove it to begin anew"
                )
            whole += len(text)
            self.answers[digest] = answer
            self._makers.add(maker)
        return whole

    def begin(self, maker: str) -> None:
        """Says who makes the answers from now on. Raises UsageError where another made those so
        far.
        """
        if self._makers - {maker}:
            what = "answers of another model, of other options or of another version"
            raise UsageError(
                f"{self.path}: holds {what}; go on with those, or remove it to begin anew"
            )
        self.maker = maker

    def add(self, line: Line, answer: dict[str, Any]) -> None:
        """Keeps one answer. Raises ResourceError."""
        data = (
            json.dumps({"digest": line.digest, "maker": self.maker, "answer": answer}).encode()
            + b"\n"
        )
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise ResourceError(
                f"{self.path}: {error.strerror}; the answers so far are kept, and the same "
                "command goes on"
            ) from None
        self.answers[line.digest] = answer

    def finish(self, output: Path, lines: list[Line]) -> None:
        """Writes every answer to `output`, in order, and removes the journal. Raises
        ResourceError.
        """
        whole = _whole(output)
        try:
            with whole.open("w", encoding="utf-8") as file:
                for line in lines:
                    file.write(json.dumps(self.answers[line.digest]) + "\n")
            os.replace(whole, output)
            self.path.unlink()
        except OSError as error:
            raise ResourceError(
                f"{whole}: {error.strerror}; the answers are kept, and the same command writes them"
            ) from None

    def close(self) -> None:
        """Unlocks the file, and removes it if it holds nothing."""
        if not self.answers:
            self.path.unlink(missing_ok=True)
        self._file.close()


def _maker(generation: Generation) -> str:
    """A digest of what answers depend on besides their requests."""
    ready, files = generation.ready, generation.codec.files
    made_by = (
        ready.digest,
        generation.fingerprint,
        ready.deterministic,
        ready.max_context,
        generation.end_token_ids,
    )
    of_chats = (
        files.chat_template,
        files.special_token("bos_token"),
        files.special_token("eos_token"),
        files.sampling_defaults,
    )
    return hashlib.sha256(repr((made_by, of_chats)).encode()).hexdigest()


async def answer(routes: OpenAIRoutes, client: EngineClient, line: Line) -> dict[str, Any]:
    """OpenAI's line for one request, whatever came of it. Raises OneheadError where the engine is
    gone: that answers no request.
    """
    while True:
        try:
            status, body = (
                200,
                await routes.response_without_http(line.url, line.body, "onehead batch"),
            )
        except (Overloaded, Unavailable) as error:
            client.raise_if_over()
            if client.supervisor.recovery_overdue:
                reason = error.message.removesuffix("; try again later")
                raise EngineGaveUp(
                    f"{reason}; the answers so far are kept, and the same command goes on"
                ) from None
            await asyncio.sleep(error.retry_after or 1)
            continue
        except RequestError as error:
            status, body = OPENAI.status(error), OPENAI.body(error)
        response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
        return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


async def batch(settings: BatchSettings, lines: list[Line]) -> int:
    """Answers every line that has no answer yet; the exit status, which is 1 where requests were
    refused or failed. Raises UsageError for a journal that cannot be used, and other errors of the
    tree where requests have no answer: the answers that there are stay in it.
    """
    output = settings.output.resolve()
    with contextlib.closing(Journal(_partial(output), lines)) as journal:
        try:
            await _answer_all(settings, lines, journal)
        except BaseExceptionGroup as group:  # Of the task group; the first ended the others.
            raise group.exceptions[0] from None
        responses = [journal.answers[line.digest]["response"] for line in lines]
        journal.finish(output, lines)
    refused = sum(response["status_code"] != 200 for response in responses)
    Console().print(_summary(responses, refused))
    if refused:
        told = (
            f"{refused} of {len(lines)} requests were refused or failed; {settings.output} says why"
        )
        print(f"onehead batch: {told}", file=sys.stderr)
    return 1 if refused else 0


def _summary(responses: list[dict[str, Any]], refused: int) -> Table:
    """How many outputs ended for which reason."""
    bodies = [response["body"] for response in responses]
    reasons = Counter(c["finish_reason"] for body in bodies for c in body.get("choices", ()))
    table = Table("finish reason", "outputs", "", box=None)
    for reason, count in reasons.most_common():
        table.add_row(reason, f"{count:,}", CUT if reason == "length" else "")
    if refused:
        table.add_row("none", f"{refused:,}", "refused or failed")
    return table


async def _answer_all(settings: BatchSettings, lines: list[Line], journal: Journal) -> None:
    """Asks an engine for the answers that the journal lacks, and shows how far it is."""
    section = ServerSection(max_waiting=MAX_OPEN, log_level="warning")
    async with running_engine(settings, section, settings.recovery_timeout) as engine:
        engine.client.admission.max_waiting_tokens = sys.maxsize
        engine.client.admission.max_queue_seconds = math.inf
        journal.begin(_maker(engine.generation))
        missing = [line for line in lines if line.digest not in journal.answers]
        nowhere = Answers(StreamPublisher(StreamStore(Retention()), keep_alive=0.0))
        name = model_id(settings.model)
        names = ModelNames.of((name,), (settings.given, name))
        routes = OpenAIRoutes(Context(engine.generation, section, names, nowhere))
        # Twice as many as run, so that the next are tokenized when a place is free.
        places = asyncio.Semaphore(2 * engine.client.admission.max_running)
        with progress() as shown:
            task = shown.add_task(
                "answering", total=len(lines), completed=len(lines) - len(missing)
            )

            async def one(line: Line) -> None:
                async with places:
                    result = await answer(routes, engine.client, line)
                journal.add(line, result)
                shown.advance(task)

            async with asyncio.TaskGroup() as group:
                for line in missing:
                    group.create_task(one(line))
