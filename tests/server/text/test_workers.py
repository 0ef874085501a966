"""Worker processes: results and refusals cross them, limits end a job alone, and what is lost is begun again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from server.errors import InvalidRequest, Overloaded, Unavailable
from server.text.codec import TextCodec
from server.text.jobs import AnyJob, CompileGrammar, Encode, EncodeChat, EncodeWithPlaces, Fill, Texts
from server.text.worker_process import Start
from server.text.workers import Workers
from tests.support.checkpoints import make_tokenizer
from tests.support.paths import EMBEDDED
from tests.support.processes import alive, children

BOMB = CompileGrammar("lark", "start: T\nT: " + " & ".join(f"/.*k{i}.*/" for i in range(30)), "grammar")


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    made = Workers(Start(str(EMBEDDED), False))
    yield made
    made.close()


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(TextCodec(EMBEDDED))


JOBS: list[AnyJob] = [
    Encode("def f(x):" * 1000),
    Encode("<|endoftext|> é \U0001f600", bare=True),
    EncodeWithPlaces("naïve \U0001f600 text"),
    Fill("def f", "return", True, (("a.py", "x = 1"),), "input_suffix", "(x"),
    CompileGrammar("regex", "[a-z]{3}", "regex"),
    CompileGrammar("json", '{"type": "object", "properties": {"a": {"type": "integer"}}}', "json"),
]
REFUSED: list[AnyJob] = [EncodeChat([{"role": "user", "content": "x"}]), CompileGrammar("regex", "(", "regex")]


async def run(workers: Workers, job: AnyJob, client: str = "a", seconds: float = 5.0) -> Any:
    return await workers.run(job, client, seconds)


async def test_a_job_has_the_same_outcome_in_a_worker(workers: Workers, texts: Texts) -> None:
    assert await asyncio.gather(*(run(workers, job) for job in JOBS)) == [job.run(texts) for job in JOBS]
    for job in REFUSED:
        with pytest.raises(InvalidRequest) as here:
            job.run(texts)
        with pytest.raises(InvalidRequest) as there:
            await run(workers, job)
        assert (there.value.message, there.value.param, there.value.code) == (here.value.message, here.value.param, here.value.code)


async def test_a_job_over_its_time_is_refused_by_field_and_bound(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.text.workers.WAIT_FACTOR", 100)  # However busy the machine is.
    with pytest.raises(InvalidRequest, match=r"`grammar` takes more than 0.5 s of processor time \(server.grammar_timeout\)") as caught:
        await run(workers, BOMB, seconds=0.5)
    assert caught.value.param == "grammar"
    assert await run(workers, JOBS[0])


async def test_a_job_over_its_memory_is_refused(workers: Workers) -> None:
    with pytest.raises(InvalidRequest, match="this text takes more than 128 MiB of memory to tokenize"):
        await run(workers, Encode("!a" * 1_048_000), seconds=60.0)


async def test_cheap_jobs_are_done_while_expensive_ones_run(workers: Workers) -> None:
    bombs = [asyncio.create_task(run(workers, BOMB, "bomber", seconds=60.0)) for _ in range(5)]
    while not any(ticket.running for ticket in workers._turns):
        await asyncio.sleep(0)
    for _ in range(5):
        assert await run(workers, CompileGrammar("regex", "[a-z]{3}", "regex"), "victim")
    assert not all(bomb.done() for bomb in bombs)
    for bomb in bombs:
        bomb.cancel()
    for error in await asyncio.gather(*bombs, return_exceptions=True):
        assert isinstance(error, InvalidRequest | asyncio.CancelledError), error


def forker(workers: Workers) -> int:
    assert workers._forker is not None
    return workers._forker._process.pid


async def during(workers: Workers, job: AnyJob, harm: Callable[[int, list[int]], None], seconds: float) -> Any:
    """The outcome of a job during which `harm` was called with the forking process and its children."""
    running = asyncio.create_task(run(workers, job, seconds=seconds))
    while not (workers._forker and (there := [pid for pid in children(forker(workers)) if alive(pid)])):
        await asyncio.sleep(0.005)
    harm(forker(workers), there)
    return await running


@pytest.mark.parametrize(
    "harm", [lambda forker, jobs: os.kill(jobs[0], signal.SIGKILL), lambda forker, jobs: os.kill(forker, signal.SIGKILL)]
)
async def test_a_job_whose_process_is_killed_is_begun_again(workers: Workers, texts: Texts, harm: Callable[[int, list[int]], None]) -> None:
    job = Encode("def f(x): " * 30_000)
    assert await during(workers, job, harm, 20.0) == job.run(texts)


async def test_a_job_that_its_client_leaves_is_ended(workers: Workers) -> None:
    task = asyncio.create_task(run(workers, BOMB, seconds=60.0))
    while not (workers._forker and (jobs := [pid for pid in children(forker(workers)) if alive(pid)])):
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while any(map(alive, jobs)):
        await asyncio.sleep(0.005)
    assert not workers._turns and not workers._queue._jobs


async def test_a_job_that_makes_no_progress_is_refused_as_overload(workers: Workers) -> None:
    with pytest.raises(Overloaded):
        await during(workers, BOMB, lambda _, jobs: os.kill(jobs[0], signal.SIGSTOP), 0.2)


async def test_files_that_are_gone_or_others_when_a_worker_is_needed_make_it_unavailable(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    workers = Workers(Start(str(tmp_path), False))
    try:
        assert await run(workers, Encode("x"))
        first = (tmp_path / "tokenizer.json").read_bytes()
        make_tokenizer(("<other>",)).save(str(tmp_path / "tokenizer.json"))
        os.kill(forker(workers), signal.SIGKILL)
        with pytest.raises(Unavailable):
            await run(workers, Encode("x"))
        (tmp_path / "tokenizer.json").write_bytes(first)
        assert await run(workers, Encode("x"))
        (tmp_path / "tokenizer.json").unlink()
        os.kill(forker(workers), signal.SIGKILL)
        with pytest.raises(Unavailable):
            await run(workers, Encode("x"))
    finally:
        workers.close()


TEMPLATES: list[tuple[str, bool]] = [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
    ("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}", False),
    ("{{ 'a' * 10**10 }}x", False),
    ("{% set ns = namespace(x='ab') %}{% for m in messages %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}", False),
]
BROKEN = ["{% for %}", "{{ " + "(" * 20_000, "{{ 10**(10**8) }}", "{% if 1 %}" * 200]


async def loaded(folder: Path, template: str) -> Any:
    import json

    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    workers = Workers(Start(str(folder), False))
    try:
        return await workers.loaded()
    finally:
        workers.close()


@pytest.mark.parametrize(("template", "cheap"), TEMPLATES)
async def test_a_template_that_proved_cheap_is_told_from_others(tmp_path: Path, template: str, cheap: bool) -> None:
    said = await loaded(tmp_path, template)
    assert not said.error and said.cheap_template is cheap


@pytest.mark.parametrize("template", BROKEN, ids=lambda template: template[:20].encode(errors="replace").decode())
async def test_a_template_that_cannot_be_compiled_is_refused_by_file_and_field(tmp_path: Path, template: str) -> None:
    said = await loaded(tmp_path, template)
    assert said.error.startswith(f"{tmp_path / 'tokenizer_config.json'}: chat_template") and "\n" not in said.error
