"""Messages between the API process and the engine process, and between the engine and the processes
that follow constraints.

Invariant: everything on a pipe is the msgpack encoding of one of these structs; nothing is pickled.
VERSION changes with the format. This module knows nothing of HTTP, text or tensors.
"""

from typing import Any

import msgspec

from model.options import EngineOptions as EngineOptions
from model.step import Sampling as Sampling
from model.step import bitmap as bitmap

VERSION = 20
MAX_FRAME_BYTES = 64 * 2**20
FOLLOW = b"follow"
"""What the engine sends with its request for a process that follows constraints, whose pipe the
message's descriptor is."""
SLOW_MASK_SECONDS = 0.005
"""Processor time from which a mask is slow: a step does not wait for the next one of its
constraint."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the parts of messages."""


class Message(Part, frozen=True, tag=True):
    """Base of all messages."""


class KvEvents(Part, frozen=True):
    """Where the engine publishes KV events, and answers requests for earlier ones (empty: nowhere);
    their topic.
    """

    address: str = ""
    replay: str = ""
    topic: str = ""


class Start(Message, frozen=True):
    """First message to an engine: what to load, and how."""

    version: int
    model: str
    tokenizer: str
    """Path of the tokenizer.json that the API process reads."""
    options: EngineOptions
    heartbeat_seconds: float
    """Interval between two Heartbeats."""
    log_level: str
    log_format: str
    digest: str = ""
    """The digest of the model that must be loaded, where an earlier engine has loaded one; empty
    for any."""
    kv_events: KvEvents = KvEvents()
    forks: bool = False
    """Whether engines are to be forked from the process that loads one, as far as can be told
    without torch."""


class Share(Part, frozen=True):
    """Whose sequence it is, and that client's share of the engine."""

    client: str = ""
    weight: float = 1.0
    """Clients that always have sequences waiting get tokens in proportion to their weights."""
    max_running: int = 0
    """Sequences that the client may have running; 0 for no limit."""
    rank: int = 0
    """Order against the sequences of all clients, before their shares: the lowest is served
    first."""


class Opening(Part, frozen=True):
    """The mark that is generated before a grammar applies: one of these tokens; with `text`, such
    that the output then ends in that text.
    """

    tokens: list[int]
    text: str = ""


class Submit(Message, frozen=True):
    """A sequence to generate. `output` holds the tokens it has already: a sequence replayed after a
    crash continues after them.
    """

    id: int
    prompt: list[int]
    output: list[int]
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: list[int]
    sampling: Sampling
    priority: int = 0
    """Order among the client's own waiting sequences: the lowest is served first."""
    num_top: int = 0
    """Most likely tokens to report with each output token, and with each prompt token if the prompt
    is scored."""
    score_prompt: bool = False
    grammar: str = ""
    """Grammar in llguidance's format; empty for none."""
    opening: Opening | None = None
    """What the grammar's part of the output follows; None: the grammar is that of the whole
    output."""
    healed: str = ""
    """Token healing: text cut off the end of the prompt, which the output must begin with; empty
    for none."""
    salt: str = ""
    """Only sequences with the same salt share pages."""
    share: Share = Share()
    request: str = ""
    """The request's id, as in the header x-request-id."""


class Look(Message, frozen=True):
    """Asks how the KV cache is used. Answered by CacheView between two steps. `dump`: ask for the
    allocator's own lists too.
    """

    dump: bool = False


class Cancel(Message, frozen=True):
    """Ends a sequence and frees its pages; the engine sends no event for it."""

    id: int


class Shutdown(Message, frozen=True):
    """Exit with status 0."""


class Loading(Message, frozen=True):
    """Loading phase of an engine that is not ready yet, such as `loading weights 40 %`."""

    phase: str


STATUS_BYTES = 4
"""Bytes of an engine's exit status as its holder tells it, negative for the number of a signal."""


class Classes(Part, frozen=True):
    """What a model tells apart. `scores`: what makes probabilities of the logits of these labels:
    softmax, sigmoid or none.
    """

    labels: tuple[str, ...]
    scores: str


class Ready(Message, frozen=True):
    """The engine is loaded. The fields describe it to clients and operators."""

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
    """dtype of the KV cache."""
    kv_bytes_per_token: int
    capacity: int
    """The most tokens of one sequence: max_context, or what the KV cache holds if that is less."""
    quantization: str
    """Of the weights: none, a value of engine.quantization, or int4+int8 where they are in both as
    in the file."""
    weight_bytes: int
    page_bytes: int
    kernels: str
    """What computes attention, and matrix products if that differs: our kernels or the
    reference."""
    deterministic: bool
    """Whether the engine is batch-invariant: a request gets the same bits whatever else is
    running."""
    multi_head_bytes_per_token: int
    """KV cache bytes of a token if every query head had its own key/value head."""
    sequences: list[tuple[int, int]]
    """(context length, number of sequences of that length that fit the KV cache at once)"""
    digest: str
    """Of the model: what model/checkpoint/identity.py covers."""
    hardware: str = ""
    """The device by name, with the versions of its driver and libraries; of a CPU the
    instruction set of our kernels."""
    device_memory: tuple[int, int] = (0, 0)
    """Bytes of the device's own memory that are free when the engine is loaded, and all there
    are."""
    block_forms: dict[str, int] = {}
    """Where weights are as in the file: matrices by the format of their blocks."""
    num_graphs: int = 0
    """CUDA graphs of captured steps."""
    vector_size: int = 0
    """Numbers of the vector that is made of a prompt; 0 where tokens are drawn."""
    classes: Classes | None = None
    """What these numbers are logits of; None where the vector is an embedding."""
    pid: int = 0
    """The process id of the engine."""


