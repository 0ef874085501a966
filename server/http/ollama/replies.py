"""Ollama's form of answers: an object, or lines of JSON, the last of which has counts and times."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from server.errors import InvalidRequest
from server.generation.generation import Generation
from server.generation.request import Request
from server.generation.stream import Piece
from server.http import sse
from server.http.answer import OutputToken, token_entries
from server.http.ollama.fields import ChatBody, GenerateBody
from server.http.openai.chat import ChatReply
from server.http.openai.completions import CompletionReply
from server.http.parts import Part, PartsReply

NANOSECONDS = 10**9


def now() -> str:
    """The time in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaReply(PartsReply):
    """An answer of /api/generate or /api/chat."""

    body: GenerateBody | ChatBody
    form = sse.LINES
    num_told = 0
    """Calls that have been told, or left out because they were cut."""

    @staticmethod
    async def request(
        generation: Generation, body: GenerateBody | ChatBody, client: str
    ) -> Request:
        """The internal request. Raises RequestError."""
        ignored = [name for name in ("truncate", "shift") if getattr(body, name)]
        if isinstance(body, ChatBody) or body.is_chat(generation):
            chat = body.as_chat(generation)
            told, given = chat.fit(generation.texts.variables), body.thinking()
            ignored += ["think"] if given and len(told) == len(given) else []
            request = await ChatReply.prepare(generation, chat, client)
        else:
            ignored += ["think"] if body.think else []
            completion = body.as_completion(generation)
            ((request, _),) = await CompletionReply.prepare(generation, completion, client)
        if isinstance(body, GenerateBody) and body.context:
            request = replace(request, prompt=body.context + request.prompt)
        if source := body.source:
            request = replace(request, grammar=await generation.texts.grammar(source, client))
        request = generation.within_context(request, max(body.options.num_predict or -1, -1))
        return replace(
            request, num_top=body.top_logprobs or 0, ignored=[*ignored, *request.ignored]
        )

    def take(self, piece: Piece) -> list[OutputToken]:
        self.parts.take(piece)
        return self.output.take(piece)

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        tokens = self.take(piece)
        shown = tokens if self.body.logprobs else []
        # A call is whole when the next part has begun, or at the end.
        calls = self._calls(len(self.parts.all) - (piece.finish is None))
        said = self._said(piece.text, piece.thought, calls) | self._logprobs(shown)
        chunks = [said] if piece.text or piece.thought or calls or shown else []
        return chunks if piece.finish is None else [*chunks, self._said() | self._ending()]

    def full_response(self) -> dict[str, Any]:
        thought = "".join(part.text for part in self.parts.all if part.kind == "thought")
        said = self._said(self.output.text, thought, self._calls(len(self.parts.all)))
        return said | self._logprobs(self.output.tokens) | self._ending()

    def _calls(self, end: int) -> list[dict[str, Any]]:
        """The whole calls among the parts up to `end` that have not been told. One that a limit of
        tokens has cut is not told, as nobody should carry it out.
        """
        calls = [part for part in self.parts.all[:end] if part.kind == "call"]
        first, self.num_told = self.num_told, len(calls)
        numbered = enumerate(calls[first:], first)
        return [self._call(index, part) for index, part in numbered if part.is_whole]

    def _call(self, index: int, part: Part) -> dict[str, Any]:
        function = {"index": index, "name": part.name, "arguments": part.arguments}
        id = f"call_{self.streams.reservation.reply_id}-{index}"
        return {"id": id, "function": function}

    def _said(
        self, text: str = "", thought: str = "", calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        head = {"model": self.model, "created_at": now()}
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if isinstance(self.body, GenerateBody):
            return head | {"response": text} | more | {"done": False}
        more |= {"tool_calls": calls} if calls else {}
        return head | {"message": {"role": "assistant", "content": text} | more, "done": False}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        if not self.body.logprobs:
            return {}
        rows = [*token_entries(self.codec, tokens, lambda id, _: self.codec.token_text(id))]
        return {"logprobs": rows} if rows else {}

    def _ending(self) -> dict[str, Any]:
        choice = self.output.choice
        begun, first = choice.started or choice.arrival, choice.first or choice.last
        seconds = {
            "total_duration": choice.last - choice.arrival,
            "prompt_eval_duration": first - begun,
            "eval_duration": choice.last - first,
        }
        ending: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if self.output.finish == "length" else "stop",
            "prompt_eval_count": len(choice.request.prompt),
            "eval_count": choice.num_tokens,
        }
        ending |= {name: round(value * NANOSECONDS) for name, value in seconds.items()}
        if isinstance(self.body, GenerateBody) and not self.body.raw:
            ids = [token.id for token in self.output.tokens]
            ending["context"] = choice.request.prompt + ids
        return ending


def empty_answer(body: GenerateBody | ChatBody, model: str) -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients have the model loaded, or
    unloaded.
    """
    said: dict[str, Any] = (
        {"response": ""}
        if isinstance(body, GenerateBody)
        else {"message": {"role": "assistant", "content": ""}}
    )
    reason = "unload" if body.keep_alive in (0, "0", "0s", "0m") else "load"
    return {"model": model, "created_at": now()} | said | {"done": True, "done_reason": reason}


def check_abilities(generation: Generation, body: GenerateBody | ChatBody, model: str) -> None:
    """Raises InvalidRequest where a body asks for what the model cannot do."""
    lacks = {"thinking": bool(body.think) and not can_think(generation)}
    if isinstance(body, GenerateBody):
        lacks["insert"] = bool(body.suffix) and not generation.can_fill
    else:
        lacks["tools"] = bool(body.tools) and not generation.can_call
    for ability, is_lacking in lacks.items():
        if is_lacking:
            raise InvalidRequest(f'"{model}" does not support {ability}')


def can_think(generation: Generation) -> bool:
    """Whether the chat template reads how much to think, or the model's thoughts are recognised."""
    form = generation.texts.texts.calls.form
    read = {"enable_thinking", "reasoning_effort"} & {*generation.texts.variables}
    return bool(read or (form and form.thought))
