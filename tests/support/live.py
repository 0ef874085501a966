"""Real `onehead serve` processes and a client that checks every event, for live tests and benches.

An event that is out of order, of the wrong shape or after the end makes the answer fail, with the
reason in words. Invariant: an Answer without a failure is complete, with one end. It knows both
dialects on the wire and nothing of how the server works.
"""

import asyncio
import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands.bench.bench import prompt_text
from tests.support.processes import (
    LB_GRACE,
    START_SECONDS,
    ServerProcess,
    alive,
    engines,
    metric_sums,
)
from tests.support.wire import RECEIVED_AT_ONCE, Event, EventParser, ResponseParser, http_request

ANSWER_SECONDS = 180.0

# --- one exchange over HTTP


class Reply:
    """Status and headers, then the body as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> None:
        self._reader, self._writer, self._parser = reader, writer, ResponseParser()
        self.status, self.headers = 0, dict[str, str]()

    async def read_head(self) -> "Reply":
        """To be called first. Raises EOFError and ValueError."""
        while not self._parser.has_head:
            self._parser.feed(await self._reader.read(RECEIVED_AT_ONCE))
        self.status, self.headers = self._parser.status, dict(self._parser.headers)
        return self

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, without its framing."""
        while True:
            if data := self._parser.take_body():
                yield data
            if self._parser.complete:
                return
            self._parser.feed(await self._reader.read(RECEIVED_AT_ONCE))

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[Event]:
        """The events of the body."""
        parser = EventParser()
        async for piece in self.pieces():
            for event in parser.feed(piece):
                yield event
        parser.end()

    def cut(self) -> None:
        """Closes the connection at once, whatever is on its way."""
        if self._writer is not None:
            self._writer.transport.abort()


@asynccontextmanager
async def exchange(port: int, request: bytes, buffer: int | None = None) -> AsyncIterator[Reply]:
    """Sends a request and reads the head of its reply. Raises OSError, EOFError or ValueError.
    `buffer` bounds the unread bytes.
    """
    if buffer is None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    else:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=small, limit=buffer)
    try:
        writer.write(request)
        yield await Reply(reader, writer).read_head()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


# --- what is asked, and what comes


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of either dialect. Without a seed it is greedy, with one it samples at 0.8."""

    dialect: str
    prompt: str | list[int]
    """Token ids in OpenAI's dialect only."""
    tokens: int
    seed: int | None = None
    resumable: bool = False
    stream: bool = True

    @property
    def path(self) -> str:
        return "/generate" if self.dialect == "tgi" else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"resumable": True} if self.resumable else {}
        sampling: dict[str, Any] = (
            {} if self.seed is None else {"temperature": 0.8, "seed": self.seed}
        )
        if self.dialect == "tgi":
            sampling |= {} if self.seed is None else {"do_sample": True}
            parameters = {
                "max_new_tokens": self.tokens,
                "ignore_eos": True,
                "details": True,
                **sampling,
            }
            return {"inputs": self.prompt, "parameters": parameters, "stream": self.stream, **extra}
        sampling = sampling or {"temperature": 0}
        wanted = {
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
        }
        return {"prompt": self.prompt, **wanted, **sampling, **extra}

    def request(self, headers: dict[str, str] | None = None) -> bytes:
        return http_request("POST", self.path, self.body, headers)


def asks(count: int, tokens: int, seed: int, prompt_tokens: tuple[int, int] = (4, 90)) -> list[Ask]:
    """Requests of both dialects, half of them greedy; the same for the same seed."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = prompt_text(rng, rng.randint(*prompt_tokens))
        dialect = "tgi" if number % 2 == 0 else "openai"
        made.append(Ask(dialect, prompt, tokens, seed=None if number % 4 < 2 else 1000 + number))
    return made


@dataclass(slots=True, eq=False)
class Answer:
    """The outcome of one Ask. Times are those of time.perf_counter."""

    ask: Ask
    sent: float = 0.0
    end: float = 0.0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    event_ids: list[str] = field(default_factory=list)
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    over: bool = False
    finish: str | None = None
    failure: str | None = None

    def take(self, event: Event) -> None:
        """One data event. Raises ValueError where it is not the next one."""
        if event.id is not None:
            self.event_ids.append(event.id)
        if self.over:
            raise ValueError(f"an event after the end: {event.data}")
        if event.data == "[DONE]" and self.ask.dialect == "openai" and self.finish is not None:
            self.over = True
            return
        data = json.loads(event.data or "")
        if "error" in data:
            raise ValueError(f"error event: {event.data}")
        (self._take_tgi if self.ask.dialect == "tgi" else self._take_openai)(data)

    def _take_tgi(self, data: dict[str, Any]) -> None:
        if data["index"] != len(self.ids) + 1:
            raise ValueError(f"index {data['index']} came after {len(self.ids)} tokens")
        token = data["token"]
        self._add(token["id"], "" if token["special"] else token["text"], token["logprob"])
        if data["generated_text"] is not None:
            self.finish, self.over = data["details"]["finish_reason"], True
            if data["generated_text"] != self.text:
                raise ValueError("the generated text is not what its events say")

    def _take_openai(self, data: dict[str, Any]) -> None:
        (choice,) = data["choices"]
        if self.finish is not None:
            raise ValueError(f"a choice after its end: {data}")
        for id in choice["token_ids"]:
            self._add(id, "", 0.0)
        self.text += choice["text"]
        self.finish = choice["finish_reason"]

    def take_whole(self, data: dict[str, Any]) -> None:
        """The answer of a request that does not stream."""
        if self.ask.dialect == "tgi":
            self.text, self.finish = data["generated_text"], data["details"]["finish_reason"]
            self.ids = [token["id"] for token in data["details"]["tokens"]]
        else:
            (choice,) = data["choices"]
            self.text = choice["text"]
            self.finish = choice["finish_reason"]
            self.ids = choice["token_ids"]

    def _add(self, id: int, text: str, logprob: float) -> None:
        self.ids.append(id)
        self.text += text
        self.logprobs.append(logprob)
        self.times.append(time.perf_counter())

    def problem(self, oracle: "Answer") -> str | None:
        """The difference from the undisturbed answer, in words."""
        if self.failure is not None:
            return self.failure
        if self.ids != oracle.ids:
            at = next(
                (i for i, (a, b) in enumerate(zip(self.ids, oracle.ids, strict=False)) if a != b),
                None,
            )
            if at is None:
                return f"{len(self.ids)} tokens instead of {len(oracle.ids)}"
            return f"token {at} is {self.ids[at]} instead of {oracle.ids[at]}"
        if self.text != oracle.text:
            return "the tokens are the same and the text is not"
        return (
            None
            if self.finish == oracle.finish
            else f"finish {self.finish} instead of {oracle.finish}"
        )


async def ask(
    port: int,
    question: Ask,
    on_token: Callable[[Answer], None] | None = None,
    timeout: float = ANSWER_SECONDS,
) -> Answer:
    """Sends a request and takes every event. Errors become the answer's failure."""
    answer = Answer(question, sent=time.perf_counter())
    try:
        async with asyncio.timeout(timeout), exchange(port, question.request()) as reply:
            await receive(reply, answer, on_token)
    except TimeoutError:
        answer.failure = f"no end within {timeout:g} s"
    except (OSError, EOFError, ValueError, KeyError, asyncio.LimitOverrunError) as error:
        answer.failure = answer.failure or f"{type(error).__name__}: {error}"
    answer.end = time.perf_counter()
    return answer


