"""TextService: carries out jobs, in this process if they are cheap beforehand, else in worker
processes; keeps compiled grammars.

Invariant: nothing whose cost has no known bound runs in this process. It knows no engine and no
dialects.
"""

import asyncio
import json
import logging
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from server.errors import InvalidRequest
from server.text.calls.rules import Compiled
from server.text.chat_template import MAX_CHEAP_MESSAGES
from server.text.jobs import AnyJob, CompileGrammar, EncodeChat, Texts
from server.text.workers import Workers

log = logging.getLogger("onehead.chat")

LONG_TEXT_CHARS = 4096
"""Texts of at least this many characters are tokenized in a worker process."""
MAX_SOURCE_CHARS = 2**16
CACHED_GRAMMARS = 256
MAX_LOGGED = 8
"""Most places of keywords in a log line."""

Kind = Literal["json", "regex", "lark", "choice", "calls"]


@dataclass(frozen=True, slots=True)
class Source:
    """A constraint of a request: a JSON schema, a regular expression, a Lark grammar, a list of
    texts, or the JSON of CallRules. `field`: its name in errors.
    """

    kind: Kind
    value: Any
    field: str

    @property
    def text(self) -> str:
        """What is compiled. Raises InvalidRequest."""
        if isinstance(self.value, str):
            return self.value
        try:
            return json.dumps(self.value)
        except RecursionError:
            message = f"`{self.field}` is nested too deeply"
            raise InvalidRequest(message, param=self.field) from None


class TextService:
    """The jobs of one server."""

    def __init__(self, texts: Texts, workers: Workers) -> None:
        self.texts = texts
        self.workers = workers
        self.cheap_template = False
        """Whether short conversations may be rendered in this process."""
        self.variables: Set[str] = frozenset()
        """Variables that the chat template reads."""
        self._grammars: dict[tuple[str, CompileGrammar], asyncio.Task[Compiled]] = {}
        """Compilations that run or have succeeded, oldest first; by client, as the time of one
        would say what others have asked for."""

    async def run(self, job: AnyJob, client: str) -> Any:
        """The result of a job of a client. Raises InvalidRequest, Overloaded or Unavailable."""
        if job.num_chars < LONG_TEXT_CHARS and not job.needs_grammars and self._is_cheap(job):
            return job.run(self.texts)
        return await self.workers.run(job, client)

    def _is_cheap(self, job: AnyJob) -> bool:
        if not isinstance(job, EncodeChat) or not self.texts.chat_template.exists:
            return True
        return (
            self.cheap_template
            and len(job.given.messages) <= MAX_CHEAP_MESSAGES
            and not job.given.tools
        )

    async def grammar(self, source: Source | None, client: str) -> str:
        """The grammar of a constraint; empty without one. Raises as `compiled` does."""
        return "" if source is None else (await self.compiled(source, client)).grammar

    async def compiled(self, source: Source, client: str) -> Compiled:
        """The compiled grammar of a constraint. Raises InvalidRequest, Overloaded or
        Unavailable.
        """
        text = source.text
        if len(text) > MAX_SOURCE_CHARS:
            message = (
                f"`{source.field}` is longer than {MAX_SOURCE_CHARS} characters. Given: {len(text)}"
            )
            raise InvalidRequest(message, param=source.field)
        job = CompileGrammar(source.kind, text, source.field)
        key = client, job
        task = self._grammars.get(key)
        if task is None:
            if len(self._grammars) >= CACHED_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
            # It goes on if its client leaves, for others that wait for the same grammar.
            task = self._grammars[key] = asyncio.create_task(self.run(job, client))
            task.add_done_callback(lambda done: self._finish(key, done))
        return await asyncio.shield(task)

    def _finish(self, key: tuple[str, CompileGrammar], task: asyncio.Task[Compiled]) -> None:
        """Forgets a failed compilation, and logs what another does not follow."""
        if not (task.cancelled() or task.exception() is not None):
            if relaxed := task.result().relaxed:
                shown = ", ".join(relaxed[:MAX_LOGGED])
                log.info(
                    "schemas of tools are followed but for %d keywords: %s", len(relaxed), shown
                )
        elif self._grammars.get(key) is task:
            del self._grammars[key]
