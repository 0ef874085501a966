"""The price of a request, known before the engine gets any of it: its tokens, the token ids sent,
the log-probabilities of its answer.

Invariant: what a request can make this process send, hold and answer is bounded by its price,
whatever its fields are. The one place for bounds that depend on several fields; a field's own bound
is in its schema.
"""

from collections.abc import Sequence

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


def check_price(submits: Sequence[Submit], capacity: int) -> None:
    """Raises InvalidRequest where the price of the sequences of one request, which have the same
    sampling parameters, is above a bound. `capacity`: most tokens of a sequence.
    """
    first, sampling = submits[0], submits[0].sampling
    in_lists = (
        len(first.stop_token_ids)
        + len(sampling.logit_bias)
        + sum(map(len, sampling.bad_words))
        + len(sampling.logprob_token_ids)
    )
    sent_ids = sum(len(submit.prompt) + in_lists for submit in submits)
    if sent_ids > MAX_SENT_IDS:
        raise InvalidRequest(
            "`n` sequences with the token ids of `prompt`, `bad_words`, `logit_bias`, "
            "`stop_token_ids` and `logprob_token_ids` make "
            f"{sent_ids} ids for the engine; at most {MAX_SENT_IDS} are allowed in one "
            "request: send several",
            param="n",
        )
    most = max(MAX_LOGPROBS, capacity * (MAX_TOP + 1))
    top = max(first.num_top, len(sampling.logprob_token_ids))
    scored = sum(len(submit.prompt) for submit in submits if submit.score_prompt)
    drawn = sum(submit.max_new_tokens for submit in submits) if top else 0
    logprobs = (top + 1) * (scored + drawn)
    if logprobs > most:
        raise InvalidRequest(
            f"`n` sequences with `logprobs` or `prompt_logprobs` make up to {logprobs} "
            f"log-probabilities; at most {most} are allowed "
            "in one answer: ask for fewer tokens or sequences, or send several requests",
            param="logprobs",
        )