class Refused(Message, frozen=True):
    """The engine cannot start. `reason` is for the operator; `resource`: for lack of memory or a
    device.
    """

    reason: str
    resource: bool = False


class Token(Part, frozen=True):
    """A new token of sequence `id`, its index in the output and its log-probability."""

    id: int
    index: int
    token: int
    logprob: float
    finish: str | None = None
    """Why this is the last token: length or eos_token (also for a stop token id); None if the
    sequence continues."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log-probabilities."""
    vector: bytes = b""
    """What a model that draws no tokens makes of the prompt, as native float32."""


class PromptScore(Part, frozen=True):
    """Log-probability and rank (from 1) of a prompt token, and the most likely tokens at its
    position.
    """

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
    """State of the engine after a step, and counts since it started."""

    running: int
    waiting: int
    pages_used: int
    preemptions: int
    step_seconds: float
    pages_cached: int = 0
    queried_tokens: int = 0
    """Tokens looked up in the prefix cache, when sequences are first admitted."""
    hit_tokens: int = 0
    loaded_tokens: int = 0
    """Tokens of blocks that were read from the disk."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Tokens(Message, frozen=True):
    """Tokens that a step generated."""

    tokens: list[Token]
    gauges: Gauges


class Started(Message, frozen=True):
    """Sequences admitted for the first time in the next step. Sent before the step, so that a crash
    in it can be attributed to them.
    """

    ids: list[int]
    cached: list[int]
    """For each sequence, the prompt tokens found in the prefix cache."""


class Heartbeat(Message, frozen=True):
    """Sent at intervals while the engine process runs. `progress` grows with every layer computed;
    `memory_used`: bytes of the device's own memory that are taken, by all processes.
    """

    progress: int
    memory_used: int = 0


SequenceRow = tuple[int, str, str, int, int, int, int, int, int]
"""Of an open sequence: id, id of its request, state (waiting, running, or preempted: waiting after
it ran), prompt tokens, those found in the prefix cache, computed tokens, output tokens, pages,
preemptions."""


FREE, CACHED, OWNED, SHARED = range(4)
"""Kinds of pages: those that hold nothing, that are kept as a prefix without an owner, and that one
or several sequences own."""


class CacheView(Message, frozen=True):
    """Answers Look: all of the cache's pages and open sequences."""

    number: int
    """Grows by one with each view that differs from the one before."""
    step: int
    """Steps that the engine has committed."""
    runs: bytes
    """Runs of pages that are not free, each of five native 64-bit integers: the first page, how
    many there are, their kind, their owner's id and the first position in them (-1 and 0 without an
    owner)."""
    sequences: list[SequenceRow]
    dump: dict[str, Any] | None = None


class Failed(Message, frozen=True):
    """Sequence `id` failed; others are not affected. `refused`: the request cannot be satisfied as
    it is. `code` is machine-readable.
    """

    id: int
    reason: str
    refused: bool = False
    code: str = ""


class Begin(Message, frozen=True):
    """To a process that follows constraints: follow a new one, over this output."""

    grammar: str
    healed: str
    output: list[int]
    opening: Opening | None = None


class Advance(Message, frozen=True):
    """To a process that follows a constraint: a token was sampled."""

    token: int


class Guidance(Part, frozen=True):
    """The answer of a constraint: which tokens may follow the output."""

    mask: bytes | None
    """The tokens that may be sampled after the forced ones, as in model.step.Sample.mask; None once
    the constraint allows everything."""
    forced: list[int] = []
    """Tokens that must follow before the next one is sampled; the constraint is already past
    them."""
    is_open: bool = True
    """False: the output has not generated the grammar's opening, so that the constraint has yet to
    begin."""


class Answer(Part, frozen=True):
    """Answers Begin and Advance: guidance for the next token, or why there is none."""

    guidance: Guidance | None
    seconds: float = 0.0
    """Processor time of the mask."""
    failure: str = ""
    refused: bool = False
    """Whether the request is at fault."""


ToEngine = Start | Submit | Look | Cancel | Shutdown
FromEngine = (
    Loading | Ready | Refused | Started | Tokens | PromptScores | Failed | Heartbeat | CacheView
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_mask_request = msgspec.msgpack.Decoder(Begin | Advance).decode
decode_mask_answer = msgspec.msgpack.Decoder(Answer).decode
