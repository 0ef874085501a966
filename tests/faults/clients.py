"""Clients that write down everything: one request each over a raw socket, in a thread of its own,
read as fast as it is told to.

An Exchange parses strictly (head, chunks, events) and notes what it got in a History; it judges
nothing. HTTP and SSE are read here by hand because a library would hide what matters: whether an
answer was cut off, and where.
"""

import json
import random
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.faults.checker import is_error, is_terminal, text_of, token_ids
from tests.faults.history import History
from tests.support.processes import wait_until
from tests.support.wire import Event, Wire, abort, http_request

PATIENCE = 60.0


@dataclass(frozen=True)
class Ask:
    """A request in neither dialect's words. `parameters` are TGI's; `extra` stands at the top level
    in both.
    """

    prompt: str
    max_new_tokens: int = 60
    parameters: dict[str, Any] = field(default_factory=dict)
    dialect: str = "tgi"
    stream: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    canary: str = ""

    @property
    def route(self) -> str:
        return "/generate" if self.dialect == "tgi" else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        parameters = {"max_new_tokens": self.max_new_tokens, "ignore_eos": True, **self.parameters}
        if self.dialect == "tgi":
            return {
                "inputs": self.prompt,
                "parameters": {**parameters, "details": True},
                "stream": self.stream,
                **self.extra,
            }
        sampled = parameters.pop("do_sample", False)
        body = {
            "prompt": self.prompt,
            "max_tokens": parameters.pop("max_new_tokens"),
            "temperature": 1.0 if sampled else 0.0,
        }
        grammar = parameters.pop("grammar", None)
        if grammar is not None:
            parameters["structured_outputs"] = {grammar["type"]: grammar["value"]}
            del parameters["ignore_eos"]
        streamed = (
            {"stream": True, "stream_options": {"include_usage": True}} if self.stream else {}
        )
        return {**body, **parameters, **streamed, "return_token_ids": True, **self.extra}

    @property
    def bytes(self) -> bytes:
        """The whole request."""
        return http_request("POST", self.route, self.body, self.headers, close=False)


def asks(rng: random.Random, count: int, max_new_tokens: int = 60, **same: Any) -> list[Ask]:
    """Requests of all kinds: greedy and seeded, both dialects, streamed, resumable or, one in
    eight, whole; a canary in each prompt.
    """
    made = []
    for i in range(count):
        canary = "".join(rng.choices("bcdghjkmpqrtvwz", k=12))
        prompt = "".join(rng.choices("abcdef (:)\n", k=rng.randint(1, 60))) + canary
        sampled = {"do_sample": True, "seed": rng.randrange(2**31), "top_p": 0.9} if i % 2 else {}
        kind = {
            "dialect": "openai" if i % 4 >= 2 else "tgi",
            "stream": i % 8 != 5,
            "extra": {"resumable": True} if i % 8 in (3, 4) else {},
        }
        made.append(Ask(prompt, max_new_tokens, sampled, canary=canary, **{**kind, **same}))
    return made


class Exchange:
    """One request and its answer, in a thread of its own."""

    def __init__(
        self,
        port: int,
        ask: Ask,
        history: History,
        leave_after: int | None = None,
        reset: bool = False,
        resumes: bool = False,
    ) -> None:
        self.port = port
        self.ask = ask
        self.history = history
        self.number = history.new_request()
        self.leave_after = leave_after
        self.reset = reset
        self.resumes = resumes
        """It comes back whenever it has left; a stream that is resumable allows that."""
        self.last_id = ""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data: list[Any] = []
        self.comments = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        what = {"dialect": ask.dialect, "route": ask.route, "canary": ask.canary, "body": ask.body}
        history.add("sent", request=self.number, **what)
        self.thread.start()

    def _run(self) -> None:
        how = "never"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
                connection.sendall(self.ask.bytes)
                how = self._part(connection)
                if how == "left" and self.reset:
                    abort(connection)
            if how in ("left", "cut") and self.resumes:
                how = self._resume()
        except (EOFError, ConnectionError):
            how = "cut"
        except TimeoutError:
            how = "timeout"
        finally:
            self.history.add("end", request=self.number, how=how)

    def _resume(self) -> str:
        """Comes back for the rest, as often as it leaves; everything counts as one answer."""
        while True:
            number = int(self.last_id.rsplit(".", 1)[1])
            self.history.add("resume", request=self.number, after=number)
            with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
                path = f"/v1/streams/{self.headers['x-stream-id']}"
                connection.sendall(
                    http_request("GET", path, headers={"last-event-id": self.last_id}, close=False)
                )
                how = self._part(connection)
                if how == "left":
                    abort(connection)
            if how not in ("left", "cut") or self.status != 200:
                return how

    def _part(self, connection: socket.socket) -> str:
        """As much of the answer as this connection brings; an end within it is one of the
        connection alone if the client comes back.
        """
        try:
            return self._read(connection)
        except (EOFError, ConnectionError):
            if not self.resumes or not self.last_id:
                raise
            return "cut"

    def _read(self, connection: socket.socket) -> str:
        response = Wire(connection).response()
        status, headers = response.status, dict(response.headers)
        streamed = headers.get("content-type", "").startswith("text/event-stream")
        self.history.add(
            "head", request=self.number, status=status, headers=headers, streamed=streamed
        )
        self.status, self.headers = status, headers
        if status == 204:
            return "eof"
        if not streamed:
            self._take(Event(response.body().decode()))
            return "eof"
        if self.leave_after == 0:
            return "left"
        before = len(self.data)
        for event in response.events():
            self._take(event)
            if self.leave_after is not None and len(self.data) - before >= self.leave_after:
                return "left"
        return "eof"

    def _take(self, event: Event) -> None:
        if event.comment is not None:
            self.comments += 1
            self.history.add("comment", request=self.number)
        if event.data is None:
            return
        data = event.data if event.data == "[DONE]" else json.loads(event.data)
        named = {} if event.id is None else {"id": event.id}
        self.history.add("event", request=self.number, **named, data=data)
        self.last_id = event.id or self.last_id
        self.data.append(data)

    @property
    def ids(self) -> list[int]:
        return [id for data in list(self.data) for id in token_ids(data)]

    @property
    def text(self) -> str:
        return "".join(text_of(data) for data in list(self.data))

    @property
    def error(self) -> Any:
        """The error that ended it, or the body of a refusal; None where there was none."""
        errors = [data for data in self.data if is_error(data)]
        return errors[-1] if errors else None

    @property
    def code(self) -> Any:
        """The error's word for programs, in OpenAI's dialect."""
        return (
            self.error["error"].get("code")
            if self.error is not None and isinstance(self.error["error"], dict)
            else None
        )

    @property
    def finished(self) -> bool:
        """Whether it came to the end that it was asked for."""
        return any(is_terminal(data) and not is_error(data) for data in self.data)

    def reach(self, count: int) -> "Exchange":
        """Waits until so many tokens have come, or the end."""
        wait_until(
            lambda: len(self.ids) >= count or not self.thread.is_alive(),
            f"{count} tokens of request {self.number}",
            PATIENCE,
        )
        return self

    def join(self) -> "Exchange":
        self.thread.join(PATIENCE * 1.5)
        assert not self.thread.is_alive(), f"request {self.number} has not ended"
        return self
