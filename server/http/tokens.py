"""POST /tokenize, whose body selects TGI's or vLLM's dialect, and POST /detokenize."""

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.config import ServerSection
from server.errors import InvalidRequest
from server.generation.generation import Generation
from server.http.body import check, read_model, read_value
from server.http.exchange import Dialect, exchange_of
from server.http.model_names import ModelNames
from server.http.routes import Route
from server.http.token_fields import DetokenizeBody, TokenizeBody
from server.text.chat_template import ChatTemplate


class TokenRoutes:
    """Handlers of both routes."""

    def __init__(self, generation: Generation, section: ServerSection, names: ModelNames, chat_template: ChatTemplate) -> None:
        self.generation = generation
        self.names = names
        self.section = section
        self.chat_template = chat_template

    def routes(self) -> list[Route]:
        # The dialect of /tokenize is TGI's until its body has been read.
        return [
            Route("/tokenize", ("POST",), self.tokenize, Dialect.TGI, tag="tokens"),
            Route("/detokenize", ("POST",), self.detokenize, Dialect.OPENAI, tag="tokens"),
        ]

    async def tokenize(self, http: HttpRequest) -> Response:
        """Turn text into tokens.

        `inputs` is answered as TGI does, with a list of tokens and their places; `prompt` and `messages` as vLLM does, with an object.
        """
        value = await read_value(http, self.section.max_body_bytes)
        exchange_of(http).dialect = Dialect.OPENAI if value.get("inputs") is None else Dialect.TGI
        body = check(value, TokenizeBody)
        codec = self.generation.codec
        if body.inputs is not None:
            text = body.inputs  # `model` is not checked, as on TGI's other routes.
            tokens = await self.generation.tokenizing(len(text), codec.encode_with_offsets, text)
            return JSONResponse([{"id": id, "text": text[start:end], "start": start, "stop": end} for id, start, end in tokens])
        self.names.resolve(body.model)
        if body.messages is not None:
            messages = [message.plain() for message in body.messages]
            num_chars = sum(len(message["content"]) for message in messages)
            ids = await self.generation.tokenizing(num_chars, self.chat_template.encode, messages, body.add_generation_prompt is not False)
        else:
            text = body.prompt or ""
            ids = await self.generation.tokenizing(len(text), codec.encode_bare if body.add_special_tokens is False else codec.encode, text)
        names = [codec.tokenizer.id_to_token(id) for id in ids] if body.return_token_strs else None
        return JSONResponse({"count": len(ids), "max_model_len": self.generation.max_total_tokens, "tokens": ids, "token_strs": names})

    async def detokenize(self, http: HttpRequest) -> Response:
        """Turn token ids into text."""
        body = await read_model(http, DetokenizeBody, self.section.max_body_bytes)
        self.names.resolve(body.model)
        largest, vocab_size = max(body.tokens), self.generation.ready.vocab_size
        if largest >= vocab_size:
            raise InvalidRequest(f"`tokens` holds the id {largest}, which is not below the vocabulary's {vocab_size}", param="tokens")
        return JSONResponse({"prompt": self.generation.codec.decode(body.tokens)})
