"""Worker processes: results and refusals cross them, limits end a job alone, and what is lost is
begun again.
"""

import asyncio
import errno
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher
from msgspec import defstruct
from msgspec.structs import astuple

from server import child_process, guidance
from server.engine.masks import MaskProcesses
from server.errors import InvalidRequest, Overloaded, Unavailable
from server.text.codec import TextCodec
from server.text.conversation import ChatInput
from server.text.jobs import (
    AnyJob,
    CompileGrammar,
    Encode,
    EncodeChat,
    EncodeWithPlaces,
    Fill,
    Texts,
)
from server.text.workers import FORK_SECONDS, Workers
from tests.support.checkpoints import make_tokenizer
from tests.support.paths import EMBEDDED
from tests.support.processes import alive, children

KILL = os.kill
NAMES = [f"property_{number}" for number in range(300)]
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in NAMES},
    "required": NAMES,
}
LARGE = CompileGrammar("json", json.dumps(SCHEMA), "grammar")
"""It is compiled for long enough to be disturbed."""
BOMB = CompileGrammar(
    "lark", "start: T\nT: " + " & ".join(f"/.*k{i}.*/" for i in range(30)), "grammar"
)


@pytest.fixture
async def workers(texts: Texts) -> AsyncIterator[Workers]:
    made = Workers()
    made.start(texts)
    yield made
    made.close()


@pytest.fixture(scope="module")
def texts(untemplated_folder: Path) -> Texts:
    return Texts(TextCodec(untemplated_folder))


JOBS: list[AnyJob] = [
    Encode("def f(x):" * 1000),
    Encode("<|endoftext|> é \U0001f600", bare=True),
    EncodeWithPlaces("naïve \U0001f600 text"),
    Fill("def f", "return", True, (("a.py", "x = 1"),), "input_suffix", "(x"),
    CompileGrammar("regex", "[a-z]{3}", "regex"),
    CompileGrammar("json", '{"type": "object", "properties": {"a": {"type": "integer"}}}', "json"),
]
REFUSED: list[AnyJob] = [
    EncodeChat(ChatInput([{"role": "user", "content": "x"}])),
    CompileGrammar("regex", "(", "regex"),
]


async def run(workers: Workers, job: AnyJob, client: str = "a", seconds: float = 5.0) -> Any:
    """The result of a job with this limit of processor time."""
    kind, limit = type(job), {"max_seconds": seconds}
    limited: Any = defstruct(kind.__name__, [], bases=(kind,), namespace=limit, frozen=True)
    return await workers.run(limited(*astuple(job)), client)


async def test_a_job_has_the_same_outcome_in_a_worker(workers: Workers, texts: Texts) -> None:
    assert await asyncio.gather(*(run(workers, job) for job in JOBS)) == [
        job.run(texts) for job in JOBS
    ]
    for job in REFUSED:
        with pytest.raises(InvalidRequest) as here:
            job.run(texts)
        with pytest.raises(InvalidRequest) as there:
            await run(workers, job)
        assert (there.value.message, there.value.param, there.value.code) == (
            here.value.message,
            here.value.param,
            here.value.code,
        )