async def receive(
    reply: Reply, answer: Answer, on_token: Callable[[Answer], None] | None = None
) -> None:
    """Reads everything to the end. Raises ValueError, and errors of the connection."""
    answer.status, answer.headers = reply.status, reply.headers
    if reply.status != 200:
        raise ValueError(f"HTTP {reply.status}: {(await reply.body())[:300]!r}")
    if not answer.ask.stream:
        answer.take_whole(json.loads(await reply.body()))
        return
    async for event in reply.events():
        if event.data is None:
            continue
        answer.take(event)
        if on_token is not None:
            on_token(answer)
    if not answer.over:
        raise ValueError(f"the stream ends after {len(answer.ids)} tokens without an end")


# --- the server


class Server:
    """`onehead serve` for code that runs in an event loop, its standard error in a file."""

    def __init__(self, server: ServerProcess, log: Path) -> None:
        self.process, self.port, self.log = server.process, server.port, log

    @classmethod
    async def start(
        cls, log: Path, *options: str, port: int = 0, launcher: tuple[str, ...] = ("commands.cli",)
    ) -> "Server":
        """Starts one and waits until it is ready. One that takes over a port appends to the log
        there is.

        `launcher` is the command's module, and the arguments of its own.
        """
        # ServerProcess sets it to 0; a shutdown as users have it is part of what live runs measure.
        grace = () if "--server.lb_grace" in options else ("--server.lb_grace", LB_GRACE)
        with log.open("a" if port else "w") as errors:
            server = ServerProcess(
                None, *grace, *options, port=port, launcher=launcher, stderr=errors, wait=False
            )
        try:
            await asyncio.to_thread(server.wait_started)
        except AssertionError as error:
            raise SystemExit(f"{error}\n{log.read_text()[-2000:]}") from None
        return cls(server, log)

    @property
    def engine_pid(self) -> int | None:
        """The current engine process, if there is one."""
        running = [pid for pid in engines(self.process.pid) if alive(pid)]
        return running[-1] if running else None

    async def engine_other_than(self, pid: int | None) -> int:
        """Waits for the next engine process."""
        async with asyncio.timeout(START_SECONDS):
            while (now := self.engine_pid) is None or now == pid:
                self.must_live()
                await asyncio.sleep(0.01)
        return now

    def must_live(self) -> None:
        if (status := self.process.poll()) is not None:
            raise SystemExit(
                f"the server ended with status {status}\n{self.log.read_text()[-2000:]}"
            )

    async def get(self, path: str) -> tuple[int, str]:
        async with asyncio.timeout(30), exchange(self.port, http_request("GET", path)) as reply:
            return reply.status, (await reply.body()).decode()

    async def info(self) -> dict[str, Any]:
        """The answer of /info."""
        return dict(json.loads((await self.get("/info"))[1]))

    async def until_ready(self, wanted: int = 200) -> float:
        """Waits until /ready has that status; returns the time."""
        async with asyncio.timeout(START_SECONDS):
            while (await self.get("/ready"))[0] != wanted:
                self.must_live()
                await asyncio.sleep(0.01)
        return time.perf_counter()

    async def metrics(self) -> dict[str, float]:
        """Every series, the samples of each name added up."""
        return metric_sums((await self.get("/metrics"))[1])

    async def until_idle(self, seconds: float = 30.0) -> bool:
        """Waits until no request is open and no page is owned; returns whether that happened."""
        names = "onehead_requests_running", "onehead_requests_waiting", "onehead_kv_pages_used"
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            values = await self.metrics()
            if not any(values[name] for name in names):
                return True
            await asyncio.sleep(0.05)
        return False

    async def stop(self, number: int = signal.SIGTERM, patience: float = 120.0) -> int:
        """Sends a signal, waits, and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return await asyncio.to_thread(self.process.wait, patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return await asyncio.to_thread(self.process.wait)
