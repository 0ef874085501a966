"""Replicas behind Ray Serve that are killed, started and ended under load: nothing may be lost that
could be answered by another.

    python -m tests.trials.ray_serve --output DIR [--parts killed,scaled] [--streams 200]

killed  2 replicas and 200 requests: whole answers, streams,
and resumable streams. When a third of the streams have begun, one replica is
        killed. What had not begun, and what the other replica has,
        must be complete. A stream that had begun must end with an error event,
        its resumption must be answered 410, and the same request again must give the same tokens.
scaled  from 1 replica to 3 and back to 1,
as Ray decides by the number of open requests. Every request must get the answer that a server
        alone gives.

Needs the extra `ray`. Writes ray_serve.json into DIR. Exit status 1 where one of that does not
hold.
"""

import argparse
import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.live import Answer, Ask, Server, ask, asks
from tests.support.processes import kill
from tests.support.ray_cluster import Cluster, run_parts
from tests.support.report import Check, Found, conclude, show

PARTS = "killed", "scaled"
OPTIONS = "--engine.threads", "1", "--cache.pages", "2048"
FEW, MANY = 2, 32
"""Clients of `scaled`: with few, one replica is enough; with many, three are."""


async def oracles_of(folder: Path, questions: list[Ask]) -> dict[Ask, Answer]:
    """The answers of a server alone."""
    server = await Server.start(folder / "single.log", *OPTIONS)
    try:
        answers = await asyncio.gather(*(ask(server.port, question) for question in questions))
    finally:
        await server.stop()
    for answer in answers:
        if answer.failure:
            raise SystemExit(f"the server alone failed: {answer.failure}")
    return dict(zip(questions, answers, strict=True))


# --- a replica is killed


def kind_of(question: Ask) -> str:
    """What a question asks for, in words."""
    return (
        "whole answer"
        if not question.stream
        else "resumable stream"
        if question.resumable
        else "stream"
    )


@dataclass(slots=True)
class Outcome:
    """What came of one request, and of what its client did after its stream was cut."""

    answer: Answer
    begun: bool
    """Whether it had got a token when the replica was killed."""
    problem: str | None
    resumed: int | None = None
    again: str | None = None
    """The problem of the same request, sent again."""
    wrong_tokens: bool = False
    """Whether the tokens before the cut are not those of the undisturbed answer."""


async def outcome(cluster: Cluster, answer: Answer, oracle: Answer, begun: bool) -> Outcome:
    """Resumes the stream if it was cut, and then sends the request again."""
    found = Outcome(answer, begun, answer.problem(oracle))
    if found.problem is not None:
        found.wrong_tokens = answer.ids != oracle.ids[: len(answer.ids)]
        if stream := answer.headers.get("x-stream-id"):
            last = {"last-event-id": answer.event_ids[-1]} if answer.event_ids else None
            found.resumed, _ = await cluster.get(f"/v1/streams/{stream}", last)
        found.again = (await ask(cluster.port, answer.ask)).problem(oracle)
    return found


async def killed(options: argparse.Namespace, folder: Path) -> tuple[Found, list[Check]]:
    """SIGKILL to one of two replicas."""
    questions = asks(options.streams, 128, seed=7, prompt_tokens=(4, 24))
    questions = [
        replace(each, resumable=number % 5 < 2, stream=number % 5 != 4)
        for number, each in enumerate(questions)
    ]
    oracles = await oracles_of(folder, questions)
    cluster = await Cluster.start(
        folder / "ray.log", options=" ".join(OPTIONS), min_replicas=2, max_replicas=2
    )
    begun: set[Ask] = set()
    try:
        tasks = [
            asyncio.create_task(ask(cluster.port, question, lambda answer: begun.add(answer.ask)))
            for question in questions
        ]
        async with asyncio.timeout(120):
            while len(begun) < options.streams // 3:
                await asyncio.sleep(0.01)
        victim = cluster.actors()[0]
        kill(victim)
        before, open_then = set(begun), sum(not task.done() for task in tasks)
        killed_at = time.perf_counter()
        answers = await asyncio.gather(*tasks)
        found = [
            await outcome(cluster, answer, oracles[answer.ask], answer.ask in before)
            for answer in answers
        ]
        names = await cluster.until(lambda names: len(names) == 2)
        seconds = time.perf_counter() - killed_at
    finally:
        await cluster.stop()
    told = {
        "open_when_killed": open_then,
        "replicas_after": len(names),
        "seconds_to_two_replicas": seconds,
    }
    return told | {"outcomes": count_killed(found)}, killed_checks(found, open_then)


