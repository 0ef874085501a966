"""Ray Serve in front of onehead: replicas of `onehead serve`, and an ingress that routes requests
to them by their prefix.

    serve run deploy.ray.app:app options="--model FOLDER" max_replicas=2

A replica is a Ray actor with one server as its child process, which it passes requests to.
Invariant: replica and server live and end together, and the bytes of an answer are the server's
own. It knows no dialect.
"""

import asyncio
import os
import re
import shlex
import subprocess
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import aiohttp
import yarl
from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from deploy.ray import answers
from deploy.ray.affinity import GENERATING, Call, StreamOwners, prefix_keys
from server.child_process import child_command
from server.errors import BodyTooLarge
from server.http.body import read_bytes

DRAIN_SECONDS = 60
"""Time that open requests get when a replica ends: Ray waits for them, and then the server as long
again for what is left. Ray sends such a replica nothing new, so that a resumable stream that has
lost its connection cannot be read again meanwhile: that is answered 410.
"""
OWN_OPTIONS = {
    "host",
    "port",
    "server.lb_grace",
    "server.drain_timeout",
    "server.trusted_proxies",
    "server.max_body_bytes",
}
"""Options of onehead serve that a replica gives to its server itself."""
UNUSABLE_OPTIONS = {"server.tls_certificate", "server.tls_key", "server.root_path"}
"""Options with which its server could not be reached as it is here."""
ATTEMPTS = 2
"""Replicas that are sent a request in turn, where one ends before any of its answer has been passed
on."""
EVENTS = "text/event-stream"
HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer"}
)
"""Headers of one connection: those on the other side of a proxy are its own."""
REQUEST_HEADERS = HOP_HEADERS | {"host", "content-length", "expect", "x-forwarded-for"}
"""Headers of a request that are made anew for the server."""
ANSWER_HEADERS = HOP_HEADERS | {"date", "server", "x-request-id"}
"""Headers of an answer that Ray's proxy adds itself; x-request-id is the one that it has passed
on."""
Head = tuple[str, int, list[tuple[str, str]]]
"""Of an answer: the replica that gives it, status and headers."""


class Settings(BaseModel):
    """Arguments of `serve run`, or `args` in a configuration."""

    model_config = ConfigDict(extra="forbid")
    options: str = Field("", description="options of onehead serve, as on its command line")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    target_requests: float = Field(
        32, gt=0, description="open requests of a replica beyond which Ray starts another one"
    )
    upscale_delay: float = Field(
        15, ge=0, description="seconds of too many requests before a replica is started"
    )
    downscale_delay: float = Field(300, ge=0, description="seconds of too few before one is ended")
    cpus: float = Field(
        1,
        gt=0,
        description="processors of a replica: Ray sets OMP_NUM_THREADS to it, which onehead follows",  # noqa: E501
    )
    gpus: float = Field(0, ge=0, description="GPUs of a replica")
    affinity: bool = Field(True, description="whether a prompt goes where its prefix is cached")
    max_body_bytes: int = Field(
        2 * 2**20, ge=1024, le=2**30, description="longest request body; longer ones get 413"
    )

    @field_validator("options")
    @classmethod
    def _only_free_options(cls, options: str) -> str:
        """Refuses options that would be accepted and have no effect, or leave no server to be
        reached.
        """
        for word in shlex.split(options):
            name = word.partition("=")[0].removeprefix("--").replace("-", "_")
            if word.startswith("--") and name in OWN_OPTIONS | UNUSABLE_OPTIONS:
                why = (
                    "is set by deploy/ray/app.py"
                    if name in OWN_OPTIONS
                    else "cannot be used behind Ray Serve"
                )
                instead = (
                    "give the argument max_body_bytes"
                    if name == "server.max_body_bytes"
                    else "leave it out"
                )
                raise ValueError(f"--{name} {why}; {instead}")
        return options