async def test_a_job_over_its_time_is_refused_by_field_and_bound(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.text.workers.WAIT_FACTOR", 100)  # However busy the machine is.
    with pytest.raises(
        InvalidRequest, match=r"`grammar` takes more than 0.5 s of processor time"
    ) as caught:
        await run(workers, BOMB, seconds=0.5)
    assert caught.value.param == "grammar"
    assert await run(workers, JOBS[0])


async def test_a_job_over_its_memory_is_refused(workers: Workers) -> None:
    with pytest.raises(
        InvalidRequest, match="this text takes more than 128 MiB of memory to tokenize"
    ):
        await run(workers, Encode("!a" * 3_000_000), seconds=60.0)


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
    return workers._forker


async def job_process(workers: Workers, job: AnyJob) -> int:
    """The process of a job that runs."""
    while True:
        parents = children(forker(workers)) if job.needs_grammars else [forker(workers)]
        if there := [pid for parent in parents for pid in children(parent) if alive(pid)]:
            return there[0]
        await asyncio.sleep(0.005)


async def during(
    workers: Workers, job: AnyJob, harm: Callable[[int, int], None], seconds: float
) -> Any:
    """The outcome of a job during which `harm` was called with the forking process and the
    job's.
    """
    running = asyncio.create_task(run(workers, job, seconds=seconds))
    harm(forker(workers), await job_process(workers, job))
    return await running


@pytest.mark.parametrize(
    "harm",
    [
        lambda forker, job: os.kill(job, signal.SIGKILL),
        lambda forker, job: os.kill(forker, signal.SIGKILL),
    ],
)
@pytest.mark.parametrize("job", [Encode("def f(x): " * 30_000), LARGE])
async def test_a_job_whose_process_is_killed_is_begun_again(
    workers: Workers, texts: Texts, job: AnyJob, harm: Callable[[int, int], None]
) -> None:
    assert await during(workers, job, harm, 20.0) == job.run(texts)


async def test_a_job_that_its_client_leaves_is_ended(workers: Workers) -> None:
    task = asyncio.create_task(run(workers, BOMB, seconds=60.0))
    process = await job_process(workers, BOMB)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while alive(process):
        await asyncio.sleep(0.005)
    assert not workers._turns and not workers._queue._jobs


async def test_a_job_that_makes_no_progress_is_refused_as_overload(workers: Workers) -> None:
    with pytest.raises(Overloaded):
        await during(workers, BOMB, lambda _, job: os.kill(job, signal.SIGSTOP), 0.2)


def no_process(*_: Any, **__: Any) -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize("sigchld", [signal.SIG_DFL, signal.SIG_IGN])
async def test_only_a_forking_process_that_is_there_is_killed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, sigchld: signal.Handlers
) -> None:
    """Not process 0, which is this process's group, where it has ended and none can be forked."""
    killed: list[int] = []
    monkeypatch.setattr("server.text.workers.FORK_SECONDS", 0.3)
    assert await run(workers, JOBS[0])
    first = forker(workers)
    previous = signal.signal(signal.SIGCHLD, sigchld)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("server.text.workers.os.kill", lambda pid, _: killed.append(pid))
            KILL(first, signal.SIGSTOP)  # It does not answer,
            waiting = asyncio.create_task(run(workers, JOBS[0]))
            await asyncio.sleep(0.05)
            patch.setattr("server.text.workers.child_process.fork", no_process)
            KILL(first, signal.SIGKILL)  # and ends,
            while alive(first):
                await asyncio.sleep(0.005)
            with pytest.raises(OSError, match="unavailable"):
                workers.keep_running()  # while no other can be started.
            with pytest.raises(Unavailable):
                await waiting
            workers._kill()
            workers.close()
            assert not killed
    finally:
        signal.signal(signal.SIGCHLD, previous)


