"""TextService: carries out jobs, in this process if they are cheap beforehand, else in worker processes; keeps compiled grammars.

Invariant: nothing whose cost has no known bound runs in this process. It knows no engine and no dialects.
"""

import asyncio
import json
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from server.config import ServerSection
from server.errors import InvalidRequest
from server.text.chat_template import MAX_CHEAP_MESSAGES
from server.text.jobs import AnyJob, CompileGrammar, EncodeChat, Texts

LONG_TEXT_CHARS = 4096
"""Texts of at least this many characters are tokenized in a worker process."""
MAX_SOURCE_CHARS = 2**16
CACHED_GRAMMARS = 256

Kind = Literal["json", "regex", "lark", "choice", "calls"]


@dataclass(frozen=True, slots=True)
class Source:
    """A constraint of a request: a JSON schema, a regular expression, a Lark grammar, a list of texts, or the JSON of CallRules. `field`:
    its name in errors.
    """

    kind: Kind
    value: Any
    field: str


class Runner(Protocol):
    """What runs jobs elsewhere: Workers, or a double of it."""

    async def run(self, job: AnyJob, client: str, seconds: float) -> Any: ...


class TextService:
    """The jobs of one server."""

    def __init__(self, texts: Texts, section: ServerSection, workers: Runner) -> None:
        self.texts = texts
        self.workers = workers
        self._section = section
        self.cheap_template = False
        """Whether short conversations may be rendered in this process."""
        self.variables: Set[str] = frozenset()
        """Variables that the chat template reads."""
        self._grammars: dict[CompileGrammar, asyncio.Task[str]] = {}
        """Compilations that run or have succeeded, oldest first."""

    async def run(self, job: AnyJob, client: str) -> Any:
        """The result of a job of a client. Raises InvalidRequest, Overloaded or Unavailable."""
        if job.num_chars < LONG_TEXT_CHARS and not job.needs_grammars and self._is_cheap(job):
            return job.run(self.texts)
        return await self.workers.run(job, client, getattr(self._section, job.option))

    def _is_cheap(self, job: AnyJob) -> bool:
        if not isinstance(job, EncodeChat) or not self.texts.chat_template.exists:
            return True
        return self.cheap_template and len(job.given.messages) <= MAX_CHEAP_MESSAGES and not job.given.tools

    async def grammar(self, source: Source | None, client: str) -> str:
        """The compiled grammar of a constraint; empty without one. Raises InvalidRequest, Overloaded or Unavailable."""
        if source is None:
            return ""
        text = source.value if isinstance(source.value, str) else _written(source)
        if len(text) > MAX_SOURCE_CHARS:
            message = f"`{source.field}` is longer than {MAX_SOURCE_CHARS} characters. Given: {len(text)}"
            raise InvalidRequest(message, param=source.field)
        job = CompileGrammar(source.kind, text, source.field)
        task = self._grammars.get(job)
        if task is None:
            if len(self._grammars) >= CACHED_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
            # It goes on if its client leaves, for others that wait for the same grammar.
            task = self._grammars[job] = asyncio.create_task(self.run(job, client))
            task.add_done_callback(lambda done: self._forget_failed(job, done))
        return await asyncio.shield(task)

    def _forget_failed(self, job: CompileGrammar, task: asyncio.Task[str]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._grammars.get(job) is task:
            del self._grammars[job]


def _written(source: Source) -> str:
    try:
        return json.dumps(source.value)
    except RecursionError:
        raise InvalidRequest(f"`{source.field}` is nested too deeply", param=source.field) from None