class Replica:
    """One `onehead serve`, on a free port of the loopback interface."""

    async def __init__(self, options: list[str]) -> None:  # type: ignore[misc]  # Ray awaits it.
        self.name: str = serve.get_replica_context().replica_id.unique_id
        self.ending = False
        arguments = (
            "serve",
            *options,
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--server.lb_grace",
            "0",
        )
        proxy = (
            "--server.drain_timeout",
            str(DRAIN_SECONDS),
            "--server.trusted_proxies",
            "127.0.0.1",
        )
        # In a session of its own, so that a signal to Ray's processes reaches it through `__del__`
        # alone.
        self.server = subprocess.Popen(
            child_command("commands.cli", *arguments, *proxy),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.server.stdout is not None
        # It is written when the engine is ready.
        line = await asyncio.to_thread(self.server.stdout.readline)
        port = re.search(r":(\d+)\b(?!.*:\d)", line)
        if port is None:
            raise RuntimeError(
                f"onehead serve ended with status {self.server.wait()}; its messages are in this "
                "replica's log"
            )
        self.url = f"http://127.0.0.1:{port[1]}"
        threading.Thread(target=self._watch, daemon=True).start()
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    def _watch(self) -> None:
        """Ends this replica when its server ends, so that Ray replaces both at once."""
        self.server.wait()
        if not self.ending:
            os._exit(1)

    def __del__(self) -> None:
        """Called by Ray when no request is open any more."""
        if hasattr(self, "server"):
            self.ending = True
            self.server.terminate()
            self.server.wait()

    async def check_health(self) -> None:
        """Raises RuntimeError where this replica should be replaced. /health is 200 also while the
        server replaces its engine.
        """
        async with self.session.get(f"{self.url}/health") as answer:
            if answer.status != HTTPStatus.OK:
                raise RuntimeError(f"/health answers {answer.status}: {await answer.text()}")

    async def own_name(self) -> str:
        """The name by which a Call asks for this replica."""
        return self.name

    async def whole(self, call: Call) -> tuple[str, int, str]:
        """This replica's name, and status and text of its answer."""
        items: list[Any] = [item async for item in self(call)]
        return self.name, items[0][1], b"".join(items[1:-1]).decode()

    async def __call__(self, call: Call) -> AsyncIterator[Head | bytes | None]:
        """Passes a request on. Yields status and headers, the body as it comes, and None at its
        end; when this is not awaited to its end, the request is cancelled.
        """
        if call.replica not in ("", self.name):
            yield self.name, HTTPStatus.GONE, [("content-type", "application/json")]
            yield answers.expired()
            yield None
            return
        request = self.session.request(
            call.method,
            yarl.URL(answers.server_url(self.url, call.path), encoded=True),
            headers=call.headers,
            data=call.body or None,
            allow_redirects=False,
            skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
        )
        try:
            async with request as answer:
                yield (
                    self.name,
                    answer.status,
                    [(k, v) for k, v in answer.headers.items() if k.lower() not in ANSWER_HEADERS],
                )
                pieces = answer.content.iter_any()
                async for piece in (
                    answers.whole_events(pieces) if answer.content_type == EVENTS else pieces
                ):
                    yield piece
            yield None
        # The server has ended. Without None the answer is not whole, and `_watch` ends this
        # replica.
        except aiohttp.ClientError:
            return


class Ingress:
    """Receives all requests, and has replicas answer them."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self.replicas = replicas
        self.max_body_bytes = max_body_bytes
        self.owners = StreamOwners()

    async def __call__(self, request: Request) -> Response:
        """Every path and method of the server."""
        try:
            body = await read_bytes(request, self.max_body_bytes)
        except BodyTooLarge:
            return Response(
                answers.too_large(request.url.path, self.max_body_bytes),
                413,
                media_type="application/json",
            )
        call = call_of(request, body)
        stream = re.fullmatch(r"/v1/streams/([^/?]+)", request.url.path)
        if stream is not None:
            return await self._resume(stream[1], call)
        return await (self._metrics(call) if call.path == "/metrics" else self._answer(call))

    async def _metrics(self, call: Call) -> Response:
        """The metrics of all replicas, each sample with the label `replica`."""
        told = await self._ask_all("whole", call)
        refusal = next(
            (
                Response(text, status, media_type="application/json")
                for _, status, text in told
                if status != HTTPStatus.OK
            ),
            None,
        )
        return refusal or Response(
            answers.labelled({name: text for name, _, text in told}),
            media_type="text/plain; version=0.0.4",
        )

    async def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """What each replica returns, without those that have just ended."""
        results = await self.replicas.broadcast(method, *arguments).results_async(
            return_exceptions=True
        )
        return [result for result in results if not isinstance(result, BaseException)]

    async def _resume(self, stream: str, call: Call) -> Response:
        """From the stream's replica. Where that is not known, because this ingress is new, each is
        asked until one has the stream, which an error does not show. Where none has it, the last
        answer that says more than that it was not found.
        """
        if owner := self.owners.find(stream):
            response = await self._answer(replace(call, replica=owner))
            if response.status_code != HTTPStatus.NOT_FOUND:
                return response
            self.owners.forget(stream)
        found = None
        for name in await self._ask_all("own_name"):
            response = await self._answer(replace(call, replica=name))
            if response.status_code < HTTPStatus.MULTIPLE_CHOICES:
                self.owners.remember(stream, name)
                return response
            if found is None or response.status_code != HTTPStatus.NOT_FOUND:
                found = response
        return found or refused(call.path)

    async def _answer(self, call: Call) -> Response:
        """An answer that has not begun when its replica ends is asked for again from another."""
        for _ in range(ATTEMPTS):
            pieces = self.replicas.options(stream=True).remote(call)
            try:
                head, first = await anext(pieces), await anext(pieces)
            except BackPressureError:
                return refused(call.path)
            except (RayActorError, StopAsyncIteration):
                continue
            except asyncio.CancelledError:  # The client has gone.
                pieces.cancel()
                raise
            name, status, headers = head
            values = {key.lower(): value for key, value in headers}
            if stream := values.get("x-stream-id"):
                self.owners.remember(stream, name)
            ending = (
                answers.lost(call.path)
                if values.get("content-type", "").startswith(EVENTS)
                else None
            )
            response = StreamingResponse(passed_on(first, pieces, ending), status)
            response.raw_headers = [
                (key.lower().encode(), value.encode("latin-1")) for key, value in headers
            ]
            return response
        return refused(call.path)


def call_of(request: Request, body: bytes) -> Call:
    """The request, with the client's address where a proxy puts it."""
    headers = [(key, value) for key, value in request.headers.items() if key not in REQUEST_HEADERS]
    if request.client is not None:
        before = request.headers.getlist("x-forwarded-for")
        headers.append(("x-forwarded-for", ", ".join([*before, request.client.host])))
    path = request.scope.get("raw_path", b"").decode() or request.url.path
    query = f"?{request.url.query}" if request.url.query else ""
    generates = request.method == "POST" and path in GENERATING
    prefix = prefix_keys(body, request.headers.get("authorization", "")) if generates else ()
    return Call(request.method, path + query, tuple(headers), body, prefix)


async def passed_on(first: bytes | None, pieces: Any, ending: bytes | None) -> AsyncIterator[bytes]:
    """The body. Where its replica ends before it does, a stream of events ends with `ending`; any
    other body is cut.
    """
    piece = first
    try:
        while piece is not None:
            yield piece
            piece = await anext(pieces)
    except (RayActorError, StopAsyncIteration):
        if ending is None:
            raise ConnectionError("the replica ended within its answer") from None
        yield ending
    finally:
        pieces.cancel()


def refused(path: str) -> Response:
    """No replica takes the request."""
    return Response(answers.unavailable(path), 503, {"retry-after": "1"}, "application/json")


def app(settings: Settings) -> serve.Application:
    """The application, for `serve run` and for configurations."""
    replicas = serve.deployment(
        Replica,
        name="onehead",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=max(settings.min_replicas, settings.max_replicas),
            target_ongoing_requests=settings.target_requests,
            upscale_delay_s=settings.upscale_delay,
            downscale_delay_s=settings.downscale_delay,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class="deploy.ray.router.PrefixRouter",
            request_router_kwargs={"affinity": settings.affinity},
        ),
        # The server has a queue of its own, and answers 429 beyond its limits.
        max_ongoing_requests=1024,
        max_queued_requests=4096,  # While no replica takes requests; more are answered 503.
        health_check_period_s=5,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=2 * DRAIN_SECONDS + 10,
    )
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
    )
    options = [
        *shlex.split(settings.options),
        "--server.max_body_bytes",
        str(settings.max_body_bytes),
    ]
    return ingress.bind(replicas.bind(options), settings.max_body_bytes)
