"""`serve run deploy.ray.app:app` with two replicas on a real Ray cluster. Needs the extra `ray`:
scripts/ray runs it.

The cases share one cluster, and the one that kills a replica comes last.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import yaml

from tests.support.live import ask, asks, exchange
from tests.support.paths import ROOT
from tests.support.processes import ServerProcess, alive, children, command_line, engines, kill
from tests.support.ray_cluster import Cluster
from tests.support.wire import http_request

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
OPTIONS = "--engine.threads", "1", "--cache.pages", "512"
LONG = {
    "inputs": "import os",
    "stream": True,
    "parameters": {"max_new_tokens": 2000, "ignore_eos": True},
}

VALIDATE = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from deploy.ray.app import Settings
(application,) = ServeDeploySchema.model_validate(yaml.safe_load(sys.stdin)).applications
assert application.import_path == "deploy.ray.app:app", application
Settings.model_validate(application.args)
"""

REFUSED = """
import sys
from pydantic import ValidationError
from deploy.ray.app import Settings
for option in sys.argv[1:]:
    name = option.split("=")[0].replace("-", "_").replace("__", "--", 1)
    for written in option, option.replace("=", " "):
        try:
            Settings(options=f"--model x {written}")
        except ValidationError as error:
            assert name in str(error), error
        else:
            raise SystemExit(f"{written} is taken")
Settings(options="--model /port --server.model_name host --engine.threads=1")
"""

RESUME = """
import asyncio
from starlette.responses import Response
from deploy.ray.affinity import Call
from deploy.ray.app import Ingress

class Asked(Ingress):
    async def _ask_all(self, method):
        return list(statuses)

    async def _answer(self, call):
        asked.append(call.replica)
        return Response(status_code=statuses[call.replica])

ingress = Asked(None, 1024)
for statuses, status, order, owner in (
    ({"a": 401, "b": 200}, 200, "ab", "b"),
    ({"a": 404, "b": 401}, 401, "b", "b"),  # The owner is asked alone, whatever it answers but 404.
    ({"a": 429, "b": 404}, 429, "bab", None),
    ({"a": 404, "b": 404}, 404, "ab", None),
    ({"a": 404, "b": 503}, 503, "ab", None),
    ({"a": 204, "b": 404}, 204, "a", "a"),
    ({"a": 404, "b": 206}, 206, "aab", "b"),
):
    asked = []
    answer = asyncio.run(ingress._resume("s", Call("GET", "/v1/streams/s", (), b"")))
    assert (answer.status_code, "".join(asked), ingress.owners.find("s")) == (status, order, owner), (statuses, asked)
"""  # noqa: E501

LOADS = """
import asyncio
from types import SimpleNamespace
from deploy.ray.affinity import Call
from deploy.ray.router import PrefixRouter

router = object.__new__(PrefixRouter)
router._use_replica_queue_len_cache = False  # As when all that Ray's cache holds has expired.
router.initialize_state()
a, b = (SimpleNamespace(replica_id=type("Id", (), {"unique_id": name})()) for name in "ab")
request = SimpleNamespace(args=[Call("POST", "/generate", (), b"")], routing_context=SimpleNamespace(should_backoff=False))

def first():
    return asyncio.run(router.choose_replicas([a, b], request))[0][0]

assert first() is a
router.on_send_request(a.replica_id)
assert first() is b
router.on_new_queue_len_info(b.replica_id, 2)
assert first() is a
for _ in range(3):
    router.decrement_queue_len_cache(b.replica_id)
assert first() is b
"""  # noqa: E501


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    log = tmp_path_factory.mktemp("ray") / "ray.log"
    started = await Cluster.start(log, options=" ".join(OPTIONS), min_replicas=2, max_replicas=2)
    try:
        yield started
    finally:
        await started.stop()


