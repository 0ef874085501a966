"""Engines without a process, for the Supervisor's `spawn`, and the production application over
them.

Its next token is hash_model's, so `answer` knows the right output of every request through any
number of crashes. It sends messages in callbacks given to `defer`: by default the event loop's next
iteration, or a queue of the test where there is no loop.
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server import protocol
from server.config import ServerSection
from server.generation.engine_client import EngineClient
from server.generation.generation import Generation
from server.http.app import create_app
from server.http.front import FrontDoor
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.http.stream_buffer import Retention, StreamStore
from server.http.stream_journal import StreamJournal
from server.http.streams import StreamPublisher
from server.metrics import Metrics
from server.supervision.crash_policy import Timeouts
from server.supervision.engine import EngineEvent
from server.supervision.supervisor import State, Supervisor
from server.text.codec import TextCodec
from tests.support.hash_model import next_token, oracle
from tests.support.inline_workers import inline_texts

READY = protocol.Ready(
    model_type="hash",
    dtype="float32",
    device="cpu",
    vocab_size=257,
    max_context=64,
    end_token_ids=[0],
    num_parameters=0,
    page_size=8,
    num_pages=32,
    kv_dtype="float32",
    kv_bytes_per_token=64,
    capacity=64,
    quantization="none",
    weight_bytes=0,
    page_bytes=512,
    kernels="reference",
    deterministic=False,
    multi_head_bytes_per_token=256,
    sequences=[(32, 8), (64, 4)],
    digest="0" * 64,
)
KILLED = -9
NAMES = ModelNames(("tiny",))

Defer = Callable[[Callable[[], None]], object]


def on_the_loop(callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(callback)


class FakeEngine:
    """Makes the engines of one Supervisor, one EngineRun after the other, and records what they
    were sent.

    `crash_after`: the n-th engine is killed once it has sent that many tokens (0: before its first
    step with work); engines beyond the list are not killed. `refuse_loading` makes every engine
    send Refused instead of Ready.
    """

    def __init__(
        self,
        ready: protocol.Ready = READY,
        end_rate: float = 0.0,
        crash_after: Sequence[int] = (),
        refuse_loading: str | None = None,
        defer: Defer = on_the_loop,
    ) -> None:
        self.ready = ready
        self.end_rate = end_rate
        self.crash_after = crash_after
        self.refuse_loading = refuse_loading
        self.defer = defer
        self.runs: list[EngineRun] = []
        self.submits: list[protocol.Submit] = []
        self.cancels: list[int] = []
        self.looks: list[protocol.Look] = []

    def spawn(
        self, on_message: Callable[[protocol.FromEngine], None], on_exit: Callable[[int], None]
    ) -> "EngineRun":
        """Spawns an engine. It sends nothing before this has returned."""
        number = len(self.runs)
        crash_after = self.crash_after[number] if number < len(self.crash_after) else None
        self.runs.append(EngineRun(self, crash_after, on_message, on_exit))
        return self.runs[-1]

    def answer(self, submit: protocol.Submit) -> list[int]:
        """The whole output of a submission, including the tokens that it came with."""
        stops = frozenset(submit.stop_token_ids)
        return oracle(
            submit.prompt,
            submit.max_new_tokens,
            submit.min_new_tokens,
            stops,
            _seed(submit),
            self.end_rate,
        )

    @property
    def open(self) -> int:
        """Sequences in the current engine."""
        return len(self.runs[-1].open) if self.runs else 0


class EngineRun:
    """One engine from Ready to its exit: each step generates one token for every open sequence."""

    def __init__(
        self,
        engine: FakeEngine,
        crash_after: int | None,
        on_message: Callable[[protocol.FromEngine], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self.engine = engine
        self.crash_after = crash_after
        self.open: dict[int, protocol.Submit] = {}
        self.cache = FakeCache(engine.ready.num_pages)
        self.ended = False
        self._on_message = on_message
        self._on_exit = on_exit
        self._stepping = False
        self._num_sent = 0
        self._started: list[int] = []
        refusal = engine.refuse_loading
        engine.defer(
            lambda: self._send_up(engine.ready if refusal is None else protocol.Refused(refusal))
        )

    def send(self, message: protocol.ToEngine) -> None:
        """EngineProcess.send, applied at once. Messages to a dead engine are dropped."""
        if self.ended:
            return
        # What cannot cross the pipe must fail here too.
        message = protocol.decode_to_engine(protocol.encode(message))
        if isinstance(message, protocol.Submit):
            self.engine.submits.append(message)
            self.open[message.id] = message
            if message.score_prompt:
                scores = [
                    protocol.PromptScore(token, -1.0, 1, [(token, -1.0)] * message.num_top)
                    for token in message.prompt[1:]
                ]
                self.engine.defer(
                    lambda: self._send_up(protocol.PromptScores(message.id, 1, scores))
                )
            self._started.append(message.id)
            self._step_soon()
        elif isinstance(message, protocol.Cancel):
            self.engine.cancels.append(message.id)
            self.open.pop(message.id, None)
        elif isinstance(message, protocol.Look):
            view = self.cache.answer(message, self.open)
            self.engine.looks.append(message)
            self.engine.defer(lambda: self._send_up(view))
        elif isinstance(message, protocol.Shutdown):
            self._exit(0)

    def kill(self) -> None:
        self._exit(KILLED)

    def _exit(self, status: int) -> None:
        if not self.ended:
            self.ended = True
            self.engine.defer(lambda: self._on_exit(status))

    def _send_up(self, message: protocol.FromEngine) -> None:
        if not self.ended:
            self._on_message(protocol.decode_from_engine(protocol.encode(message)))

    def _step_soon(self) -> None:
        if not self._stepping:
            self._stepping = True
            self.engine.defer(self._step)

    def _step(self) -> None:
        self._stepping = False
        if self.ended or not self.open:
            return
        tokens: list[protocol.Token] = []
        for id, submit in list(self.open.items()):
            if self._num_sent == self.crash_after:
                break
            tokens.append(self._next(id, submit))
            self._num_sent += 1
        started, self._started = self._started, []
        if started:
            self._send_up(protocol.Started(started, [0] * len(started)))
        if tokens:
            gauges = protocol.Gauges(len(self.open), 0, len(self.open), 0, 1e-3)
            self._send_up(protocol.Tokens(tokens, gauges))
        if self._num_sent == self.crash_after:
            self.kill()
        else:
            self._step_soon()

    def _next(self, id: int, submit: protocol.Submit) -> protocol.Token:
        index = len(submit.output)
        may_end = index >= submit.min_new_tokens or 0 not in submit.stop_token_ids
        token = next_token(
            submit.prompt + submit.output, _seed(submit), self.engine.end_rate, may_end
        )
        submit.output.append(token)
        finish = (
            "eos_token"
            if token in submit.stop_token_ids
            else "length"
            if index + 1 == submit.max_new_tokens
            else None
        )
        if finish is not None:
            del self.open[id]
        named = tuple((named, -1.0 - named / 64) for named in submit.sampling.logprob_token_ids)
        return protocol.Token(
            id, index, token, -1.0, finish, named or ((token, -1.0),) * submit.num_top
        )


class FakeCache:
    """The pages of one engine: each open sequence owns one."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._number = 0
        self._owners: dict[int, int] = {}
        self._rows: dict[int, protocol.SequenceRow] | None = None

    def answer(
        self, look: protocol.Look, sequences: dict[int, protocol.Submit]
    ) -> protocol.CacheView:
        before, self._rows = self._rows, {id: _row(submit) for id, submit in sequences.items()}
        self._owners = {id % self._num_pages: id for id in sequences}
        self._number += before != self._rows
        runs = array(
            "q",
            [number for page, id in sorted(self._owners.items()) for number in (page, 1, 2, id, 0)],
        )
        dump = self._dump(self._rows) if look.dump else None
        return protocol.CacheView(
            self._number, self._number, runs.tobytes(), [*self._rows.values()], dump
        )

    def _dump(self, rows: dict[int, protocol.SequenceRow]) -> dict[str, Any]:
        listed = {
            str(id): {
                "running": True,
                "pages": [[id % self._num_pages]],
                "num_computed": row[5],
                "num_output": row[6],
            }
            for id, row in rows.items()
        }
        return {
            "owners": [int(page in self._owners) for page in range(self._num_pages)],
            "cached": [],
            "sequences": listed,
        }


