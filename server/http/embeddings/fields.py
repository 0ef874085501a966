"""Request bodies of the routes that answer with vectors, scores or classes of texts."""

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from server.http import fields
from server.http.fields import Body, Named

MAX_INPUTS = 2048


Inputs = Annotated[
    list[fields.Text | fields.TokenIds],
    Field(max_length=MAX_INPUTS, fail_fast=True),
    fields.ONE_OR_MORE,
]


class NamedBody(Named):
    """Fields of every route here."""

    truncate: bool | None = None
    """Whether an input that is longer than the context is cut at its end; else it is refused.
    Default: false."""
    user: fields.Name | None = None
    """Accepted for OpenAI's clients; it changes nothing."""


class VectorBody(NamedBody):
    """Fields of the routes that answer with embeddings."""

    prompt_name: fields.Name | None = None
    """Which of the model's prompts is put before each text, such as `query` or `document`: those of
    the checkpoint's config_sentence_transformers.json. Default: what that file has as default,
    mostly none."""
    dimensions: fields.Positive | None = None
    """Keep only this many numbers of each embedding, its first ones, for models that are trained
    for it (Matryoshka); they are normalised again. Default: all."""


class EmbeddingsBody(VectorBody):
    """The body of POST /v1/embeddings."""

    input: Inputs
    """A text, or its token ids; or a list of up to 2048 texts, or of lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: each embedding is the base64 of its little-endian 32-bit floats, a third of the
    bytes. Default: float."""


class EmbedBody(VectorBody):
    """The body of POST /embed, in TGI's sister TEI's form."""

    inputs: Inputs
    """A text, or its token ids; or a list of up to 2048 of them."""
    normalize: bool | None = None
    """Whether embeddings are divided by their norm. Default: true."""
    truncation_direction: Literal["right", "Right"] | None = None
    """Texts are cut at their end: only this is supported."""


class EmbeddingBody(NamedBody):
    """The body of POST /embedding and /embeddings, in llama.cpp's form."""

    content: Inputs = Field(validation_alias=AliasChoices("content", "input"))
    """A text, or its token ids; or a list of up to 2048 of them."""
    embd_normalize: Literal[-1, 2] | None = None
    """2: embeddings are divided by their Euclidean norm; -1: they are not. Default: 2."""


class Document(Body):
    """A document as an object."""

    text: fields.Text
    """Its text."""


class RerankBody(NamedBody):
    """The body of POST /v1/rerank, in Jina's and Cohere's form."""

    query: fields.Text
    """What is looked for."""
    documents: Annotated[
        list[fields.Text | Document], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    ]
    """The texts to sort, 1 to 2048."""
    top_n: fields.Count | None = None
    """Return only this many documents, the most relevant ones. Default: 0, all."""
    return_documents: bool | None = None
    """Whether results have the documents' texts. Default: false."""


class ClassifyBody(NamedBody):
    """The body of POST /classify, in vLLM's form."""

    input: Inputs
    """A text, or its token ids; or a list of up to 2048 of them."""