async def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
    """Waits for what a coroutine function or a function says."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.1)
    raise AssertionError(what)


def post(path: str, body: Any, **headers: str) -> bytes:
    return http_request(
        "POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()}
    )


async def running(cluster: Cluster) -> float:
    """Sequences that the replicas compute."""
    return sum(each["onehead_requests_running"] for each in (await cluster.metrics()).values())


async def test_answers_of_both_dialects_are_a_single_servers(cluster: Cluster) -> None:
    questions = asks(12, 24, seed=3, prompt_tokens=(4, 40))
    with await asyncio.to_thread(ServerProcess, None, *OPTIONS) as server:
        oracles = await asyncio.gather(*(ask(server.port, question) for question in questions))
    answers = await asyncio.gather(*(ask(cluster.port, question) for question in questions))
    assert [answer.problem(oracle) for answer, oracle in zip(answers, oracles, strict=True)] == [
        None
    ] * len(questions)


async def test_headers_pass_in_both_directions(cluster: Cluster) -> None:
    request = post("/v1/completions", {"prompt": "x", "max_tokens": 1}, x_request_id="our-id")
    async with exchange(cluster.port, request) as reply:
        body = await reply.body()
    assert reply.status == 200 and reply.headers["x-request-id"] == "our-id"
    assert reply.headers["content-length"] == str(len(body))
    assert reply.headers["x-content-type-options"] == "nosniff"


async def test_a_refusal_is_the_servers_own(cluster: Cluster) -> None:
    async with exchange(
        cluster.port, post("/v1/completions", {"prompt": "x", "max_tokns": 1})
    ) as reply:
        assert (
            reply.status == 400
            and "max_tokns" in json.loads(await reply.body())["error"]["message"]
        )
    assert (await cluster.get("/v1/models?x=1"))[0] == 200
    assert (await cluster.get("/nothing/here"))[0] == 404


async def test_a_body_beyond_the_bound_is_refused_before_it_is_read(cluster: Cluster) -> None:
    for path, error in (
        ("/infill", {"type": "BadRequestError", "param": None, "code": 413}),
        ("/generate", None),
    ):
        async with exchange(cluster.port, post(path, {"inputs": "x" * (3 * 2**20)})) as reply:
            body = json.loads(await reply.body())
        assert reply.status == 413
        message = body["error"].pop("message") if error else body["error"]
        assert "2097152 bytes (max_body_bytes)" in message and body == (
            {"error": error} if error else body | {"error_type": "validation"}
        )


async def test_events_come_one_by_one_and_a_client_that_leaves_cancels_its_request(
    cluster: Cluster,
) -> None:
    async with exchange(cluster.port, post("/generate", LONG)) as reply:
        pieces = reply.pieces()
        arrived = [await anext(pieces) for _ in range(20)]
        assert max(piece.count(b"data:") for piece in arrived) <= 5
        assert await running(cluster) == 1
        reply.cut()

    async def idle() -> bool:
        return await running(cluster) == 0

    await until(idle, "the request was not cancelled", 5)


async def test_turns_of_a_conversation_go_to_one_replica(cluster: Cluster) -> None:
    before = await cluster.metrics()
    prompt = list(range(1000, 1400))
    for turn in range(4):
        async with exchange(
            cluster.port,
            post("/v1/completions", {"prompt": prompt + [7] * 70 * turn, "max_tokens": 1}),
        ) as reply:
            usage = json.loads(await reply.body())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 400 + 70 * 2 - 64
    after, name = await cluster.metrics(), "onehead_prompt_tokens_total"
    assert sum(after[replica][name] > before[replica][name] for replica in after) == 1


async def test_a_resumable_stream_is_read_again_and_cancelled_at_its_replica(
    cluster: Cluster,
) -> None:
    for _ in range(4):  # Of both replicas.
        async with exchange(cluster.port, post("/generate", LONG | {"resumable": True})) as reply:
            events = reply.events()
            assert [(await anext(events)).id for _ in range(6)][
                -1
            ] == f"{reply.headers['x-stream-id']}.6"
            stream = reply.headers["x-stream-id"]
            reply.cut()
        async with exchange(
            cluster.port,
            http_request("GET", f"/v1/streams/{stream}", headers={"last-event-id": f"{stream}.3"}),
        ) as reply:
            assert (await anext(reply.events())).id == f"{stream}.4"
            reply.cut()
        assert (await cluster.get(f"/v1/streams/{stream}", method="DELETE"))[0] == 204
        status, text = await cluster.get(f"/v1/streams/{stream}?after=4")
        assert status == 200 and "cancelled" in text
    status, text = await cluster.get("/v1/streams/unknown")
    assert status == 404 and json.loads(text)["error"]["code"] == "stream_not_found"


async def test_a_replica_stays_while_its_engine_is_replaced(cluster: Cluster) -> None:
    actors = sorted(cluster.actors())
    (server,) = (child for child in children(actors[0]) if b"commands.cli" in command_line(child))
    for engine in engines(server):
        kill(engine)
    answers = await asyncio.gather(
        *(ask(cluster.port, question) for question in asks(16, 8, seed=4))
    )
    assert [answer.failure for answer in answers] == [None] * 16
    await asyncio.sleep(6)  # Longer than the period of Ray's health checks.
    assert sorted(cluster.actors()) == actors


async def test_a_server_that_ends_takes_its_replica_along_and_its_streams_have_expired(
    cluster: Cluster,
) -> None:
    """Two streams, one on each replica, as the less busy one gets the second."""
    actors = cluster.actors()
    request = post("/generate", LONG | {"resumable": True})
    async with exchange(cluster.port, request) as first, exchange(cluster.port, request) as second:
        for reply in (first, second):
            await anext(reply.pieces())
        assert [
            values["onehead_requests_running"] for values in (await cluster.metrics()).values()
        ] == [1, 1]
        kill(next(child for child in children(actors[0]) if b"commands.cli" in command_line(child)))
        await until(lambda: not alive(actors[0]), "the replica did not end with its server")
        states = []
        for reply in (first, second):
            async with asyncio.timeout(2):
                stream = reply.headers["x-stream-id"]
                status, text = await cluster.get(f"/v1/streams/{stream}", method="DELETE")
                states.append((status, json.loads(text)["error"]["code"] if text else ""))
        ends = [(await reply.body()).rpartition(b"data: ")[2] for reply in (first, second)]
    assert sorted(states) == [(204, ""), (410, "stream_expired")]
    gone = states.index((410, "stream_expired"))
    assert json.loads(ends[gone]) == {
        "error": "the server of this stream has ended; send the request again",
        "error_type": "generation",
    }
    assert "cancelled" in json.loads(ends[1 - gone])["error"]
    await cluster.until(lambda names: len(names) == 2)
    assert actors[0] not in cluster.actors()


async def test_the_configurations_are_what_serve_takes() -> None:
    """In a process of its own: Ray's schemas warn when they are imported."""
    manifests = yaml.safe_load_all((ROOT / "deploy" / "ray" / "rayservice.yaml").read_text())
    (service,) = (manifest for manifest in manifests if manifest["kind"] == "RayService")
    for text in (
        (ROOT / "deploy" / "ray" / "serve.yaml").read_text(),
        service["spec"]["serveConfigV2"],
    ):
        subprocess.run(
            [sys.executable, "-c", VALIDATE],
            input=text,
            text=True,
            check=True,
            cwd=ROOT,
            timeout=60,
        )


async def test_options_that_the_application_gives_itself_are_refused_by_name() -> None:
    options = (
        "--host=::1",
        "--port=1",
        "--server.drain-timeout=1",
        "--server.max_body_bytes=5000",
        "--server.tls_certificate=c.pem",
    )
    subprocess.run([sys.executable, "-c", REFUSED, *options], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    "script",
    [RESUME, LOADS],
    ids=["only success tells where a stream is", "loads outlive Ray's cache of them"],
)
async def test_without_a_cluster(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=60)
