"""The contract between scheduler and runner: what one step computes, and what came of it. Plain frozen data, no torch.

A Row says nothing of prefill or decode: it computes `tokens` at positions start, start + 1, ..., and where it reaches the end of
what the sequence has, it samples one more. Tokens that are known already (a prompt's, or ones that a grammar leaves no choice about)
can be scored on the way. What a step makes for every row is a msgspec Struct, and none that the collector of cycles looks at: a frozen
dataclass takes ten times as long to make.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

PENDING = -1
"""Stands as the last token of a row for the one that its sequence draws in the step before, when that is still being computed."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The defaults draw from the model's distribution unchanged; temperature 0 takes the likeliest.

    The one description of a draw: requests are made into it, and the API process sends it to the engine as it is.
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
    """Divides positive logits, multiplies negative ones, of tokens in prompt or output (Keskar et al. 2019)."""
    frequency_penalty: float = 0.0
    """Subtracted once for each occurrence in the output."""
    presence_penalty: float = 0.0
    """Subtracted once where the token occurs in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    allowed_token_ids: Sequence[int] = ()
    """If any, the only tokens that can be drawn."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that must not occur in the output: the last token of one is not drawn where the others stand."""
    logprob_token_ids: Sequence[int] = ()
    """If any, the tokens to report with the drawn one, instead of the likeliest."""
    seed: int = 0
    """With the choice's number and the output index, all there is to the randomness of a draw."""
    choice: int = 0

    @cached_property
    def adjusts(self) -> bool:
        """Whether any of this changes logits before the temperature does."""
        return self.reads_output or bool(self.logit_bias) or bool(self.allowed_token_ids)

    @cached_property
    def filters(self) -> bool:
        """Whether it leaves tokens out for what the others' probabilities are, and not for their own share of the largest alone."""
        return self.top_k > 0 or self.top_p < 1.0 or self.typical_p < 1.0

    @cached_property
    def reads_output(self) -> bool:
        """Whether a draw depends on which tokens were drawn before, by more than the model's logits."""
        penalised = self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        return penalised or bool(self.bad_words)


class Sample(Struct, frozen=True, gc=False):
    """A row that draws a token: how, after which tokens, and which ids may not come yet."""

    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    forbidden: Sequence[int] = ()
    """Ids that end the sequence, while it has fewer than its minimum of tokens."""
    num_top: int = 0
    """How many of the likeliest tokens to report with the drawn one."""
    mask: bytes | None = None
    """One bit for each token id, least significant first: those a grammar allows. None allows all."""
    num_unseen: int = 0
    """Tokens behind `output` that are drawn, or about to be, and not known yet."""

    @property
    def index(self) -> int:
        """The drawn token's place in the output."""
        return len(self.output) + self.num_unseen


@dataclass(frozen=True, slots=True)
class Scoring:
    """Known tokens whose log-probabilities are wanted: the state of the row's token `first` + i predicts `targets[i]`."""

    first: int
    targets: Sequence[int]
    num_top: int


class Row(Struct, frozen=True, gc=False):
    """One sequence's part of a step: compute `tokens` from position `start` on, over the cache pages `pages`."""

    sequence: int
    tokens: Sequence[int]
    start: int
    pages: "Sequence[array[int]]"
    """For each group of layers (cache.layout): page i of stack j is at i * num_stacks + j. As 64-bit integers, which kernels read where
    they lie."""
    sample: Sample | None
    """None where the sequence has further tokens to compute before it can draw."""
    scoring: Scoring | None = None
    drafts: int = 0
    """How many of `tokens`, the last ones, are guesses: the row draws before each of them, too, as long as they come true."""

    @property
    def samples(self) -> list[Sample]:
        """One for each place at which the row draws: behind its last known token, and behind each guess as if that were output."""
        if self.sample is None:
            return []
        guesses, output = self.tokens[len(self.tokens) - self.drafts :], self.sample.output
        return [self.sample, *(replace(self.sample, output=[*output, *guesses[: i + 1]]) for i in range(self.drafts))]

    def settle(self, draws: Sequence["SampledToken | SampleError"]) -> tuple[list["SampledToken"], "SampledToken | SampleError"]:
        """Of the draws at those places: the ones that equal the guesses, up to the first that does not, and that one."""
        accepted: list[SampledToken] = []
        for draw, guess in zip(draws, self.tokens[len(self.tokens) - self.drafts :], strict=False):
            if not isinstance(draw, SampledToken) or draw.token != guess:
                break
            accepted.append(draw)
        return accepted, draws[len(accepted)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All rows of one step, in an order that has no bearing on any row's result."""

    rows: tuple[Row, ...]
    clear: tuple[int, ...] = ()
    """Pages to zero before anything is computed: a failed row may have left NaN in them."""


class SampledToken(Struct, frozen=True, gc=False):
    """A drawn or scored token and its log-probability (nats) under the model's own distribution, before temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, likeliest first, as many as were asked for."""
    rank: int = 0
    """Of a scored token: how many tokens are at least as likely, itself included."""


class SampleError(Struct, frozen=True, gc=False):
    """A row that should have drawn a token and could not: its own failure, nobody else's.

    `refused`: what its request asks for cannot be had; else the engine failed it. `code`: a word for programs to read.
    """

    reason: str
    refused: bool = False
    code: str = ""


@dataclass(frozen=True, slots=True)
class StepResult:
    """For each row of the plan, in its order, the token it drew; None where it did not sample. Of a row with drafts, the first that equals
    none.
    """

    drawn: tuple[SampledToken | SampleError | None, ...]
    scored: Mapping[int, Sequence[SampledToken]] = field(default_factory=dict)
    """Index of a row that scores -> its targets' log-probabilities, in their order."""
    accepted: Mapping[int, Sequence[SampledToken]] = field(default_factory=dict)
    """Index of a row with drafts -> what it drew before that, which equals the first of them."""
