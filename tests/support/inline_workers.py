"""A double of server.text.workers.Workers that runs each job at once in this process, for tests
that are not about processes.
"""

from typing import Any

from llguidance import LLTokenizer

from server.text.calls.rules import Compiled
from server.text.codec import TextCodec
from server.text.jobs import AnyJob, Texts
from server.text.service import Source, TextService
from server.text.workers import Workers


class InlineWorkers(Workers):
    """Runs jobs without limits and processes."""

    def __init__(self, codec: TextCodec) -> None:
        self.texts = Texts(codec)

    async def run(self, job: AnyJob, client: str) -> Any:
        return job.run(self.texts)


def inline_texts(codec: TextCodec) -> TextService:
    """A TextService without processes."""
    service = TextService(Texts(codec), InlineWorkers(codec))
    service.variables = frozenset(service.texts.chat_template.variables)
    return service


class Compiler:
    """Compiles the constraints of requests as a server does, in this process."""

    def __init__(self, codec: TextCodec) -> None:
        self._workers = InlineWorkers(codec)

    @property
    def tokenizer(self) -> LLTokenizer:
        tokenizer = self._workers.texts.compiler.tokenizer
        assert tokenizer is not None
        return tokenizer

    async def compiled(self, source: Source) -> Compiled:
        """The grammar, and what it does not follow. Raises InvalidRequest."""
        return await TextService(self._workers.texts, self._workers).compiled(source, "")

    async def compile(self, source: Source) -> str:
        """The grammar. Raises InvalidRequest."""
        return (await self.compiled(source)).grammar
