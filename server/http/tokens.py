"""POST /tokenize, whose body selects TGI's or vLLM's dialect, and POST /detokenize."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.config import ServerSection
from server.errors import InvalidRequest
from server.generation.generation import Generation
from server.http.body import check, read_model, read_value
from server.http.exchange import Dialect, exchange_of
from server.http.model_names import ModelNames
from server.http.pieces import JsonAnswers
from server.http.routes import Route
from server.http.token_fields import DetokenizeBody, TokenizeBody
from server.text.chat_template import ChatTemplate


class TokenRoutes:
    """Handlers of both routes."""

    def __init__(
        self, generation: Generation, section: ServerSection, names: ModelNames, chat_template: ChatTemplate, answers: JsonAnswers
    ) -> None:
        self.generation = generation
        self.names = names
        self.section = section
        self.answers = answers
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
            return await self.answers.response(
                {"id": id, "text": text[start:end], "start": start, "stop": end} for id, start, end in tokens
            )
        self.names.resolve(body.model)
        if body.messages is not None:
            messages = [message.plain() for message in body.messages]
            num_chars = sum(len(message["content"]) for message in messages)
            ids = await self.generation.tokenizing(num_chars, self.chat_template.encode, messages, body.add_generation_prompt is not False)
        else:
            text = body.prompt or ""
            ids = await self.generation.tokenizing(len(text), codec.encode_bare if body.add_special_tokens is False else codec.encode, text)
        names = map(codec.tokenizer.id_to_token, ids) if body.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": self.generation.max_total_tokens, "tokens": iter(ids), "token_strs": names}
        return await self.answers.response(answer)

    async def detokenize(self, http: HttpRequest) -> Response:
        """Turn token ids into text."""
        body = await read_model(http, DetokenizeBody, self.section.max_body_bytes)
        self.names.resolve(body.model)
        largest, vocab_size = max(body.tokens), self.generation.ready.vocab_size
        if largest >= vocab_size:
            raise InvalidRequest(f"`tokens` holds the id {largest}, which is not below the vocabulary's {vocab_size}", param="tokens")
        # decode_batch releases the GIL, decode does not.
        decode = self.generation.codec.tokenizer.decode_batch
        (text,) = await self.generation.tokenizing(len(body.tokens), decode, [body.tokens], skip_special_tokens=False)
        return await self.answers.response({"prompt": text})
