"""The simulated engine: the real Worker, EngineCore and Scheduler without a process, on a queue in
place of a pipe.

A Script says what goes wrong in the life of one engine: when it exits, hangs or garbles a frame, at
which of its operations (each message received or sent, each plan before and after its computation).
The pipe keeps its order and loses only what the script says; frames in it when the engine dies are
delivered before the exit is known, as in transport.EngineProcess. It knows nothing of clients.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from cache.layout import CacheLayout
from model.step import Row, SampleError, StepPlan, StepResult
from server import protocol
from server.engine.core import EngineCore
from server.engine.masks import MaskProcesses
from server.engine.ngrams import Drafter, NGrams
from server.engine.scheduler import Limits, Scheduler
from server.engine.sequence import Sequence
from server.engine.worker import Worker
from server.errors import ConstraintFailed
from server.protocol import Guidance
from tests.server.engine.test_scheduler import ALL_TOKENS, Forcing
from tests.simulation.clients import Turns
from tests.simulation.model import DRIFT, PagedHash
from tests.support.delayed import DelayedRunner
from tests.support.fake_engine import READY
from tests.support.guesser import Guesser
from tests.support.hash_model import HashModel
from tests.support.immediate import Immediate

if TYPE_CHECKING:
    from tests.simulation.world import World

NEVER = 10**9
KILLED = -9
CAUSES = {
    "nan": SampleError("nan", code="numerical_error"),
    "excluded": SampleError("excluded", refused=True),
}
GARBAGE = (b"\xc1", b"", protocol.encode(protocol.Cancel(1)), b"\x93\xa5Beats\x01")


class Pause(BaseException):
    """The worker would block on a message, or has finished a step."""


class Died(SystemExit):
    """The process ends at this instruction, without running any handler."""


class Hung(BaseException):
    """The process hangs from now on."""


class Crashed(Exception):
    """An unexpected exception in the forward pass."""


@dataclass(slots=True)
class Script:
    """The faults of one engine; the defaults are a healthy engine."""

    load_seconds: float = 0.3
    load_end: str = "ready"
    """ready, refused, die, or hang"""
    kill_at: int = NEVER
    """The operation at which it is killed."""
    kill_rows: int = NEVER
    """A step with all of these sequences kills it."""
    hang_at: int = NEVER
    beats_when_hung: bool = False
    mute_at: int = NEVER
    """The operation after which it sends no heartbeats, though it works on."""
    garbage_at: int = NEVER
    """The frame that is delivered as garbage."""
    left_out: float = 0.0
    duplicated: float = 0.0
    batched: float = 0.0
    lost_submits: float = 0.0
    late: bool = False
    """Whether some frames are delivered after its exit."""
    most_tokens: int = NEVER
    """The most tokens in one plan of several rows that fit into memory."""

    def __str__(self) -> str:
        healthy = Script()
        differs = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(
            f"{name} {value}" for name, value in differs.items() if value != getattr(healthy, name)
        )


ENTERING = "poison: enters"
"""The fault of a request whose grammar kills the process before any step."""


class SimulatedMasks(MaskProcesses):
    """Simulated constraints, by the name of a grammar: they force tokens, or fail in one of four
    ways. An answer may take time.
    """

    seen: Counter[str]

    def __init__(self, world: "World") -> None:
        self.world = world
        self.seen = world.seen

    def constraint(self, submit: Any) -> Any:
        kind, _, at = submit.grammar.partition(":")
        if not kind:
            return None
        if kind == "admission":
            raise Crashed("in admitting one")
        if submit.grammar.startswith(ENTERING):
            self.seen[ENTERING] += 1
            raise Died
        return SlowForcing(self.world) if kind == "force" else Failing(self.world, kind, int(at))

    def collect(self, patience: float) -> None: ...

    def wait(self, pipe: Any) -> None:
        """As if an answer had arrived, once in each wake-up."""
        if pipe.waited:
            raise Pause
        pipe.waited = True
        self.seen["mask: waited for"] += 1


class SlowForcing(Forcing):
    """A grammar that forces tokens; its answers take time, in some histories longer than a
    stall.
    """

    def __init__(self, world: "World") -> None:
        super().__init__()
        self.world = world
        self.at = 0.0

    @property
    def is_pending(self) -> bool:
        return self.world.now < self.at

    def _answer_later(self) -> None:
        self.left = -1
        self.at = self.world.now + self.world.mask_seconds()

    def begin(self, output: list[int]) -> bool:
        answers = super().begin(output)
        self._answer_later()
        return answers

    def advance(self, token: int) -> bool:
        assert not self.is_pending, "a token is sampled without its mask"
        answers = super().advance(token)
        self._answer_later()
        return answers

    def take(self) -> Guidance:
        assert not self.is_pending, "a mask is taken before it is there"
        return super().take()


class Failing(SlowForcing):
    """A grammar that fails at an index of the output."""

    def __init__(self, world: "World", kind: str, at: int) -> None:
        super().__init__(world)
        self.kind = kind
        self.index = at

    def begin(self, output: list[int]) -> bool:
        self.followed = output
        self._answer_later()
        return True

    def advance(self, token: int) -> bool:
        self._answer_later()
        return True

    def take(self) -> Guidance:
        assert not self.is_pending, "a mask is taken before it is there"
        if len(self.followed) >= self.index:
            raise ConstraintFailed("too complex", refused=self.kind == "refuse")
        return Guidance(ALL_TOKENS)


class FaultyRunner(Immediate):
    """A model whose plans fail as their requests and the script of the engine say."""

    def __init__(
        self, engine: "SimulatedEngine", model: PagedHash | HashModel, layout: CacheLayout
    ) -> None:
        self.engine = engine
        self.model = model
        self.layout = layout
        self.progress = 0
        self.poisoned = engine.world.poisoned

    def run(self, plan: StepPlan) -> StepResult:
        self.begin(plan)
        return self.finish(plan)

    def begin(self, plan: StepPlan) -> None:
        """Faults before anything is computed."""
        engine = self.engine
        engine.began.update([row.sequence for row in plan.rows])
        engine.operation("run")
        num_tokens = sum([len(row.tokens) for row in plan.rows])
        if len(plan.rows) > 1 and num_tokens > engine.script.most_tokens:
            engine.world.seen["memory: a step row by row"] += 1
            raise MemoryError("simulated")
        if any(fault == "memory" for _, fault in self._faults(plan).values()):
            raise MemoryError("simulated")

    def _faults(self, plan: StepPlan) -> dict[int, tuple[Row, str]]:
        choices = self.engine.world.choices
        faults: dict[int, tuple[Row, str]] = {}
        for i, row in enumerate(plan.rows):
            choice = choices[row.sequence]
            if (
                choice.fault
                and row.sample is not None
                and 0 <= choice.fails_at - row.sample.index <= row.drafts
            ):
                faults[i] = row, choice.fault
        return faults

    def finish(self, plan: StepPlan) -> StepResult:
        """Computes a step, which may have been launched long ago."""
        engine = self.engine
        self.progress += 1
        faults = self._faults(plan)
        for _, fault in faults.values():
            self._poison(fault)
        self.model.clear(plan.clear)
        for i in self.poisoned.check(plan):
            faults[i] = plan.rows[i], "nan"
        if engine.world.drift and isinstance(self.model, PagedHash):
            self.model.drift = DRIFT * ((engine.number + len(plan.rows)) & 1)
        result = self.model.run(plan)
        if len(plan.rows) >= engine.script.kill_rows:
            engine.world.seen["killed: over several"] += 1
            raise Died
        engine.operation("ran")
        return self._with(faults, result) if faults else result

    def _poison(self, fault: str) -> None:
        """The fault of a request that affects the whole engine."""
        seen = self.engine.world.seen
        if fault.startswith("poison"):
            seen[fault] += 1
            self.engine.poisoned = True
            raise {"poison: kills": Died, "poison: hangs": Hung, "poison: crashes": Crashed}[fault](
                "poison"
            )

    def _with(self, faults: dict[int, tuple[Row, str]], result: StepResult) -> StepResult:
        drawn, accepted = list(result.drawn), dict(result.accepted)
        for i, (row, fault) in faults.items():
            # Wherever in the row it is: its numbers reach the others through masked slots.
            if fault == "nan":
                self.poisoned.spoil(row, self.layout)
            place = (
                0
                if fault == "nan" or row.sample is None
                else self.engine.world.choices[row.sequence].fails_at - row.sample.index
            )
            if fault in CAUSES and place <= len(accepted.get(i, ())):
                drawn[i] = CAUSES[fault]
                accepted[i] = accepted.get(i, ())[:place]
        return replace(result, drawn=tuple(drawn), accepted=accepted)


class Pipe:
    """The engine's end of the pipe: the part of a Connection that Worker uses."""

    def __init__(self, engine: "SimulatedEngine") -> None:
        self.engine = engine
        self.inbox: deque[tuple[float, bytes]] = deque()
        self.said = False
        self.waited = False
        """Whether the worker has waited for a mask since it was woken."""

    def poll(self, timeout: float) -> bool:
        if self.said:  # One step, or one answer, at a time.
            raise Pause
        return bool(self.inbox) and self.inbox[0][0] <= self.engine.world.now

    def recv_bytes(self, most: int) -> bytes:
        if not self.inbox or self.inbox[0][0] > self.engine.world.now:
            raise Pause
        self.engine.operation("receive")
        return self.inbox.popleft()[1]

    def send_bytes(self, frame: bytes) -> None:
        self.said = True
        self.engine.operation("send")
        self.engine.transmit(frame)


