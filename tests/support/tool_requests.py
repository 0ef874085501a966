"""Random requests of tools to a server, each whole and streamed, and beside an unconstrained run of
the same prompt.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.text.calls.formats import CallFormat, opening_of
from server.text.calls.rules import CallRules
from server.text.codec import TextCodec
from tests.support.drawn_calls import MODES, Draws
from tests.support.random_tools import WORDS, Tools, problems
from tests.support.tool_schemas import followed, schemas, tool

AT_ONCE = 12


@dataclass
class Findings:
    """Counts of what came, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class ToolRequests:
    """Sends random requests to one server, whose checkpoint has `form`, or none."""

    def __init__(self, url: str, codec: TextCodec, form: CallFormat | None) -> None:
        # No connection is used twice: the server may close an idle one while this process does not
        # get to run.
        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)
        self._codec, self._form = codec, form
        self._opening = None if form is None else opening_of(form, codec)
        self._turns = asyncio.Semaphore(AT_ONCE)
        ends = [
            id
            for id in range(codec.largest_id + 1)
            if codec.decode([id]).strip('"}], ') == "" and codec.decode([id]).strip()
        ]
        marks = (
            [mark for mark in (form.closing, form.quote) if isinstance(mark, int)]
            if form is not None
            else []
        )
        self._closing = [*ends, *marks, *codec.end_token_ids]
        self._draws = Draws(codec)
        self._parts = dict[str, Any]()
        """Name and schema -> the part of the schema that is followed."""

    async def run(self, seeds: range, report: Callable[[], object] = lambda: None) -> Findings:
        """Sends the requests of these seeds."""
        findings = Findings()

        async def one(seed: int) -> None:
            async with self._turns:
                try:
                    await self._one(seed, findings)
                except httpx.TransportError as error:
                    findings.wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
                report()

        await self._prepare()
        await asyncio.gather(*map(one, seeds))
        await self._client.aclose()
        return findings

    def _request(self, seed: int) -> dict[str, Any]:
        rng = random.Random(seed)
        tools = Tools(rng).tools()
        choice: Any = rng.choice(
            ["auto", "auto", "auto", "required", "named"] if self._form else ["required", "named"]
        )
        bias = {str(id): 3.0 for id in self._closing}
        if choice == "auto" and self._opening is not None:
            bias |= {str(id): rng.choice([4.0, 6.0, 8.0]) for id in self._raised()}
        if choice == "named":
            choice = {
                "type": "function",
                "function": {"name": rng.choice(tools)["function"]["name"]},
            }
        messages = [
            {
                "role": rng.choice(["user", "user", "developer"]),
                "content": rng.choice(WORDS) or "hi",
            },
            {"role": "user", "content": "?"},
        ]
        body = {
            "messages": messages,
            "tools": tools,
            "tool_choice": choice,
            "max_tokens": 300,
            "seed": seed,
            "logit_bias": bias,
        }
        return body | {
            "parallel_tool_calls": rng.random() < 0.7,
            "temperature": rng.choice([0.5, 1.0, 1.5]),
            "return_token_ids": True,
        }

    async def _prepare(self) -> None:
        """Whatever takes long, before there is a connection that would wait for it."""

    async def _followed(self, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Name -> the part of a function's schema that is followed."""
        return {tool["function"]["name"]: await self._part(tool["function"]) for tool in tools}

    async def _part(self, function: dict[str, Any]) -> Any:
        name, schema = function["name"], function.get("parameters", {"maxProperties": 0})
        key = json.dumps([name, schema])
        if key not in self._parts:
            rules = CallRules(self._draws.form, [(name, schema)], False, False)
            relaxed = (await self._draws.compile(rules)).relaxed
            self._parts[key] = followed(schema, [place.removeprefix(name) for place in relaxed])
        return self._parts[key]

    def _raised(self) -> list[int]:
        """The tokens that make an opening likely: all those that spell it, if it is a text."""
        assert self._opening is not None
        return (
            self._codec.encode_bare(self._opening.text)
            if self._opening.text
            else self._opening.tokens
        )

    async def _one(self, seed: int, findings: Findings) -> None:
        body = self._request(seed)
        while (
            response := await self._client.post("/v1/chat/completions", json=body)
        ).status_code == 429:
            # Too much is being compiled at once.
            await asyncio.sleep(int(response.headers["retry-after"]))
        if response.status_code != 200:
            findings.counts["refused"] += 1
            findings.wrong.append(f"seed {seed}: {response.status_code} {response.text[:300]}")
            return
        answer = response.json()
        (choice,) = answer["choices"]
        message, finish = choice["message"], choice["finish_reason"]
        mode = body["tool_choice"] if isinstance(body["tool_choice"], str) else "named"
        calls = message.get("tool_calls", [])
        findings.counts["requests"] += 1
        findings.counts[f"{mode}: requests"] += 1
        findings.counts[f"{mode}: calls"] += len(calls) - (finish == "length" and bool(calls))
        findings.counts["cut by max_tokens"] += finish == "length"
        wrong = problems(message, finish, body["tools"], await self._followed(body["tools"]))
        if mode == "named" and len(calls) != 1:
            wrong.append(f"{len(calls)} calls of a named function")
        if mode == "named" and any(
            call["function"]["name"] != body["tool_choice"]["function"]["name"] for call in calls
        ):
            wrong.append("another function than the named one")
        if not body["parallel_tool_calls"] and len(calls) > 1:
            wrong.append(f"{len(calls)} calls, none of them parallel")
        if mode != "auto" and (message["content"] or not calls):
            wrong.append("something else than calls where they are required")
        if (streamed := await self._streamed(body)) != (
            message.get("content") or "",
            _plain(calls),
            finish,
        ):
            wrong.append(f"streamed {streamed} is not whole {message, finish}"[:600])
        if mode == "auto":
            wrong += await self._beside_unconstrained(body, answer, bool(calls))
        findings.wrong += [f"seed {seed} ({mode}): {text}" for text in wrong]

    async def _streamed(self, body: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
        content, finish, calls = "", "", list[list[str]]()
        async with self._client.stream(
            "POST", "/v1/chat/completions", json=body | {"stream": True}
        ) as response:
            # httpx's own lines also end at characters that a text may hold, such as U+2028.
            for line in (await response.aread()).decode().split("\n"):
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                content += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
                for delta in choice["delta"].get("tool_calls", []):
                    if "id" in delta:
                        assert delta["index"] == len(calls)
                        calls.append([delta["function"]["name"], ""])
                    calls[delta["index"]][1] += delta["function"]["arguments"]
        return content, [(name, arguments) for name, arguments in calls], finish

    async def _beside_unconstrained(
        self, body: dict[str, Any], answer: dict[str, Any], has_calls: bool
    ) -> list[str]:
        """Compares the tokens up to the opening with those of a run without tools and constraint,
        from the same prompt.
        """
        tokens = answer["choices"][0]["token_ids"]
        kept = {
            name: body[name]
            for name in ("max_tokens", "seed", "logit_bias", "temperature", "return_token_ids")
        }
        response = await self._client.post(
            "/v1/completions", json=kept | {"prompt": answer["prompt_token_ids"]}
        )
        free = response.json()["choices"][0]["token_ids"]
        end = self._end_of_opening(tokens)
        if (has_calls and end is None) or (
            not has_calls and end is not None and answer["choices"][0]["finish_reason"] != "length"
        ):
            return [f"calls: {has_calls}, but the opening ends at {end} of {len(tokens)} tokens"]
        free = free[: len(tokens) if end is None else end]
        return (
            []
            if tokens[:end] == free
            else [f"the tokens before a call are {tokens[:end]}, without constraint {free}"]
        )

    def _end_of_opening(self, tokens: list[int]) -> int | None:
        """The number of tokens up to the first opening; None without one."""
        assert self._opening is not None
        text = self._opening.text
        ends = range(1, len(tokens) + 1)
        if text:
            return next(
                (end for end in ends if self._codec.decode(tokens[:end]).endswith(text)), None
            )
        return next((end for end in ends if tokens[end - 1] in self._opening.tokens), None)


class SchemaRequests(ToolRequests):
    """Requests of the schemas of tests.support.tool_schemas, one of them each, beside a simple
    function. `seed` is its number, three times in a row: under `auto` (or in a loop of three
    turns), required, and named.
    """

    def __init__(self, url: str, codec: TextCodec, form: CallFormat | None) -> None:
        super().__init__(url, codec, form)
        self._schemas = [*schemas()]

    def _request(self, seed: int) -> dict[str, Any]:
        name, schema = self._schemas[seed // 3]
        tools = [tool(name, schema), tool("other", {"type": "object", "properties": {}})]
        bias = {str(id): 3.0 for id in self._closing}
        choice: Any = MODES[seed % 3]
        if choice == "auto" and self._opening is not None:
            bias |= {str(id): 8.0 for id in self._raised()}
        if choice == "named":
            choice = {"type": "function", "function": {"name": name}}
        body = {
            "messages": [{"role": "user", "content": "?"}],
            "tools": tools,
            "tool_choice": choice,
        }
        body |= {"max_tokens": 300, "seed": seed, "logit_bias": bias, "temperature": 1.0}
        return body | {"parallel_tool_calls": seed % 2 == 0, "return_token_ids": True}

    async def _prepare(self) -> None:
        for name, schema in self._schemas:
            await self._part({"name": name, "parameters": schema})

    async def _one(self, seed: int, findings: Findings) -> None:
        if self._form is None and MODES[seed % 3] == "auto":
            await self._loop(seed, findings)
        else:
            await super()._one(seed, findings)

    async def _loop(self, seed: int, findings: Findings) -> None:
        """Three turns: a required call, a named one after its result, and text after that one's."""
        body, findings.counts["loops"] = self._request(seed), findings.counts["loops"] + 1
        named = {"type": "function", "function": {"name": body["tools"][0]["function"]["name"]}}
        for choice in ("required", named, "auto"):
            body["tool_choice"] = choice
            while (
                response := await self._client.post("/v1/chat/completions", json=body)
            ).status_code == 429:
                await asyncio.sleep(int(response.headers["retry-after"]))
            if response.status_code != 200:
                findings.wrong.append(
                    f"seed {seed} ({choice}): {response.status_code} {response.text[:300]}"
                )
                return
            (answer,) = response.json()["choices"]
            message, finish = answer["message"], answer["finish_reason"]
            calls = message.get("tool_calls", [])
            wrong = problems(message, finish, body["tools"], await self._followed(body["tools"]))
            if bool(calls) != (choice != "auto"):
                wrong.append(f"{len(calls)} calls")
            if (streamed := await self._streamed(body)) != (
                message["content"] or "",
                _plain(calls),
                finish,
            ):
                wrong.append(f"streamed {streamed} is not whole {message, finish}"[:600])
            findings.wrong += [f"seed {seed} ({choice}): {text}" for text in wrong]
            message["tool_calls"] = calls[: len(calls) - (finish == "length")]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "done"}
                for call in message["tool_calls"]
            ]
            if not results:
                return
            body["messages"] = [*body["messages"], message, *results]


def _plain(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
