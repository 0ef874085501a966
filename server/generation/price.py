"""The price of a request, known before the engine gets any of it: its tokens, the token ids sent,
the log-probabilities of its answer.

Invariant: what a request can make this process send, hold and answer is bounded by its price,
whatever its fields are. The one place for bounds that depend on several fields; a field's own bound
is in its schema.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from server.errors import InvalidRequest
from server.protocol import Submit

MAX_TOP = 20
"""Most likely tokens that a request may ask for in each token's place."""
MAX_SENT_IDS = 2**20
"""Token ids that a request may send to the engine: every sequence is sent with its prompt and with
all ids of its other fields."""
MAX_LOGPROBS = 2**20
"""Log-probabilities that an answer may hold, about 70 bytes of JSON each; more only where one
sequence over the whole context has more."""


@dataclass(frozen=True, slots=True)
class Price:
    """The price of all sequences of a request. `tokens`: prompt and output tokens, at most; the
    unit of shares between clients.
    """

    tokens: int
    prompt_tokens: int
    sent_ids: int
    logprobs: int


def price(submits: Sequence[Submit], capacity: int) -> Price:
    """The price of the sequences of one request, which have the same sampling parameters.
    `capacity`: most tokens of a sequence. Raises InvalidRequest where it is above a bound.
    """
    first, sampling = submits[0], submits[0].sampling
    prompt_tokens = sum(len(submit.prompt) for submit in submits)
    output_tokens = sum(submit.max_new_tokens for submit in submits)
    in_lists = (
        len(first.stop_token_ids)
        + len(sampling.logit_bias)
        + sum(map(len, sampling.bad_words))
        + len(sampling.logprob_token_ids)
    )
    most = max(MAX_LOGPROBS, capacity * (MAX_TOP + 1))
    top = max(first.num_top, len(sampling.logprob_token_ids))
    scored = sum(len(submit.prompt) for submit in submits if submit.score_prompt)
    found = Price(
        tokens=prompt_tokens + output_tokens,
        prompt_tokens=prompt_tokens,
        sent_ids=prompt_tokens + len(submits) * in_lists,
        logprobs=(top + 1) * (scored + (output_tokens if top else 0)),
    )
    if found.sent_ids > MAX_SENT_IDS:
        raise InvalidRequest(
            "`n` sequences with the token ids of `prompt`, `bad_words`, `logit_bias`, "
            "`stop_token_ids` and `logprob_token_ids` make "
            f"{found.sent_ids} ids for the engine; at most {MAX_SENT_IDS} are allowed in one "
            "request: send several",
            param="n",
        )
    if found.logprobs > most:
        raise InvalidRequest(
            f"`n` sequences with `logprobs` or `prompt_logprobs` make up to {found.logprobs} "
            f"log-probabilities; at most {most} are allowed "
            "in one answer: ask for fewer tokens or sequences, or send several requests",
            param="logprobs",
        )
    return found