def count_killed(found: list[Outcome]) -> list[Found]:
    """A row for each kind of request."""
    rows = []
    for kind in ("whole answer", "stream", "resumable stream"):
        ours = [each for each in found if kind_of(each.answer.ask) == kind]
        cut = [each for each in ours if each.problem is not None]
        rows.append(
            {
                "kind": kind,
                "asked": len(ours),
                "complete": len(ours) - len(cut),
                "cut": len(cut),
                "resumed": dict(
                    Counter(str(each.resumed) for each in cut if each.resumed is not None)
                ),
                "complete_again": sum(each.again is None for each in cut),
            }
        )
    headings = (
        "a replica killed",
        "asked",
        "complete",
        "cut",
        "answer to a resumption",
        "complete when sent again",
    )
    show(headings, [tuple(row.values()) for row in rows])
    return rows


def killed_checks(found: list[Outcome], open_then: int) -> list[Check]:
    """The requirements of `killed`."""
    cut = [each for each in found if each.problem is not None]
    late = [each.problem for each in cut if not each.begun]
    silent = [each.problem for each in cut if "has ended" not in str(each.problem)]
    wrong = sum(each.wrong_tokens for each in cut)
    resumed = [each.resumed for each in cut if each.answer.ask.resumable]
    again = [each.again for each in cut if each.again is not None]
    return [
        Check(
            "killed: requests were open",
            open_then > len(found) // 2,
            f"{open_then} of {len(found)}",
        ),
        Check("killed: some streams were cut", 0 < len(cut) < len(found), f"{len(cut)}"),
        Check(
            "killed: what had not begun is complete", not late, f"{len(late)} are not; {late[:3]}"
        ),
        Check(
            "killed: a cut stream ends with an error event",
            not silent,
            f"{len(silent)} do not; {silent[:3]}",
        ),
        Check("killed: its tokens before that are right", not wrong, f"{wrong} are not"),
        Check(
            "killed: resuming a cut stream is answered 410",
            set(resumed) == {410},
            str(Counter(resumed)),
        ),
        Check(
            "killed: the same request again is answered as ever",
            not again,
            f"{len(again)} are not; {again[:3]}",
        ),
    ]


# --- replicas come and go


@dataclass(slots=True)
class Load:
    """Clients that ask until they are told to end, and what came of it."""

    cluster: Cluster
    oracles: dict[Ask, Answer]
    answered: int = 0
    problems: list[str] = field(default_factory=list)
    running: int = 0
    wanted: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def want(self, clients: int) -> None:
        """From now on so many clients."""
        self.wanted = clients
        while self.running < clients:
            self.running += 1
            self.tasks.add(asyncio.create_task(self._client(self.running)))

    async def _client(self, number: int) -> None:
        for question in itertools.islice(itertools.cycle(self.oracles), number, None):
            if number > self.wanted:
                self.running -= 1
                return
            stream = (self.answered + number) % 3 != 0
            asked = replace(question, stream=stream, resumable=question.resumable and stream)
            problem = (await ask(self.cluster.port, asked)).problem(self.oracles[question])
            self.answered += 1
            if problem is not None:
                self.problems.append(problem)


async def scaled(options: argparse.Namespace, folder: Path) -> tuple[Found, list[Check]]:
    """1 -> 3 -> 1."""
    questions = [
        replace(each, resumable=number % 2 == 0)
        for number, each in enumerate(asks(16, 48, seed=8, prompt_tokens=(4, 24)))
    ]
    oracles = await oracles_of(folder, questions)
    arguments = {
        "min_replicas": 1,
        "max_replicas": 3,
        "target_requests": 6,
        "upscale_delay": 2,
        "downscale_delay": 5,
    }
    cluster = await Cluster.start(folder / "ray.log", options=" ".join(OPTIONS), **arguments)
    load, phases = Load(cluster, oracles), []
    try:
        for clients, replicas in ((FEW, 1), (MANY, 3), (FEW, 1)):
            began, before = time.perf_counter(), load.answered
            load.want(clients)
            await cluster.until(lambda names, wanted=replicas: len(names) == wanted, 180)  # type: ignore[misc]
            await asyncio.sleep(10)
            phases.append(
                (
                    clients,
                    len(await cluster.metrics()),
                    time.perf_counter() - began,
                    load.answered - before,
                )
            )
        load.want(0)
        await asyncio.gather(*load.tasks)
    finally:
        await cluster.stop()
    show(("clients", "replicas at the end", "seconds", "requests answered"), phases)
    reached = [phase[1] for phase in phases]
    checks = [
        Check("scaled: 1, 3 and 1 replicas", reached == [1, 3, 1], str(reached)),
        Check(
            "scaled: every request has its answer",
            not load.problems,
            f"{load.answered} answered, {len(load.problems)} wrong; {load.problems[:3]}",
        ),
    ]
    return {"phases": phases, "answered": load.answered, "problems": load.problems[:50]}, checks


async def run(options: argparse.Namespace, folder: Path) -> int:
    """The parts that were asked for."""
    result: Found = {}
    checks: list[Check] = []
    for name, part in (("killed", killed), ("scaled", scaled)):
        if name in options.parts:
            result[name], more = await part(options, folder)
            checks += more
    return conclude("ray_serve", options.output, {}, result, checks)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=200, help="requests of `killed`")
    run_parts(parser, PARTS, run)


if __name__ == "__main__":
    main()