def _row(submit: protocol.Submit) -> protocol.SequenceRow:
    num_prompt, num_output = len(submit.prompt), len(submit.output)
    return (
        submit.id,
        submit.request,
        "running",
        num_prompt,
        0,
        num_prompt + num_output,
        num_output,
        1,
        0,
    )


def _seed(submit: protocol.Submit) -> int:
    """The seed of a sampled request; 0 for a greedy one, whose seed the API picks at random."""
    return submit.sampling.seed if submit.sampling.temperature else 0


@dataclass(frozen=True, slots=True)
class Served:
    """The application that `onehead serve` runs, over a fake engine."""

    engine: FakeEngine
    supervisor: Supervisor
    client: EngineClient
    generation: Generation
    app: FrontDoor
    publisher: StreamPublisher


def serve(
    tokenizer_folder: Path,
    engine: FakeEngine | None = None,
    section: ServerSection | None = None,
    max_open: int = 64,
    names: ModelNames = NAMES,
    journal: StreamJournal | None = None,
) -> Served:
    """Wires up what server.serve does, and starts the engine. It is ready once its deferred
    callbacks have run.
    """
    engine, section = engine or FakeEngine(), section or ServerSection()
    metrics = Metrics()

    def on_state(state: State) -> None:
        if state is State.READY:
            metrics.loaded(engine.ready)
        if state is State.STARTING:
            metrics.engine_restarts.inc()

    def on_event(event: EngineEvent) -> None:
        client.on_engine_event(event)

    supervisor = Supervisor(engine.spawn, on_state, on_event, Timeouts(10.0, 600.0, 60.0))
    client = EngineClient(
        supervisor, metrics, section.model_copy(update={"max_waiting": 0}), max_open
    )
    generation = Generation(client, inline_texts(TextCodec(tokenizer_folder)), section)
    keys = Keys(section.api_keys, section.api_keys_file)
    publisher = StreamPublisher(
        StreamStore(Retention()), section.keep_alive, journal, lambda: generation.ready.digest
    )
    app = create_app(generation, section, keys, names, publisher)
    supervisor.start()
    return Served(engine, supervisor, client, generation, app, publisher)
