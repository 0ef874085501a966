"""POST /tokenize, whose body selects TGI's, vLLM's or llama.cpp's form, and POST /detokenize."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.errors import InvalidRequest
from server.http.body import check, read_value
from server.http.errors import OPENAI, TGI
from server.http.exchange import exchange_of
from server.http.handlers import Handlers
from server.http.routes import Route
from server.http.token_fields import DetokenizeBody, TokenizeBody
from server.text.jobs import Decode, Encode, EncodeChat, EncodeWithPlaces


class TokenRoutes(Handlers):
    """Handlers of both routes."""

    def routes(self) -> list[Route]:
        # The dialect of /tokenize is TGI's until its body has been read.
        return [
            Route("/tokenize", ("POST",), self.tokenize, TGI, tag="tokens", body=TokenizeBody),
            Route(
                "/detokenize", ("POST",), self.detokenize, OPENAI, tag="tokens", body=DetokenizeBody
            ),
        ]

    async def tokenize(self, http: HttpRequest) -> Response:
        """Turn text into tokens.

        `inputs` is answered as TGI does, with a list of tokens and their places; `prompt` and
        `messages` as vLLM does, with an object, and `content` as llama.cpp does, with the token ids
        alone.
        """
        value = await read_value(http, self.section.max_body_bytes)
        exchange_of(http).dialect = OPENAI if value.get("inputs") is None else TGI
        body, exchange_of(http).ignored = check(value, TokenizeBody, self.section.strict_fields)
        codec = self.generation.codec
        if body.inputs is not None:
            # `model` is not checked, as on TGI's other routes. The worker process writes the JSON.
            text = await self.convert(http, EncodeWithPlaces(body.inputs))
            return Response(text, media_type="application/json")
        self.check_model(body, http)
        if body.messages is not None:
            exchange_of(http).ignored += self.fit(body)
            ids = await self.convert(http, EncodeChat(body.chat_input(self.generation.can_call)))
            if body.add_special_tokens and ids[:1] != codec.opening[:1]:
                ids = codec.opening + ids
        elif body.content is not None:
            ids = await self.convert(http, Encode(body.content, bare=not body.add_special))
            tokens = map(self._piece, ids) if body.with_pieces else iter(ids)
            return await self.answers.response({"tokens": tokens})
        else:
            ids = await self.convert(
                http, Encode(body.prompt or "", bare=body.add_special_tokens is False)
            )
        names = map(codec.tokenizer.id_to_token, ids) if body.return_token_strs else None
        answer = {
            "count": len(ids),
            "max_model_len": self.generation.max_total_tokens,
            "tokens": iter(ids),
            "token_strs": names,
        }
        return await self.answers.response(answer)

    def _piece(self, id: int) -> dict[str, Any]:
        """A token and its text, or its bytes where they are part of a character."""
        piece = self.generation.codec.token_bytes(id)
        try:
            return {"id": id, "piece": piece.decode()}
        except UnicodeDecodeError:
            return {"id": id, "piece": list(piece)}

    async def detokenize(self, http: HttpRequest) -> Response:
        """Turn token ids into text.

        In llama.cpp's form, `content`, and in vLLM's, `prompt`.
        """
        body = await self.read_named(http, DetokenizeBody)
        largest, vocab_size = max(body.tokens, default=0), self.generation.ready.vocab_size
        if largest >= vocab_size:
            raise InvalidRequest(
                f"`tokens` holds the id {largest}, which is not below the vocabulary's "
                f"{vocab_size}",
                param="tokens",
            )
        (text,) = await self.convert(http, Decode([body.tokens]))
        return await self.answers.response({"content": text, "prompt": text})