class SimulatedEngine:
    """One engine from spawn to exit, as returned by the supervisor's `spawn`."""

    def __init__(
        self,
        world: "World",
        script: Script,
        on_message: Callable[[Any], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self.world = world
        self.script = script
        self.number = len(world.engines)
        self.dead = self.hung = self.poisoned = False
        self.began: set[int] = set()
        """Every sequence of which it has computed anything."""
        self.recalled: set[int] = set()
        """Sequences that it was told to cancel."""
        self.given: set[int] = set()
        """Every sequence that it was sent, perhaps after its death."""
        self.announced: set[int] = set()
        """Sequences that the supervisor knows it was running: a message lost with the engine blames
        no sequence."""
        self.loaded = False
        self.pipe = Pipe(self)
        self.turns = Turns()
        self._on_message = on_message
        self._on_exit = on_exit
        self._deaf = False
        """The supervisor's side has received garbage and reads no more."""
        self._operations = self._frames = 0
        self._last_in = self._last_out = 0.0
        self._in_flight: deque[bytes] = deque()
        self._wake_at = self._busy = 0.0
        scenario = world.scenario
        layout = scenario.layout
        model = world.new_model()
        limits = Limits(
            scenario.pages, layout, scenario.max_context, scenario.max_running, scenario.step_tokens
        )
        drafts = NGrams(self._drafter) if scenario.speculates else None
        scheduler = Scheduler(limits, drafts, world.ledger)
        scheduler.prefixes.adopt()
        world.seen["adopted: full blocks"] += len(scheduler.prefixes.blocks)
        world.seen["adopted: tails"] += len(scheduler.prefixes.tails)
        self.runner = FaultyRunner(self, model, layout)
        self.delayed = DelayedRunner(
            self.runner.run, self.runner.finish, self.runner.begin, world.random
        )
        self.core = EngineCore(scheduler, self.delayed if scenario.overlaps else self.runner)
        if world.sweeping:
            allocate = scheduler.allocator.allocate
            allocator: Any = scheduler.allocator
            allocator.allocate = lambda count: self.operation("allocate") or allocate(count)  # type: ignore[func-returns-value]
        self.worker = Worker(self.pipe, self.core, SimulatedMasks(world))  # type: ignore[arg-type]
        world.at(world.now + script.load_seconds, self._load)

    def _drafter(self, sequence: Sequence) -> Drafter:
        """Drafts from the model itself, some of them wrong: a history is too short for n-grams to
        repeat.
        """
        give = self.world.next_token
        return Guesser(
            sequence.prompt, lambda tokens: give(tokens, self.world.choices[sequence.id].seed)
        )

    # --- the supervisor's side

    def send(self, message: protocol.ToEngine) -> None:
        world = self.world
        world.call("send to the engine")
        if isinstance(message, protocol.Submit):
            self.given.add(message.id)
        if self.dead:
            if isinstance(message, protocol.Cancel):
                world.recall(message.id, self)  # What it had said before is still on its way.
            return
        if (
            self.script.lost_submits
            and isinstance(message, protocol.Submit)
            and world.random() < self.script.lost_submits
        ):
            world.harm("frame: a submission left out")
            return
        world.sent(message, self)
        self._last_in = max(self._last_in, world.now + world.delay())
        self.pipe.inbox.append((self._last_in, protocol.encode(message)))
        if self.loaded:
            self._wake_soon(self._last_in)

    def kill(self) -> None:
        self.world.condemned()
        self.die(KILLED)

    @property
    def quiet(self) -> bool:
        """Whether it is alive and idle."""
        return self.loaded and not (
            self.dead or self.hung or self.pipe.inbox or self.core.scheduler.has_work
        )

    # --- its process

    def _load(self, _: object) -> None:
        if self.dead:
            return
        end = self.script.load_end
        if end == "ready":
            self.loaded = True
            self.transmit(READY_FRAME)
            self._beat(None)
            if self.pipe.inbox:
                self._wake_soon(self.pipe.inbox[-1][0])
        elif end == "refused":
            self.transmit(REFUSED_FRAME)
            self.die(0)
        elif end == "die":
            self.die(1)
        else:
            self.hung = True

    def _beat(self, _: object) -> None:
        script = self.script
        if (
            self.dead
            or (self.hung and not script.beats_when_hung)
            or self._operations >= script.mute_at
        ):
            return
        self.transmit(protocol.encode(protocol.Heartbeat(self.worker.progress())))
        self.world.at(self.world.now + self.world.scenario.heartbeat_seconds, self._beat)

    def _wake_soon(self, time: float) -> None:
        time = max(time, self._busy, self.world.now)
        if not self.world.now <= self._wake_at <= time:
            self._wake_at = time
            self.world.at(time, self._wake, time)

    def _wake(self, time: float) -> None:
        """Runs the worker until it waits for a message or has sent one."""
        if self.dead or self.hung or time != self._wake_at:
            return
        self._wake_at = -1.0
        self.pipe.said = self.pipe.waited = False
        try:
            self.worker.serve()
            self.die(0)
        except Pause:
            self._go_on()
        except Died:
            self.die(KILLED)
        except Crashed:
            self.die(1)
        except Hung:
            self.hung = True

    def _go_on(self) -> None:
        world, inbox = self.world, self.pipe.inbox
        world.stepped(self)
        if self.core.scheduler.has_work:
            self._busy = world.now + world.step_seconds()
            self._wake_soon(self._busy)
        elif inbox:
            self._wake_soon(inbox[0][0])

    def operation(self, kind: str) -> None:
        """Counts an operation, at which something can go wrong."""
        self.world.call(kind, self)
        self._operations += 1
        if self._operations == self.script.kill_at:
            self.world.seen[f"killed: at {kind}"] += 1
            raise Died
        if self._operations == self.script.hang_at:
            self.world.seen[f"hung: at {kind}"] += 1
            self.world.seen[
                "hung: and beats" if self.script.beats_when_hung else "hung: and is silent"
            ] += 1
            raise Hung

    def die(self, status: int) -> None:
        """Ends the process. The exit is reported once everything that it sent has been read."""
        if self.dead:
            return
        self.dead = True
        world = self.world
        world.note_end(self)
        if self.script.late and self._in_flight:
            world.harm("frame: later than the exit")
            self._deaf = True
            for frame in self._in_flight:
                world.at(world.now + 1.0 + world.random(), self._outlive, frame)
        end = world.now if self._deaf else max(self._last_out, world.now)
        world.at(end + 0.001, self._exit, status)

    def _exit(self, status: int) -> None:
        self.world.mourn(self)
        self._on_exit(status)

    # --- its words

    def transmit(self, frame: bytes) -> None:
        """Puts a frame on its way to the supervisor, after those sent before."""
        world, script = self.world, self.script
        self._frames += 1
        if self._frames == script.garbage_at:
            world.harm("frame: garbage")
            frame = (
                GARBAGE[int(world.random() * 4)]
                if world.random() < 0.5
                else frame[: int(world.random() * len(frame))]
            )
        if script.left_out and world.random() < script.left_out:
            world.harm("frame: left out")
            return
        self._put(frame)
        if script.duplicated and world.random() < script.duplicated:
            world.seen["frame: twice"] += 1
            self._put(frame)

    def _put(self, frame: bytes) -> None:
        world, delay = self.world, self.world.delay()
        if self.script.batched and world.random() < self.script.batched:
            world.seen["frame: held back, and more after it"] += 1
            delay += 1.0
        self._last_out = max(self._last_out, world.now + delay)
        self._in_flight.append(frame)
        world.at(self._last_out, self._deliver)

    def _deliver(self, _: object) -> None:
        frame = self._in_flight.popleft()
        if self._deaf:
            return
        try:
            message = protocol.decode_from_engine(frame)
        except msgspec.MsgspecError:
            self._deaf = True
            self.world.seen["transport: an engine killed for garbage"] += 1
            self.world.at(self.world.now + 0.5, lambda _: self.die(KILLED))
            return
        if not self.world.supervisor._kill_reason:
            if isinstance(message, protocol.Started):
                self.announced.update(message.ids)
            elif isinstance(message, protocol.Tokens):
                self.announced.update(token.id for token in message.tokens)
        self._on_message(message)

    def _outlive(self, frame: bytes) -> None:
        """Delivers a frame after the engine's exit."""
        with contextlib.suppress(msgspec.MsgspecError):
            message = protocol.decode_from_engine(frame)
            self.world.seen[f"late: {type(message).__name__}"] += 1
            self._on_message(message)


READY_FRAME = protocol.encode(READY)
REFUSED_FRAME = protocol.encode(protocol.Refused("simulated", resource=True))
