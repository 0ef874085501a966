"""POST /tokenize, whose body selects TGI's, vLLM's or llama.cpp's form, and POST /detokenize."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.config import ServerSection
from server.errors import InvalidRequest
from server.generation.generation import Generation
from server.http.body import check, read_model, read_value
from server.http.exchange import Dialect, exchange_of
from server.http.model_names import ModelNames
from server.http.openai.chat_fields import plain_messages
from server.http.pieces import JsonAnswers
from server.http.routes import Route
from server.http.token_fields import DetokenizeBody, TokenizeBody
from server.text.conversation import ChatInput
from server.text.jobs import Decode, Encode, EncodeChat, EncodeWithPlaces


class TokenRoutes:
    """Handlers of both routes."""

    def __init__(self, generation: Generation, section: ServerSection, names: ModelNames, answers: JsonAnswers) -> None:
        self.generation = generation
        self.names = names
        self.section = section
        self.answers = answers

    def routes(self) -> list[Route]:
        # The dialect of /tokenize is TGI's until its body has been read.
        return [
            Route("/tokenize", ("POST",), self.tokenize, Dialect.TGI, tag="tokens"),
            Route("/detokenize", ("POST",), self.detokenize, Dialect.OPENAI, tag="tokens"),
        ]

    async def tokenize(self, http: HttpRequest) -> Response:
        """Turn text into tokens.

        `inputs` is answered as TGI does, with a list of tokens and their places; `prompt` and `messages` as vLLM does, with an object, and
        `content` as llama.cpp does, with the token ids alone.
        """
        value = await read_value(http, self.section.max_body_bytes)
        exchange_of(http).dialect = Dialect.OPENAI if value.get("inputs") is None else Dialect.TGI
        body, exchange_of(http).ignored = check(value, TokenizeBody, self.section.strict_fields)
        codec, texts, client = self.generation.codec, self.generation.texts, exchange_of(http).client
        if body.inputs is not None:
            # `model` is not checked, as on TGI's other routes. The worker process writes the JSON.
            return Response(await texts.run(EncodeWithPlaces(body.inputs), client), media_type="application/json")
        self.names.resolve(body.model, http.headers.get("host"))
        if body.messages is not None:
            given = ChatInput(plain_messages(body.messages), body.add_generation_prompt is not False)
            ids = await texts.run(EncodeChat(given), client)
        elif body.content is not None:
            ids = await texts.run(Encode(body.content, bare=not body.add_special), client)
            return await self.answers.response({"tokens": iter(ids)})
        else:
            ids = await texts.run(Encode(body.prompt or "", bare=body.add_special_tokens is False), client)
        names = map(codec.tokenizer.id_to_token, ids) if body.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": self.generation.max_total_tokens, "tokens": iter(ids), "token_strs": names}
        return await self.answers.response(answer)

    async def detokenize(self, http: HttpRequest) -> Response:
        """Turn token ids into text."""
        body = await read_model(http, DetokenizeBody, self.section)
        self.names.resolve(body.model, http.headers.get("host"))
        largest, vocab_size = max(body.tokens), self.generation.ready.vocab_size
        if largest >= vocab_size:
            raise InvalidRequest(f"`tokens` holds the id {largest}, which is not below the vocabulary's {vocab_size}", param="tokens")
        text = await self.generation.texts.run(Decode(body.tokens), exchange_of(http).client)
        return await self.answers.response({"prompt": text})
