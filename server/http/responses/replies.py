"""OpenAI's Responses API: an answer of items, whole or as named events."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, count
from typing import Any

from server.errors import RequestError
from server.generation.generation import Generation
from server.generation.stream import OpenStreams, Piece
from server.http import sse
from server.http.answer import OutputToken, token_entries
from server.http.errors import Dialect, openai_message
from server.http.parts import Change, Part, PartsReply
from server.http.responses.fields import ResponsesBody, qualified

DELTAS = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}
"""Kinds of parts -> what the events of their text begin with."""
PREFIXES = {"thought": "rs", "text": "msg", "call": "fc"}
"""Kinds of parts -> what the ids of their items begin with."""


class ResponsesReply(PartsReply):
    """An answer of /v1/responses."""

    body: ResponsesBody
    form = sse.NAMED_EVENTS

    def __init__(
        self, body: ResponsesBody, model: str, generation: Generation, streams: OpenStreams
    ) -> None:
        super().__init__(body, model, generation, streams)
        self.namespaces = {
            qualified(tool.name, function.name): (tool.name, function.name)
            for tool in body.tools or ()
            for function in tool.tools
        }
        """Names of functions, as the model knows them -> their namespace and own name."""
        self.held: list[OutputToken] = []
        """Tokens whose text comes with a later one."""
        self.tokens = defaultdict[int, list[list[OutputToken]]](list)
        """Numbers of parts of text -> the tokens of each text that was added."""
        self.num_thought_tokens = 0
        self.id = streams.reservation.reply_id
        self.numbers = count()
        """The sequence numbers of events."""
        self.head: dict[str, Any] = {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": streams.reservation.created,
            "model": model,
            "error": None,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "previous_response_id": None,
            "store": False,
            "metadata": {},
        }
        # What a response repeats of the request.
        always = {"instructions", "max_output_tokens", "temperature", "top_p", "reasoning"}
        self.head |= body.model_dump(include=always) | body.model_dump(
            by_alias=True,
            exclude_unset=True,
            exclude_none=True,
            include={"tools", "tool_choice", "text"},
        )

    def take(self, piece: Piece) -> list[Change]:
        new = self.output.take(piece)
        self.num_thought_tokens += bool(piece.thought)
        self.held += new if not (piece.thought or piece.calls) else []
        changes = self.parts.take(piece)
        for what, index, part, _ in changes:
            if what == "add" and part.kind == "text":
                self.tokens[index].append(self.held)
                self.held = []
        return changes

    def first_chunks(self) -> list[dict[str, Any]]:
        response = self._response("in_progress", [])
        return [
            self._event(type, response=response)
            for type in ("response.created", "response.in_progress")
        ]

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        return [*self._events(self.take(piece))]

    def last_chunks(self) -> list[dict[str, Any]]:
        ended = [*self._events(self.parts.end())]
        response = self.full_response()
        return [*ended, self._event(f"response.{response['status']}", response=response)]

    def full_response(self) -> dict[str, Any]:
        items = [
            self._item(index, part, self._status(index))
            for index, part in enumerate(self.parts.all)
        ]
        is_cut = self.output.finish == "length"
        return self._response("incomplete" if is_cut else "completed", items)

    def error_chunk(self, error: RequestError, dialect: Dialect) -> dict[str, Any]:
        """The event by which clients know that the response has failed."""
        told = {"code": "server_error", "message": openai_message(error)}
        items = [self._item(index, part, "incomplete") for index, part in enumerate(self.parts.all)]
        response = self._response("failed", items) | {"error": told}
        return self._event("response.failed", response=response)

    def _event(self, type: str, **more: Any) -> dict[str, Any]:
        return {"type": type, "sequence_number": next(self.numbers)} | more

    def _events(self, changes: Iterable[Change]) -> Iterator[dict[str, Any]]:
        for what, index, part, added in changes:
            name, place = DELTAS[part.kind], {"output_index": index}
            of_item = place | {"item_id": self._item_id(index, part)}
            has_content = part.kind != "call"
            at = of_item | ({"content_index": 0} if has_content else {})
            tokens = self.tokens[index][-1:] if what == "add" else self.tokens[index]
            logprobs = {"logprobs": self._logprobs(tokens)} if part.kind == "text" else {}
            if what == "begin":
                item = self._item(index, part, "in_progress")
                content = item.pop("content", None)
                item |= {} if content is None else {"content": []}
                yield self._event("response.output_item.added", **place, item=item)
                if has_content:
                    begun = content and content[0]
                    yield self._event("response.content_part.added", **at, part=begun)
            elif what == "add":
                yield self._event(f"{name}.delta", **at, delta=added, **logprobs)
            else:
                field = "text" if has_content else "arguments"
                whole = {field: part.text}
                whole |= {} if has_content else {"name": self._name_of(part)[1]}
                yield self._event(f"{name}.done", **at, **whole, **logprobs)
                item = self._item(index, part, self._status(index))
                if has_content:
                    ended = item["content"][0]
                    yield self._event("response.content_part.done", **at, part=ended)
                yield self._event("response.output_item.done", **place, item=item)

    def _status(self, index: int) -> str:
        """Of an item that has ended: a limit of tokens cuts the last one."""
        is_cut = self.output.finish == "length" and index == len(self.parts.all) - 1
        return "incomplete" if is_cut else "completed"

    def _item_id(self, index: int, part: Part) -> str:
        return f"{PREFIXES[part.kind]}_{self.id}_{index}"

    def _name_of(self, call: Part) -> tuple[str, str]:
        """The namespace, if it has one, and the own name of the function that is called."""
        return self.namespaces.get(call.name, ("", call.name))

    def _item(self, index: int, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(index, part)}
        if part.kind == "call":
            space, name = self._name_of(part)
            call = {"call_id": f"call_{self.id}_{index}", "name": name}
            call |= {"namespace": space} if space else {}
            return (
                item | {"type": "function_call", "status": status} | call | {"arguments": part.text}
            )
        if part.kind == "thought":
            content = {"type": "reasoning_text", "text": part.text}
            return item | {"type": "reasoning", "summary": [], "content": [content]}
        shown: dict[str, Any] = {"type": "output_text", "text": part.text, "annotations": []}
        shown["logprobs"] = self._logprobs(self.tokens[index]) if part.text else []
        item |= {"type": "message", "status": status, "role": "assistant"}
        return item | {"content": [shown]}

    def _logprobs(self, tokens: list[list[OutputToken]]) -> list[dict[str, Any]]:
        if self.body.chat.num_top is None:
            return []
        shown = (token for token in chain.from_iterable(tokens) if not token.special)
        return [*token_entries(self.codec, shown, lambda id, _: self.codec.token_text(id))]

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        choice, num_tokens = self.output.choice, len(self.output.tokens)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = {
            "input_tokens": len(choice.request.prompt),
            "input_tokens_details": {"cached_tokens": choice.num_cached, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_thought_tokens},
            "total_tokens": len(choice.request.prompt) + num_tokens,
        }
        return self.head | {
            "status": status,
            "incomplete_details": reason,
            "output": items,
            "usage": None if status == "in_progress" else usage,
        }
