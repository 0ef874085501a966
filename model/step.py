"""The contract between scheduler and runner: what one step computes, and its results. Plain frozen
data, no torch.

A Row does not distinguish prefill from decode: it computes `tokens` at positions start, start + 1,
..., and if these reach the end of the sequence, it samples one more. Known tokens (of a prompt, or
forced by a grammar) can be scored in the same step. Objects that a step makes for every row are
msgspec Structs, untracked by the garbage collector: a frozen dataclass takes ten times as long to
make.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from model.decode import DecodeStep
    from model.draw_words import History

PENDING = -1
"""Placeholder for the last token of a row: the one that its sequence samples in the previous step,
which is still being computed."""


def bitmap(ids: Collection[int]) -> bytes:
    """One bit for each id, least significant first, up to the largest of them; empty without
    ids.
    """
    bits = bytearray(max(ids, default=-8) // 8 + 1)
    for id in ids:
        bits[id // 8] |= 1 << id % 8
    return bytes(bits)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The defaults draw from the model's distribution unchanged;
    temperature 0 takes the likeliest.

    The one description of a draw: requests are made into it, and the API process sends it to the
    engine as it is.
    """

    temperature: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens that holds this probability."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest token's probability."""
    typical_p: float = 1.0
    """Keep the most typical tokens that hold this probability (Meister et al. 2022)."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of tokens in prompt or output (Keskar et
    al. 2019)."""
    frequency_penalty: float = 0.0
    """Subtracted once for each occurrence in the output."""
    presence_penalty: float = 0.0
    """Subtracted once where the token occurs in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    allowed_tokens: bytes = b""
    """The only tokens that can be drawn: one bit for each id, least significant first. Empty allows
    all. A bitmap because it is sent with every sequence and read for every draw: it is bounded by
    the vocabulary, and repeated ids cost nothing.
    """
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that must not occur in the output: the last token of one is not drawn where
    the others stand."""
    logprob_token_ids: Sequence[int] = ()
    """If any, the tokens to report with the drawn one, instead of the likeliest."""
    seed: int = 0
    """Together with `choice` and the output index it determines all randomness of a draw."""
    choice: int = 0
    """Which of the `n` outputs of a request this is."""

    @cached_property
    def adjusts(self) -> bool:
        """Whether any of these settings changes logits before the temperature is applied."""
        return self.reads_output or bool(self.logit_bias) or bool(self.allowed_tokens)

    @cached_property
    def penalises(self) -> bool:
        """Whether tokens that occurred before are less likely, or likelier."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @cached_property
    def filters(self) -> bool:
        """Whether top-k, top-p or typical-p apply: these depend on all probabilities, min-p only on
        a token's own and the largest.
        """
        return self.top_k > 0 or self.top_p < 1.0 or self.typical_p < 1.0

    @cached_property
    def reads_output(self) -> bool:
        """Whether a draw depends on the output so far other than through the model's logits."""
        return self.penalises or bool(self.bad_words)


class Sample(Struct, frozen=True, gc=False):
    """How a row samples: the settings, the tokens before it, and the ids that are not allowed."""

    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    forbidden: Collection[int] = ()
    """The end-of-sequence ids, while the sequence has fewer tokens than its minimum."""
    num_top: int = 0
    """How many of the likeliest tokens to report with the drawn one."""
    mask: bytes | None = None
    """The tokens that a grammar allows: one bit for each id, least significant first. None allows
    all."""
    num_unseen: int = 0
    """Tokens after `output` that steps in flight sample."""
    history: "History | None" = None
    """Of the prompt and `output`, where penalties ask for it and it is kept from step to step."""

    @property
    def index(self) -> int:
        """The sampled token's index in the output."""
        return len(self.output) + self.num_unseen

    def after(self, output: Sequence[int]) -> "Sample":
        """The same after another output, all of which is known."""
        return replace(self, output=output, num_unseen=0, history=None)


@dataclass(frozen=True, slots=True)
class Scoring:
    """Known tokens whose log-probabilities are requested: the state of the row's token `first` + i
    predicts `targets[i]`.
    """

    first: int
    targets: Sequence[int]
    num_top: int


class Row(Struct, frozen=True, gc=False):
    """One sequence's part of a step: compute `tokens` from position `start` on, over the cache
    pages `pages`.
    """

    sequence: int
    tokens: Sequence[int]
    start: int
    pages: "Sequence[array[int]]"
    """For each group of layers (cache.layout): page i of stack j is at i * num_stacks + j. 64-bit
    integers, which the native kernels read in place."""
    sample: Sample | None
    """None where the sequence has further tokens to compute before it can draw."""
    scoring: Scoring | None = None
    drafts: int = 0
    """How many of the last `tokens` are draft tokens: the row also samples before each of them, for
    as long as drafts are accepted."""

    @property
    def samples(self) -> list[Sample]:
        """One for each token that the row samples: after its last known token, and after each draft
        token as if that were output.
        """
        if self.sample is None:
            return []
        drafts, output = self.tokens[len(self.tokens) - self.drafts :], self.sample.output
        return [
            self.sample,
            *(self.sample.after([*output, *drafts[: i + 1]]) for i in range(self.drafts)),
        ]

    def settle(self, draws: Sequence["Outcome"]) -> tuple[list["SampledToken"], "Outcome"]:
        """Given the draws for `samples`: the accepted drafts, and the first draw that differs from
        its draft or follows all drafts.
        """
        accepted: list[SampledToken] = []
        for draw, draft in zip(draws, self.tokens[len(self.tokens) - self.drafts :], strict=False):
            if not isinstance(draw, SampledToken) or draw.token != draft:
                break
            accepted.append(draw)
        return accepted, draws[len(accepted)]


@dataclass(frozen=True)
class StepPlan:
    """All rows of one step. Their order does not affect any row's result. Draws are numbered in
    their order.
    """

    listed: tuple[Row, ...]
    clear: tuple[int, ...] = ()
    """Pages to zero before the step: a failed row may have left NaN in them."""
    decode: "DecodeStep | None" = None
    """Rows before the listed ones, in columns."""

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every row as a Row: those of `decode`, then the listed ones."""
        return self.listed if self.decode is None else (*self.decode.rows(), *self.listed)

    @property
    def num_decoding(self) -> int:
        """Rows of `decode`."""
        return 0 if self.decode is None else len(self.decode)

    @property
    def is_empty(self) -> bool:
        return not self.listed and self.decode is None


class SampledToken(Struct, frozen=True, gc=False):
    """A sampled or scored token and its log-probability (nats) under the model's own distribution,
    before temperature and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their log-probabilities, likeliest first, as many as were
    requested."""
    rank: int = 0
    """For a scored token: how many tokens are at least as likely, itself included."""
    vector: bytes = b""
    """In place of a token: what a model that draws none makes of the text, as float32."""


class SampleError(Struct, frozen=True, gc=False):
    """Why a row could not sample a token. Other rows are not affected.

    `refused`: the request itself is at fault; otherwise the engine. `code`: machine-readable.
    """

    reason: str
    refused: bool = False
    code: str = ""


Outcome = SampledToken | SampleError
"""Outcome of sampling one token: the token, or why there is none."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step's rows."""

    drawn: tuple[Outcome | None, ...]
    """For each row of the plan its sampled token, after the accepted drafts if it has drafts; None
    if it does not sample."""
    scored: Mapping[int, Sequence[SampledToken]] = field(default_factory=dict)
    """Index of a row -> the scores of its targets, in their order."""
    accepted: Mapping[int, Sequence[SampledToken]] = field(default_factory=dict)
    """Index of a row with drafts -> its accepted draft tokens."""
