"""Embedding: the vectors that the model makes of texts, for every dialect's routes.

Invariant: a text's vector depends on that text alone, to the bit, whatever else is asked for with
it. It knows no HTTP.
"""

from array import array
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import sqrt
from typing import TypeAlias

from server.errors import InvalidRequest
from server.generation.admission import Reservation
from server.generation.generation import Generation
from server.generation.price import MAX_SENT_IDS
from server.generation.request import EMBEDS, Request
from server.protocol import Sampling
from server.text.jobs import EncodePairs, Prompts

Vector: TypeAlias = "array[float]"
"""Of 32-bit floats."""
Given: TypeAlias = "str | list[int]"
"""A text, or token ids."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of some texts, as the model's last layer leaves them."""

    vectors: list[Vector]
    num_tokens: int


async def embed(
    generation: Generation,
    given: Sequence[Given],
    reservation: Reservation,
    *,
    wanted: str = EMBEDS,
    dimensions: int | None = None,
    truncate: bool = False,
    query: str | None = None,
) -> Embedded:
    """The vectors of inputs, in their order; where there is a `query`, of it and each of them as a
    pair. `truncate` cuts an input that is longer than the context. Raises RequestError.

    As many are submitted at a time as may run, so that a request may have any number of inputs and
    leaves places for others. It is admitted once.
    """
    generation.check_kind(wanted)
    if (dimensions or 0) > (size := generation.ready.vector_size):
        raise InvalidRequest(
            f"`dimensions` must be at most the {size} of this model. Given: {dimensions}",
            param="dimensions",
        )
    most = generation.client.admission.max_running
    by_price = max(1, MAX_SENT_IDS // generation.max_total_tokens)
    most = min(reservation.terms.max_running or most, most, by_price)
    found, num_tokens = list[Vector](), 0
    with ExitStack() as held:
        for first in range(0, len(given), most):
            part = given[first : first + most]
            prompts = await _prompts(generation, part, reservation, truncate, query)
            num_tokens += sum(map(len, prompts))
            requests = [Request(prompt, Sampling(), wanted=wanted) for prompt in prompts]
            with closing(generation.start(requests, reservation)) as streams:
                if not first:
                    held.enter_context(reservation.held())
                vectors = {piece.choice: array("f", piece.vector) async for piece in streams}
            found += [vectors[index] for index in range(len(prompts))]
    return Embedded(found, num_tokens)


async def _prompts(
    generation: Generation,
    given: Sequence[Given],
    reservation: Reservation,
    truncate: bool,
    query: str | None,
) -> list[list[int]]:
    """The token ids of some inputs: of texts with the tokenizer's special tokens."""
    texts = [text for text in given if isinstance(text, str)]
    if not texts:
        most = generation.max_total_tokens if truncate else None
        return [ids[:most] for ids in given if isinstance(ids, list)]
    if query is None:
        filled = await generation.tokenize(Prompts(texts), reservation.client, truncated=truncate)
        prompts = [each.prompt for each in filled]
    else:
        pairs = EncodePairs(query, texts)
        prompts = await generation.tokenize(pairs, reservation.client, truncated=truncate)
    return [_cut(generation, ids) for ids in prompts] if truncate else prompts


def _cut(generation: Generation, ids: list[int]) -> list[int]:
    """A text's ids, of which those that the tokenizer puts at its end stay there."""
    most, ends = generation.max_total_tokens, generation.codec.closing
    if len(ids) <= most:
        return ids
    return ids[: most - len(ends)] + ends if len(ends) < most else ids[:most]


def normalised(vector: Vector, dimensions: int | None = None) -> Vector:
    """The first `dimensions` numbers divided by their Euclidean norm (Matryoshka representation
    learning, arXiv 2205.13147).
    """
    kept = vector[:dimensions]
    norm = sqrt(sum(x * x for x in kept)) or 1.0
    return array("f", [x / norm for x in kept])


def cosine(vector: Vector, other: Vector) -> float:
    """The cosine similarity of two normalised vectors."""
    return sum(x * y for x, y in zip(vector, other, strict=True))
