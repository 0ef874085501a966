"""Request and Choice: the internal form of a request, the same for every dialect, and the state of
each of its sequences.

Plain data; knows no engine.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import msgspec

from server import protocol
from server.text.calls.parser import ReplyParser

_decode_scores = msgspec.msgpack.Decoder(list[protocol.PromptScore]).decode


GENERATES, EMBEDS, CLASSIFIES = "generation", "embeddings", "classification"


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. Requests of one call with the same prompt share its list.

    `max_new_tokens` None: as many as fit into the context. `keep_stop`: a matched stop string stays
    in the text. `keep_stop_token`: so does the text of the token that ends the sequence. `healed`:
    text at the end of the prompt that is generated again (token healing).
    """

    prompt: list[int]
    sampling: protocol.Sampling
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    keep_stop: bool = True
    keep_stop_token: bool = False
    skip_special_tokens: bool = True
    num_top: int = 0
    score_prompt: bool = False
    grammar: str = ""
    opening: protocol.Opening | None = None
    """What the grammar's part of the output follows; None: it is that of the whole output."""
    parser: Callable[[], ReplyParser] | None = None
    """Makes what takes thoughts and calls out of one output; None: all of it is text."""
    ignored: Sequence[str] = ()
    """Parts of the body that are not followed, which the response tells."""
    healed: str = ""
    priority: int = 0
    timeout_s: float | None = None
    salt: str = ""
    """`cache_salt`: requests with different salts share no cached prefix."""
    wanted: str = GENERATES
    """Text, or a vector that is made of the prompt: an embedding, or logits of classes."""


def with_choices(request: Request, count: int, all_score: bool = False) -> list[Request]:
    """`count` copies that share the prompt and differ in `sampling.choice`, which selects the
    random draws. Only the first scores the prompt, unless `all_score`.
    """
    return [
        replace(
            request,
            sampling=replace(request.sampling, choice=i),
            score_prompt=request.score_prompt and (i == 0 or all_score),
        )
        for i in range(count)
    ]


@dataclass(slots=True, eq=False)
class Choice:
    """One submitted sequence: its id, its token counts, and the monotonic times of its arrival,
    start, first and last token.
    """

    num_prompt: int
    max_new_tokens: int
    index: int
    request: Request
    id: int = 0
    arrival: float = field(default_factory=time.monotonic)
    started: float | None = None
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0
    """Prompt tokens served from the prefix cache."""
    scores: list[bytes] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens from the second on, if asked for: msgpack, an eighth
    of the objects' size."""
    outcome: str | None = None

    @property
    def prompt_scores(self) -> Iterator[protocol.PromptScore]:
        """The objects of `scores`."""
        return chain.from_iterable(map(_decode_scores, self.scores))


def prompt_tokens(choices: Sequence[Choice]) -> int:
    """Number of prompt tokens of a request; a prompt that several choices share counts once."""
    return sum(
        {id(choice.request.prompt): len(choice.request.prompt) for choice in choices}.values()
    )


def speeds(choices: Sequence[Choice]) -> dict[str, float]:
    """Token counts, TTFT and output tokens per second of a request, for the access log; 0 where
    unknown.
    """
    num_tokens = sum(choice.num_tokens for choice in choices)
    first = min((choice.first for choice in choices if choice.num_tokens), default=0.0)
    seconds = max((choice.last for choice in choices), default=0.0) - first
    return {
        "prompt_tokens": prompt_tokens(choices),
        "output_tokens": num_tokens,
        "ttft_ms": first and round((first - choices[0].arrival) * 1e3, 1),
        "tokens_per_second": seconds and round((num_tokens - 1) / seconds, 1),
    }
