"""Vectors of texts: POST /v1/embeddings and /v1/rerank, TEI's /embed, llama.cpp's /embedding, and
vLLM's /classify. server.generation.embedding makes the vectors.
"""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from math import exp
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from model.checkpoint.files import MOST_CONFIG_BYTES, read_object
from server.errors import InvalidRequest
from server.generation.embedding import Embedded, Given, Vector, cosine, normalised
from server.generation.request import CLASSIFIES
from server.http.embeddings import fields
from server.http.errors import OPENAI, TGI
from server.http.handlers import Context, Handlers
from server.http.routes import Route
from server.protocol import Classes

PROMPTS = "config_sentence_transformers.json"
IN_A_TURN = 64
"""Cosines that are computed in one turn of the event loop."""


def routes(context: Context) -> list[Route]:
    """The routes of this extension."""
    handlers = EmbeddingRoutes(context)
    posted = partial(Route, methods=("POST",), dialect=OPENAI, generates=True)
    return [
        posted("/v1/embeddings", handler=handlers.embeddings),
        posted("/embed", handler=handlers.embed, dialect=TGI),
        posted("/embedding", handler=handlers.embedding),
        posted("/embeddings", handler=handlers.embedding),
        posted("/v1/rerank", handler=handlers.rerank),
        posted("/rerank", handler=handlers.rerank),
        posted("/classify", handler=handlers.classify),
    ]


class EmbeddingRoutes(Handlers):
    """Handlers of the routes that answer with what is made of vectors."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        found = read_object(self.generation.codec.folder / PROMPTS, MOST_CONFIG_BYTES) or {}
        prompts = found.get("prompts")
        items = prompts.items() if isinstance(prompts, dict) else ()
        self._prompts = {name: text for name, text in items if isinstance(text, str)}
        self._default = found.get("default_prompt_name")

    async def embeddings(self, http: HttpRequest) -> Response:
        """Embed texts.

        In OpenAI's form. With `prompt_name`, which names one of the model's prompts, clients need
        not put these before their texts.
        """
        body = await self.read_named(http, fields.EmbeddingsBody)
        embedded = await self._embedded(http, self._prompted(body, body.input), body)

        def entry(index: int, vector: Vector) -> dict[str, Any]:
            numbers: Any = normalised(vector, body.dimensions)
            if body.encoding_format == "base64":
                numbers = b64encode(numbers.tobytes()).decode()
            else:
                numbers = list(numbers)
            return {"object": "embedding", "index": index, "embedding": numbers}

        data = [partial(entry, *each) for each in enumerate(embedded.vectors)]
        return await self._answer({"object": "list", "data": data}, embedded)

    async def embed(self, http: HttpRequest) -> Response:
        """Embed texts, in TEI's form."""
        body = await self.read_named(http, fields.EmbedBody)
        embedded = await self._embedded(http, self._prompted(body, body.inputs), body)
        most = body.dimensions
        rows = (
            list(vector[:most] if body.normalize is False else normalised(vector, most))
            for vector in embedded.vectors
        )
        return await self.answers.response(rows)

    async def embedding(self, http: HttpRequest) -> Response:
        """Embed texts, in llama.cpp's form."""
        body = await self.read_named(http, fields.EmbeddingBody)
        embedded = await self._embedded(http, body.content, body)
        shown = list if body.embd_normalize == -1 else normalised
        rows = (
            {"index": index, "embedding": [list(shown(vector))]}
            for index, vector in enumerate(embedded.vectors)
        )
        return await self.answers.response(rows)

    async def rerank(self, http: HttpRequest) -> Response:
        """Sort documents by how relevant they are to a query.

        By the cosine of embeddings, with the model's prompts for queries and documents where it has
        such; a model that classifies with one label scores each pair.
        """
        body = await self.read_named(http, fields.RerankBody)
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        classes = self.generation.ready.classes
        if classes and len(classes.labels) > 1:
            raise InvalidRequest(
                f"this model classifies texts into {len(classes.labels)} labels; only one with a "
                "single label tells how relevant a document is"
            )
        if classes:
            embedded = await self._embedded(http, texts, body, wanted=CLASSIFIES, query=body.query)
            scores = [_likely(classes, vector)[0] for vector in embedded.vectors]
        else:
            query = self._prompts.get("Reranking") or self._prompts.get("query", "")
            document = self._prompts.get("document", "")
            asked = [query + body.query, *(document + text for text in texts)]
            embedded = await self._embedded(http, asked, body)
            first, *others = embedded.vectors
            first, scores = normalised(first), []
            for other in others:
                scores.append(cosine(first, normalised(other)))
                if len(scores) % IN_A_TURN == 0:
                    await asyncio.sleep(0)
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": texts[index]}} if body.return_documents else {})
            for index in order
        ]
        return await self._answer({"results": results}, embedded)

    async def classify(self, http: HttpRequest) -> Response:
        """Classify texts, in vLLM's form.

        With the labels of the checkpoint, which must be one for classification.
        """
        body = await self.read_named(http, fields.ClassifyBody)
        embedded = await self._embedded(http, body.input, body, wanted=CLASSIFIES)
        classes = self.generation.ready.classes
        assert classes is not None, "it was asked for classes"

        def entry(index: int, vector: Vector) -> dict[str, Any]:
            likely = _likely(classes, vector)
            best = classes.labels[likely.index(max(likely))]
            facts = {"label": best, "probs": likely, "num_classes": len(likely)}
            return {"index": index} | facts

        data = [partial(entry, *each) for each in enumerate(embedded.vectors)]
        return await self._answer({"object": "list", "data": data}, embedded)

    def _prompted(self, body: fields.VectorBody, given: Sequence[Given]) -> Sequence[Given]:
        """The texts after the prompt that the body names, else the model's default if it has
        one.
        """
        name = str(self._default if body.prompt_name is None else body.prompt_name)
        if body.prompt_name is None and not (name in self._prompts and isinstance(given[0], str)):
            return given
        prompt = self._prompts.get(name)
        if prompt is None:
            names = ", ".join(sorted(self._prompts)) or "none"
            raise InvalidRequest(
                f"`prompt_name` {name[:64]!r} is no prompt of this model, which has: {names}",
                param="prompt_name",
            )
        texts = [prompt + text for text in given if isinstance(text, str)]
        if not texts:  # Inputs are all of one kind.
            raise InvalidRequest("`prompt_name` goes with texts, not with token ids")
        return texts

    async def _embedded(
        self,
        http: HttpRequest,
        given: Sequence[Given],
        body: fields.NamedBody,
        **asked: Any,
    ) -> Embedded:
        dimensions = body.dimensions if isinstance(body, fields.VectorBody) else None
        return await self.embedded(
            http, given, dimensions=dimensions, truncate=bool(body.truncate), **asked
        )

    async def _answer(self, value: dict[str, Any], embedded: Embedded) -> Response:
        usage = {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}
        whole = value | {"model": self.names.shown, "usage": usage}
        return await self.answers.response(whole)


def _likely(classes: Classes, logits: Vector) -> list[float]:
    """The probability of each label, or what a regression gives."""
    if classes.scores == "softmax":
        return _softmax(logits)
    # The sigmoid of a number is the softmax of 0 and it.
    return [_softmax((0.0, x))[1] for x in logits] if classes.scores == "sigmoid" else list(logits)


def _softmax(logits: Sequence[float]) -> list[float]:
    most = max(logits)
    weights = [exp(x - most) for x in logits]
    total = sum(weights)
    return [weight / total for weight in weights]
