"""TextService: what is kept of one client's requests is nobody else's, and long work leaves this
process.
"""

import asyncio
from typing import Any

import pytest

from server.errors import InvalidRequest
from server.text.codec import TextCodec
from server.text.jobs import AnyJob, CompileGrammar, Decode, Texts
from server.text.service import LONG_TEXT_CHARS, Source, TextService
from tests.support.inline_workers import InlineWorkers
from tests.support.paths import EMBEDDED

WORD = Source("regex", "[a-z]{3}", "regex")


class Recorded(InlineWorkers):
    """Notes the clients of the jobs that would leave the API process."""

    def __init__(self, codec: TextCodec) -> None:
        super().__init__(codec)
        self.clients: list[str] = []

    async def run(self, job: AnyJob, client: str) -> Any:
        self.clients.append(client)
        return await super().run(job, client)


@pytest.fixture
def workers() -> Recorded:
    return Recorded(TextCodec(EMBEDDED))


def service(workers: Recorded) -> TextService:
    return TextService(Texts(workers.texts.codec), workers)


async def test_a_client_does_not_learn_by_time_which_grammars_others_have_compiled(
    workers: Recorded,
) -> None:
    texts = service(workers)
    first = await texts.grammar(WORD, "a")
    assert await texts.grammar(WORD, "a") == first and workers.clients == ["a"]
    assert await asyncio.gather(texts.grammar(WORD, "b"), texts.grammar(WORD, "b")) == [
        first,
        first,
    ]
    assert workers.clients == ["a", "b"]


async def test_a_grammar_that_is_refused_is_not_kept(workers: Recorded) -> None:
    texts = service(workers)
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            await texts.grammar(Source("regex", "(", "regex"), "a")
        await asyncio.sleep(0)
    assert workers.clients == ["a", "a"]


@pytest.mark.parametrize(
    ("lists", "leaves"),
    [([[5] * 9], False), ([[5] * LONG_TEXT_CHARS], True), ([[5] * 40] * 200, True)],
)
async def test_many_tokens_are_decoded_in_a_worker(
    workers: Recorded, lists: list[list[int]], leaves: bool
) -> None:
    """However many lists they are spread over."""
    texts = service(workers)
    assert await texts.run(Decode(lists), "a") == [workers.texts.codec.decode(ids) for ids in lists]
    assert bool(workers.clients) == leaves


def test_jobs_of_grammars_are_told_from_one_another() -> None:
    kinds = {CompileGrammar(kind, text, "f") for kind in ("regex", "lark") for text in ("a", "b")}
    assert len(kinds) == 4
