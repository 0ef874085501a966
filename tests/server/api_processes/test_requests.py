"""What the front process keeps of several API processes: limits hold over all of them, and the death of one releases what it had."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from server import api_protocol, protocol
from server.errors import Overloaded
from tests.support.fake_engine import FakeEngine, serve
from tests.support.fake_fleet import FakeFleet, FakeProcess

BODY = {"prompt": "abc", "max_tokens": 6, "temperature": 0, "return_token_ids": True}
PATH = "/v1/completions"


async def until(condition: Callable[[], Any]) -> None:
    """Lets the event loop run until something holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def asked(process: FakeProcess, body: dict[str, Any] = BODY, key: str = "") -> AsyncIterator["asyncio.Task[httpx.Response]"]:
    """A request that is being answered, and is cancelled afterwards."""
    headers = {"idempotency-key": key} if key else {}
    task = asyncio.create_task(process.http.post(PATH, json=body, headers=headers))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def counted(fleet: FakeFleet) -> tuple[int, int, int, int]:
    """What the front process holds for all requests."""
    admission = fleet.served.client.admission
    return len(fleet.served.supervisor.open), admission.num_reserved, len(admission.keys_in_use), admission.waiting_tokens


async def test_both_answer_as_one_process_does(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder).ready()
    one = serve(tokenizer_folder)
    await until(lambda: one.client.accepting)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(one.app), base_url="http://test") as http:
        expected = (await http.post(PATH, json=BODY | {"n": 3, "logprobs": 2, "echo": True})).json()["choices"]
    for process in fleet.processes:
        response = await process.http.post(PATH, json=BODY | {"n": 3, "logprobs": 2, "echo": True})
        assert response.status_code == 200 and response.json()["choices"] == expected
    assert counted(fleet) == (0, 0, 0, 0)
    text = fleet.served.client.metrics.exposition().decode()
    assert 'onehead_requests_total{outcome="length"} 6.0' in text and "onehead_time_to_first_token_seconds_count 6.0" in text
    assert (await fleet.processes[0].http.get("/metrics")).text.splitlines()[0] == text.splitlines()[0]


async def test_tokens_of_a_step_are_one_message(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder).ready()
    process = fleet.processes[0]
    await asyncio.gather(*(process.http.post(PATH, json=BODY | {"prompt": "abc" * i}) for i in range(1, 5)))
    messages = [message for message in process.sent if isinstance(message, protocol.Tokens)]
    assert sum(len(message.tokens) for message in messages) == 4 * 6 and max(len(message.tokens) for message in messages) == 4
    assert not [message for message in fleet.processes[1].sent if isinstance(message, protocol.Tokens)]


async def test_the_limit_of_open_sequences_counts_those_of_all_processes(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder, max_open=2).ready()
    fleet.served.engine.defer = lambda call: None  # The engine says nothing more.
    one, other = fleet.processes
    async with asked(one), asked(other):
        await until(lambda: len(fleet.served.supervisor.open) == 2)
        refused = await other.http.post(PATH, json=BODY)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_requests" and refused.headers["retry-after"]
    await until(lambda: counted(fleet) == (0, 0, 0, 0))


async def test_a_refusal_is_answered_before_the_body_is_read(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder).ready()
    fleet.served.client.admission.draining = True
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body is not asked for")

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b"", "asgi": {}}
    await fleet.processes[1].app(scope, receive, send)
    assert sent[0]["status"] == 503 and json.loads(sent[1]["body"])["error"]["code"] == "server_shutting_down"


async def test_an_idempotency_key_is_in_use_in_every_process(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder).ready()
    fleet.served.engine.defer = lambda call: None
    one, other = fleet.processes
    async with asked(one, key="once"):
        await until(lambda: fleet.served.supervisor.open)
        assert (await other.http.post(PATH, json=BODY, headers={"idempotency-key": "once"})).status_code == 409
    await until(lambda: counted(fleet) == (0, 0, 0, 0))


async def test_a_body_that_has_not_come_holds_no_place(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder).ready()
    reservation = fleet.processes[0].client.reserve("", "somebody")
    await reservation.confirmed()
    assert fleet.served.client.admission.num_reserved == 1
    reservation.release()
    await until(lambda: fleet.served.client.admission.num_reserved == 0)
    reservation.close()


async def test_a_request_that_is_left_while_it_is_opened_is_cancelled(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder).ready()
    fleet.served.engine.defer = lambda call: None
    process = fleet.processes[0]
    task = asyncio.create_task(process.http.post(PATH, json=BODY))
    await until(lambda: process.client._reservations)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: fleet.served.engine.cancels and counted(fleet) == (0, 0, 0, 0))
    assert process.client._open == {} and process.client._questions == {}


async def test_the_death_of_a_process_ends_what_it_had_and_nothing_else(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder).ready()
    one, other = fleet.processes
    body = BODY | {"max_tokens": 40}
    expected = (await other.http.post(PATH, json=body)).json()["choices"][0]["token_ids"]
    async with asked(one, body, "once"), asked(other, body) as answered:
        await until(lambda: any(isinstance(message, protocol.Tokens) for message in one.sent))
        await one.client.reserve("", "waits for its body").confirmed()
        one.die()
        assert (await answered).json()["choices"][0]["token_ids"] == expected
    await until(lambda: counted(fleet) == (0, 0, 0, 0))
    text = fleet.served.client.metrics.exposition().decode()
    assert 'onehead_requests_total{outcome="cancelled"} 1.0' in text and 'onehead_requests_total{outcome="length"} 2.0' in text
    assert (await other.http.post(PATH, json=body, headers={"idempotency-key": "once"})).status_code == 200


async def test_an_engine_that_dies_under_two_processes_loses_nothing(tokenizer_folder: Path) -> None:
    fleet = await FakeFleet(tokenizer_folder, FakeEngine(crash_after=[30, 30])).ready()
    bodies = [BODY | {"prompt": "abc" * i, "max_tokens": 20} for i in range(1, 5)]
    responses = await asyncio.gather(*(fleet.processes[i % 2].http.post(PATH, json=body) for i, body in enumerate(bodies)))
    assert len(fleet.served.engine.runs) > 1
    expected = {tuple(submit.prompt): fleet.served.engine.answer(submit) for submit in fleet.served.engine.submits}
    assert sorted(response.json()["choices"][0]["token_ids"] for response in responses) == sorted(expected.values())


def test_every_error_of_a_request_crosses_the_link() -> None:
    error = Overloaded("too much", 7, code="too_many_requests", param="n")
    again = api_protocol.Problem.of(error).error
    assert type(again) is Overloaded and vars(again) == vars(error)
