"""The world of a simulation: the clock, the calls that can fail, engine processes and arriving
messages; and the checks over time.

`seen` counts what occurred in a history. A Violation is raised where an invariant does not hold:
READY while nothing progresses (I10), no end although faults have stopped (I8), pages that are
neither free nor owned (I6), two engines at once, an end after an end.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from cache.ledger import PageLedger
from server import protocol
from server.http.stream_buffer import StreamStore
from server.supervision.crash_policy import (
    MAX_BACKOFF_SECONDS,
    MAX_QUARANTINES,
    MAX_UNATTRIBUTED_CRASHES,
    MIN_LOADS,
)
from server.supervision.engine import EngineEvent
from server.supervision.supervisor import LIVE, State, Supervisor
from tests.simulation import model as simulation_model
from tests.simulation.checks import check_ends, check_idle, check_outcome
from tests.simulation.engine import KILLED, Crashed, Died, Hung, Script, SimulatedEngine
from tests.simulation.front import Choice, Request, Violation
from tests.simulation.model import PagedHash, Poisoned
from tests.simulation.plan import END_RATE, PATIENCE, Call, Scenario
from tests.support import hash_model
from tests.support.integrity import integrity

SLACK_SECONDS = 4.0
"""Allowance for messages on their way and for the period of the clock."""
FINAL = (State.STOPPED, State.REFUSED, State.GAVE_UP)
Callback = Callable[[Any], None]


@dataclass(slots=True)
class FailNth:
    """The number of the call that fails, and how it fails."""

    number: int = 0
    how: str = "kill"
    """kill, crash, hang or memory"""
    struck: str = ""
    """The call that failed."""


class World:
    """One history from its first request to an idle server."""

    def __init__(
        self,
        scenario: Scenario,
        windows: bool = False,
        fail_nth: FailNth | None = None,
        record: bool = False,
    ) -> None:
        self.scenario = scenario
        self.random = scenario.random
        self.windows = windows
        self.drift = scenario.drift
        self.record = record
        self.history: list[str] = []
        self.seen: Counter[str] = Counter()
        self.now = 0.0
        self.num_calls = 0
        self.num_steps = 0
        self.harmed = False
        """Whether the pipe or the clock has misbehaved."""
        self.healed = False
        self.num_event_bytes = 0
        self.state = State.STARTING
        self.engines: list[SimulatedEngine] = []
        self.choices: dict[int, Choice] = {}
        self.requests: list[Request] = []
        self.unsettled = 0
        self.to_come = len(scenario.calls)
        self.deaths_in_row = 0
        self.stopped = False
        self.store = StreamStore(scenario.retention, lambda: f"s{len(self.requests)}")
        self.supervisor = Supervisor(self._spawn, self._on_state, self._on_news, PATIENCE)
        self.pages: dict[Any, Any] = {}
        self.poisoned = Poisoned()
        self.ledger: PageLedger | None = PageLedger(
            scenario.pages, scenario.layout, lambda pages: [True] * len(pages)
        )
        self._fail_nth = fail_nth or FailNth()
        self._heap: list[tuple[float, int, Callback, Any]] = []
        self._ticket = 0
        self._last_news = 0.0
        self._steps_left = 0
        self._unmoved = 0.0
        self._moved = (0, 0)

    # --- what the engine and the front ask of it

    def at(self, time: float, callback: Callback, argument: Any = None) -> None:
        """Calls back at a time; calls for the same time are made in the order of asking."""
        self._ticket += 1
        heappush(self._heap, (time, self._ticket, callback, argument))

    def note(self, text: str) -> None:
        if self.record:
            self.history.append(f"{self.now:8.3f}  {text}")

    def harm(self, what: str) -> None:
        """Notes a fault that no real pipe has; more outcomes are excused afterwards."""
        self.harmed = True
        self.seen[what] += 1
        self.note(what)

    def delay(self) -> float:
        return self.scenario.lag * self.random() ** 2

    def step_seconds(self) -> float:
        return self.scenario.step_seconds * (0.5 + self.random())

    def mask_seconds(self) -> float:
        """How long a constraint takes to answer."""
        return (
            self.scenario.mask_seconds * self.random() ** 2 if self.scenario.mask_seconds else 0.0
        )

    def new_model(self) -> Any:
        """A model whose pages hold what the engine before has left in them, where engines share
        memory; no step of theirs is in flight then.
        """
        scenario = self.scenario
        if scenario.overlaps:
            self.pages, self.poisoned, self.ledger = {}, Poisoned(), None
        if not self.windows:
            return PagedHash(scenario.layout.page_size, END_RATE, self._states, self.pages)
        self.seen["path: layers with windows"] += 1
        model = hash_model.HashModel(scenario.layout, END_RATE)
        model.slots = self.pages
        return model

    def next_token(self, tokens: list[int], seed: int) -> int:
        """The token that the model generates after these."""
        give = hash_model.next_token if self.windows else simulation_model.next_token
        return give(tokens, seed, END_RATE, True)

    def _states(self, id: int) -> list[int]:
        return self.choices[id].states

    def heard(self) -> None:
        """Notes that a request was affected by a fault."""
        self._last_news = self.now

    def call(self, kind: str, engine: SimulatedEngine | None = None) -> None:
        """Counts one of the calls that can fail, and fails it if it is its turn."""
        self.num_calls += 1
        if self.num_calls != self._fail_nth.number:
            return
        how = self._fail_nth.how
        self._fail_nth.struck = kind
        self.note(f"call {self.num_calls}, {kind}, fails: {how}")
        if kind == "spawn":
            self.harmed = True
            raise OSError(11, "simulated")
        if engine is None:
            self.engines[-1].die(1)  # The pipe is broken.
        elif how == "memory" and kind == "run":
            raise MemoryError("simulated")
        else:
            raise {"kill": Died, "hang": Hung}.get(how, Crashed)("the call that fails")

    def stepped(self, engine: SimulatedEngine) -> None:
        """Checks the pages of an engine after each of its operations."""
        self.num_steps += 1
        scheduler = engine.core.scheduler
        allocator = scheduler.allocator
        engine.turns.check(scheduler)
        problems = integrity(scheduler)
        if problems or allocator.num_available + allocator.num_owned != self.scenario.pages:
            raise Violation(f"pages: {problems}")
        if self.healed:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise Violation("the engine works for longer than all there is can take")

    def note_end(self, engine: SimulatedEngine) -> None:
        """Counts what occurred in the life of an engine that dies now."""
        scheduler = engine.core.scheduler
        if scheduler.num_preemptions:
            self.seen["path: preempted"] += scheduler.num_preemptions
            self.seen["path: preempted for another client"] += any(
                s.payer not in (None, s.account) for s in scheduler.waiting.values()
            )
        if scheduler.num_hit_tokens:
            self.seen["path: pages shared"] += 1
        self.seen["path: two steps in flight"] += engine.delayed.most_in_flight > 1
        if scheduler.num_drafted_tokens:
            self.seen["path: a guess came true"] += scheduler.num_accepted_tokens > 0
            self.seen["path: a guess was wrong"] += (
                scheduler.num_accepted_tokens < scheduler.num_drafted_tokens
            )
        waiting = {id for id, sequence in scheduler.waiting.items() if not sequence.payer}
        # Those too that have ended there, until that is known here.
        began = sorted(
            id
            for id in engine.began - waiting
            if id in scheduler.running or id in scheduler.waiting or id not in engine.recalled
        )
        self.note(f"engine {engine.number} dies; it runs {began}")

    def sent(self, message: protocol.ToEngine, engine: SimulatedEngine) -> None:
        """Counts what the supervisor sends to an engine."""
        if isinstance(message, protocol.Submit):
            if self.supervisor._isolated is not None:
                self.seen["path: a suspect alone"] += 1
            if message.id in engine.recalled:
                self.seen["path: recalled, and sent again"] += 1
                engine.recalled.remove(message.id)
            if message.output:
                self.seen["path: replayed after its tokens"] += 1
        elif isinstance(message, protocol.Cancel):
            self.recall(message.id, engine)

    def recall(self, id: int, engine: SimulatedEngine) -> None:
        engine.recalled.add(id)
        engine.announced.discard(id)
        self.choices[id].recalled = True

    def condemned(self) -> None:
        """Counts the reason for which the supervisor kills an engine."""
        self.seen["path: killed, it " + " ".join(self.supervisor._kill_reason.split()[:3])] += 1

    def mourn(self, engine: SimulatedEngine) -> None:
        """Notes which sequences a dead engine had, before the supervisor learns of its exit."""
        had = [
            self.choices[id] for id in engine.given - engine.recalled if not self.choices[id].over
        ]
        for choice in [choice for choice in had if choice.id in engine.announced] or had:
            choice.deaths.append(len(had))
        self._last_news = self.now
        if self.supervisor.state in LIVE and engine.loaded:
            self._die_in_row()

    def _die_in_row(self) -> None:
        self.deaths_in_row += 1
        if self.deaths_in_row > MAX_UNATTRIBUTED_CRASHES + 2 * MAX_QUARANTINES + len(self.choices):
            raise Violation(f"{self.deaths_in_row} deaths without a token, and no end")

    # --- what the supervisor is given

    def _spawn(
        self, on_message: Callable[[Any], None], on_exit: Callable[[int], None]
    ) -> SimulatedEngine:
        if self.engines and not self.engines[-1].dead:
            raise Violation("two engines live")
        try:
            self.call("spawn")
            if not self.healed and self.scenario.spawn_fails(len(self.engines)):
                raise OSError(11, "simulated")
        except OSError:
            self.seen["spawn: failed"] += 1
            self._last_news = self.now
            raise
        script = Script() if self.healed else self.scenario.script(len(self.engines))
        self.engines.append(SimulatedEngine(self, script, on_message, on_exit))
        self.note(f"engine {len(self.engines) - 1} is spawned: {script}")
        if script.load_end != "ready":
            self.seen[f"load: {script.load_end}"] += 1
        elif script.load_seconds > 3.0:
            self.seen["load: slow"] += 1
        return self.engines[-1]

    def _on_state(self, state: State) -> None:
        self.note(f"state {state.value} {self.supervisor.reason}")
        if self.state in FINAL:
            raise Violation(f"{state} after {self.state}, which is final")
        if state in (State.GAVE_UP, State.REFUSED):
            self._check_giving_up(state)
        self._last_news = self.now
        self.state = state

    def _check_giving_up(self, state: State) -> None:
        """After enough deaths, or after failed loads for as long as requests wait; a first engine
        that is refused is final.
        """
        policy = self.supervisor.crash_policy
        never_ready = self.supervisor.ready is None
        refused_first = never_ready and state is State.REFUSED
        loads = policy.failed_loads >= MIN_LOADS and (
            never_ready or self.supervisor.recovery_overdue
        )
        died = (
            self.deaths_in_row >= MAX_UNATTRIBUTED_CRASHES
            or policy.num_quarantined >= MAX_QUARANTINES
        )
        if not (refused_first or loads or (died and state is State.GAVE_UP)):
            raise Violation(
                f"given up after {self.deaths_in_row} deaths and {policy.failed_loads} failed loads"
            )
        self.seen["path: given up"] += 1
        self.seen["path: given up as it cannot be loaded"] += loads and not never_ready

    def _on_news(self, news: EngineEvent) -> None:
        if type(news) is protocol.Tokens and news.gauges.pages_used > self.scenario.pages:
            raise Violation(f"{news.gauges.pages_used} pages are used, of {self.scenario.pages}")

    # --- the clock

    def _tick(self, _: object) -> None:
        supervisor, elapsed = self.supervisor, self.scenario.tick_seconds
        if "jump" in self.scenario.kinds and not self.healed and self.random() < 0.15:
            self.harm("clock: a jump")
            elapsed = 1.5 * PATIENCE.stall * self.random() ** 2
        lost = supervisor.recovery_overdue
        supervisor.tick(elapsed)
        self.store.sweep(self.now)
        if supervisor.recovery_overdue:
            self.seen["path: lost"] += not lost
            if supervisor.open:
                raise Violation(
                    f"the engine has been away for long, and {len(supervisor.open)} sequences "
                    "still wait for it"
                )
        self._check_progress(elapsed)
        self.at(self.now + self.scenario.tick_seconds, self._tick)

    def _check_progress(self, elapsed: float) -> None:
        """If there is work and nothing progresses, the state says so in time (I10); once faults are
        over, there is progress (I8).
        """
        supervisor = self.supervisor
        if supervisor.state is State.READY and supervisor.open:
            engine = self.engines[-1]
            moved = engine.number, engine.runner.progress
            self._unmoved = 0.0 if moved != self._moved else self._unmoved + elapsed
            self._moved = moved
            if self._unmoved >= PATIENCE.stall + SLACK_SECONDS + self.scenario.mask_seconds:
                raise Violation(
                    f"READY with {len(supervisor.open)} open, and nothing has moved for "
                    f"{self._unmoved:.1f} s"
                )
        else:
            self._unmoved = 0.0
        if (
            self.healed
            and self.unsettled
            and self.now - self._last_news > PATIENCE.start + MAX_BACKOFF_SECONDS + SLACK_SECONDS
        ):
            raise Violation(
                f"{self.unsettled} requests are open, and nothing has come for "
                f"{self.now - self._last_news:.1f} s"
            )

    # --- the scenario

    def _arrive(self, call: Call) -> None:
        self.to_come -= 1
        if self.supervisor.recovery_overdue:
            self.seen["path: refused while lost"] += 1
            return
        request = Request(self, call.choices, call.resumable)
        request.submit()
        self.note(
            f"a request: sequences {[choice.id for choice in call.choices]}, prompt "
            f"{call.choices[0].prompt}"
        )
        if call.resumable:
            request.follow()
        for delay, what, argument in call.doings:
            self.at(self.now + delay, getattr(request, what), argument)

    def _break(self, _: object) -> None:
        """A fault from outside, at this time."""
        if self.healed:
            return
        kinds = self.scenario.kinds
        engine = self.engines[-1] if self.engines else None
        if "stop" in kinds and not self.stopped:
            self.stop()
        elif engine is not None and not engine.dead and ("kill" in kinds or "kill twice" in kinds):
            self.seen[
                "killed: while loading" if not engine.loaded else "killed: between two operations"
            ] += 1
            engine.die(KILLED)
            if "kill twice" in kinds:
                self.seen["killed: twice"] += 1
                self.at(self.now + 1.5 * self.random(), self._kill)

    def _kill(self, _: object) -> None:
        if not self.healed:
            self.engines[-1].die(KILLED)

    def stop(self) -> None:
        """The end of SIGTERM's drain: an engine that does not exit is killed."""
        self.stopped = True
        self.seen["path: stopped"] += 1
        self.supervisor.stop()
        self.supervisor.stop()
        self.at(self.now + 5.0, lambda _: self.engines[-1].die(KILLED))

    def _heal(self, _: object = None) -> None:
        """Stops new faults; from now on the history must end within a bound of steps."""
        if self.healed:
            return
        self.healed = True
        self.note("no more faults")
        self._last_news = self.now
        for engine in self.engines[-1:]:
            if not engine.hung:
                engine.script = Script(load_end=engine.script.load_end)
        most = sum(
            len(choice.prompt) + choice.max_new + 4
            for call in self.scenario.calls
            for choice in call.choices
        )
        self._steps_left = 50 + most * (
            MAX_UNATTRIBUTED_CRASHES + 2 * MAX_QUARANTINES + 2 * self.num_choices
        )

    @property
    def short_of_memory(self) -> bool:
        """Whether the events of all streams ever exceeded the store's bound."""
        return self.num_event_bytes > self.scenario.retention.total_bytes

    @property
    def sweeping(self) -> bool:
        """Whether this world makes one call fail."""
        return self._fail_nth.number > 0

    @property
    def struck(self) -> str:
        """The call that was made to fail."""
        return self._fail_nth.struck

    @property
    def may_lack_memory(self) -> bool:
        """Whether a single row may have been out of memory."""
        return self._fail_nth.how == "memory"

    @property
    def num_choices(self) -> int:
        return sum(len(call.choices) for call in self.scenario.calls)

    def describe(self) -> list[str]:
        """The scenario, in words."""
        scenario = self.scenario
        lines = [
            f"faults: {sorted(scenario.kinds)}; {scenario.pages} pages of "
            f"{scenario.layout.page_size}; drift {scenario.drift}"
        ]
        for call in scenario.calls:
            lines.append(f"at {call.time:.3f}, resumable {call.resumable}, then {call.doings}:")
            for choice in call.choices:
                asked = (
                    f"{len(choice.prompt)} + {choice.max_new} tokens, stops "
                    f"{set(choice.stops)}, grammar {choice.grammar!r}"
                )
                lines.append(
                    f"    {asked}, fault {choice.fault!r} at {choice.fails_at}, scores "
                    f"{choice.scores}"
                )
        return lines

    def run(self) -> None:
        """Runs the history to its end."""
        scenario, heap = self.scenario, self._heap
        for call in scenario.calls:
            self.at(call.time, self._arrive, call)
        for time in scenario.faults_at:
            self.at(time, self._break)
        self.at(max(scenario.heals_at, max(call.time for call in scenario.calls) + 2.0), self._heal)
        self.at(scenario.tick_seconds, self._tick)
        try:
            self.supervisor.start()
        except OSError:
            return  # The server does not start at all.
        while self.unsettled or self.to_come:
            self.now, _, callback, argument = heappop(heap)
            callback(argument)
        self._heal()
        check_idle(self, heap)
        for request in self.requests:
            check_outcome(self, request)
        check_ends(self)