async def test_a_job_for_which_no_process_is_forked_is_answered_at_once(
    texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the forking process, which stays, with all the processes that it has forked."""
    limited = Workers()
    forks = iter([child_process.fork])  # In the forking process none is left.
    monkeypatch.setattr(
        child_process, "fork", lambda *args, **options: next(forks, no_process)(*args, **options)
    )
    try:
        limited.start(texts)
        there = forker(limited)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await run(limited, JOBS[0], seconds=60.0)
        assert time.monotonic() - began < FORK_SECONDS and forker(limited) == there and alive(there)
    finally:
        limited.close()


async def test_nothing_depends_on_the_files_once_they_are_read(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    workers = Workers()
    try:
        workers.start(texts := Texts(TextCodec(tmp_path)))
        (tmp_path / "tokenizer.json").unlink()
        for job in (Encode("x"), JOBS[-1]):
            assert await run(workers, job) == job.run(texts)
            os.kill(forker(workers), signal.SIGKILL)
            assert await run(workers, job) == job.run(texts)
    finally:
        workers.close()


async def test_a_tokenizer_that_cannot_be_used_for_grammars_serves_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where llguidance refuses it, nor where preparing it ends the process."""
    for fails in (ValueError("no"), None):
        monkeypatch.setattr(guidance, "grammar_tokenizer", lambda *_, fails=fails: _raise(fails))
        workers = Workers()
        try:
            workers.start(Texts(TextCodec(EMBEDDED)))
            with pytest.raises(
                InvalidRequest,
                match="`regex` is not supported: this model's tokenizer cannot be used",
            ) as caught:
                await run(workers, CompileGrammar("regex", "[a-z]{3}", "regex"))
            assert caught.value.param == "regex"
            assert await run(workers, JOBS[0])
        finally:
            workers.close()


def _raise(error: Exception | None) -> None:
    if error is None:
        os.kill(os.getpid(), signal.SIGXCPU)
    else:
        raise error


async def test_an_engine_has_what_it_asked_for_from_the_next_process(workers: Workers) -> None:
    """What it asks for while there is no process that forks."""
    await run(workers, JOBS[-1])
    os.kill(forker(workers), signal.SIGKILL)
    while alive(forker(workers)):
        await asyncio.sleep(0.005)
    masks = MaskProcesses(workers.grammars)
    grammar = LLMatcher.grammar_from_regex("[ab]+")
    asked: Any = SimpleNamespace(grammar=grammar, healed="", opening=None)
    constraint = masks.constraint(asked)
    assert constraint is not None
    constraint.begin([])
    workers.keep_running()
    while constraint.is_pending:
        masks.collect(0.0)
        await asyncio.sleep(0.005)
    assert constraint.take().mask is not None
    constraint.end()
    for spare in masks._spares:  # None where the mask was slow.
        spare.close()
    masks._selector.close()


TEMPLATES: list[tuple[str, bool]] = [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
    ("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}", False),
    ("{{ 'a' * 10**10 }}x", False),
    (
        "{% set ns = namespace(x='ab') %}{% for m in messages %}{% set ns.x = ns.x ~ ns.x %}{% "
        "endfor %}{{ ns.x }}",
        False,
    ),
]
BROKEN = ["{% for %}", "{{ " + "(" * 20_000, "{{ 10**(10**8) }}", "{% if 1 %}" * 200]


async def loaded(folder: Path, template: str) -> Any:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    workers = Workers()
    try:
        workers.start(Texts(TextCodec(folder)))
        return await workers.loaded()
    finally:
        workers.close()


@pytest.mark.parametrize(("template", "cheap"), TEMPLATES)
async def test_a_template_that_proved_cheap_is_told_from_others(
    tmp_path: Path, template: str, cheap: bool
) -> None:
    # A busy machine may make each rendering of a trial slow.
    for _ in range(5 if cheap else 1):
        said = await loaded(tmp_path, template)
        if said.cheap_template is cheap:
            break
    assert not said.error and said.cheap_template is cheap


@pytest.mark.parametrize(("written", "end"), [("<|endoftext|>", 0), ("\n", None)])
async def test_the_end_of_a_turn_that_a_template_writes_is_told(
    tmp_path: Path, written: str, end: int | None
) -> None:
    template = "{% for m in messages %}{{ m.content }}END{% endfor %}".replace("END", written)
    assert (await loaded(tmp_path, template)).turn_end == end


@pytest.mark.parametrize(
    "template", BROKEN, ids=lambda template: template[:20].encode(errors="replace").decode()
)
async def test_a_template_that_cannot_be_compiled_is_refused_by_file_and_field(
    tmp_path: Path, template: str
) -> None:
    said = await loaded(tmp_path, template)
    assert (
        said.error.startswith(f"{tmp_path / 'tokenizer_config.json'}: chat_template")
        and "\n" not in said.error
    )
