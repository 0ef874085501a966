"""The messages between the API process and the engine process: frozen, tagged, versioned by VERSION.

Everything on the pipe is the msgpack bytes of one of these; nothing is pickled. It knows nothing of HTTP, text or tensors;
`Sampling` is the model's own description of a draw, carried as it is.
"""

import msgspec

from model.step import Sampling as Sampling

VERSION = 10
MAX_FRAME_BYTES = 64 * 2**20


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Base of what messages consist of."""


class Message(Part, frozen=True, tag=True):
    """Base of all messages."""


class Start(Message, frozen=True):
    """First message to an engine: what to load and how. `memory` as cache.memory; None leaves the default."""

    version: int
    model: str
    tokenizer: str
    """The tokenizer.json that the API process reads: the folder may have none of its own."""
    largest_token_id: int
    """That it can give."""
    end_token_ids: list[int]
    """What ends a text by what it says."""
    device: str
    dtype: str
    quantization: str
    deterministic: bool
    threads: int
    max_context: int | None
    max_running: int
    step_tokens: int
    speculation: str
    cache_dtype: str
    page_size: int
    pages: int | None
    memory: float | None
    serve_pooled: bool
    heartbeat_seconds: float
    """Between two Beats."""
    log_level: str
    log_format: str


class Submit(Message, frozen=True):
    """A sequence to generate. `output` holds tokens it has already: a sequence replayed after an engine's death goes on behind them."""

    id: int
    prompt: list[int]
    output: list[int]
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: list[int]
    sampling: Sampling
    priority: int = 0
    """Lower is served first."""
    num_top: int = 0
    """Likeliest tokens to report with each token of the output, and of the prompt where that is scored."""
    score_prompt: bool = False
    grammar: str = ""
    """As llguidance reads it; empty for none."""
    healed: str = ""
    """Text that was cut off the prompt's end, to be generated again before anything else."""
    salt: str = ""
    """Only sequences of the same one share pages."""


class Cancel(Message, frozen=True):
    """Forget this sequence and free its pages; nothing more is said of it."""

    id: int


class Shutdown(Message, frozen=True):
    """Leave, with exit status 0."""


class Loading(Message, frozen=True):
    """What an engine that is not ready yet is doing, in words: `loading weights 40 %`."""

    phase: str


class Ready(Message, frozen=True):
    """The engine is loaded. What a client or an operator may want to know of it."""

    model_type: str
    dtype: str
    device: str
    vocab_size: int
    max_context: int
    end_token_ids: list[int]
    num_parameters: int
    page_size: int
    num_pages: int
    kv_dtype: str
    """What the cache stores keys and values in."""
    kv_bytes_per_token: int
    capacity: int
    """Tokens that one sequence can have at most: the context, or what the cache holds where that is less."""
    quantization: str
    weight_bytes: int
    page_bytes: int
    kernels: str
    """What computes attention, and what products where that is another: kernels of ours (and their width of vectors), or torch's."""
    deterministic: bool
    """Whether what a request gets depends on that request alone, bit for bit."""
    multi_head_bytes_per_token: int
    """What a token's keys and values would take with a head for every query head."""
    sequences: list[tuple[int, int]]
    """(context, how many sequences of that many tokens the cache holds together)"""


class Refused(Message, frozen=True):
    """The engine cannot start. `reason` is for the person who started it; `resource` says that memory is what it lacked."""

    reason: str
    resource: bool = False


class Token(Part, frozen=True):
    """One new token of sequence `id`: its place in the output, its log-probability, and why it is the last one, if it is."""

    id: int
    index: int
    token: int
    logprob: float
    finish: str | None = None
    """length, eos_token (an end token or a stop token id), or None while the sequence goes on."""
    top: list[tuple[int, float]] = []
    """The likeliest tokens and their log-probabilities."""


class PromptScore(Part, frozen=True):
    """Log-probability and rank (from 1) of one prompt token, and the likeliest in its place."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class PromptScores(Message, frozen=True):
    """Scores of the prompt tokens `first`, first + 1, ... of sequence `id`."""

    id: int
    first: int
    scores: list[PromptScore]


class Gauges(Part, frozen=True):
    """The engine's state after a step, and counts since it started."""

    running: int
    waiting: int
    pages_used: int
    preemptions: int
    step_seconds: float
    pages_cached: int = 0
    queried_tokens: int = 0
    """Of all sequences, when they were let in first."""
    hit_tokens: int = 0
    """Those among them that were found computed."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Those among them that came true."""


class Tokens(Message, frozen=True):
    """What one step brought."""

    tokens: list[Token]
    gauges: Gauges


class Started(Message, frozen=True):
    """Sequences that leave the queue for the first time in the step that is computed next: said before it, so that whoever survives it
    knows who was in it.
    """

    ids: list[int]
    cached: list[int]
    """Of each, prompt tokens that are not computed again."""


class Heartbeat(Message, frozen=True):
    """The engine's process runs. `progress` grows with every layer that it computes."""

    progress: int


class Failed(Message, frozen=True):
    """Sequence `id` ended without its answer, through no fault of the others. `refused`: what it asks for cannot be had. `code`: a word
    for programs to read.
    """

    id: int
    reason: str
    refused: bool = False
    code: str = ""


ToEngine = Start | Submit | Cancel | Shutdown
FromEngine = Loading | Ready | Refused | Started | Tokens | PromptScores | Failed | Heartbeat

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
