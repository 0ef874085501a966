"""The scenario of a seed: the limits of a small server, a few requests, the actions of their
clients, and up to three kinds of fault.

All randomness in making a scenario is here; `script` makes that of the next engine. This module
does not run anything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from cache.layout import CacheLayout
from server.http.stream_buffer import Retention
from server.supervision.crash_policy import MAX_QUARANTINES, Timeouts
from tests.simulation.engine import ENTERING, Script
from tests.simulation.front import Choice

Random = Callable[[], float]
PATIENCE = Timeouts(stall=4.0, start=12.0, recovery=6.0)
END_RATE = 0.08
MAX_CONTEXT = 24
WINDOWS = (None, 3, 3)
SPREADS = (0.3, 1.0, 5.0, 11.0)
"""Seconds within which all requests of a scenario arrive."""

ENGINE_FAULTS = """
kill, kill twice, kill at, kill at, hang at, hang at, mute, slow load, load hangs, load dies,
spawn, refused, memory, garbage,
left out, left out, duplicated, batched, late, lost submits, suspects, suspects
"""
WORLD_FAULTS = "jump, stop, pause"
REQUEST_FAULTS = """
nan, nan, excluded, memory, grammar, refuse, admission, poison: kills, poison: enters,
poison: hangs, poison: crashes
"""


def _listed(text: str) -> tuple[str, ...]:
    return tuple(" ".join(text.split()).split(", "))


KINDS = (
    _listed(ENGINE_FAULTS)
    + _listed(WORLD_FAULTS)
    + tuple(f"request {name}" for name in _listed(REQUEST_FAULTS))
)
GRAMMARS = {"grammar", "refuse", "admission", ENTERING}


@lru_cache
def layout(page_size: int, windows: bool) -> CacheLayout:
    return (
        CacheLayout.of(len(WINDOWS), WINDOWS, page_size)
        if windows
        else CacheLayout.of(1, (), page_size)
    )


@dataclass(slots=True)
class Call:
    """A request: when it arrives, its parameters, and what its client does, as (seconds after
    arrival, action, argument).
    """

    time: float
    choices: list[Choice]
    resumable: bool
    doings: list[tuple[float, str, object]] = field(default_factory=list)


@dataclass(slots=True)
class Scenario:
    """The scenario of one seed."""

    random: Random
    layout: CacheLayout
    pages: int
    max_running: int
    step_tokens: int
    kinds: tuple[str, ...]
    calls: list[Call]
    retention: Retention
    lag: float
    """The longest delay of a message, in seconds."""
    step_seconds: float
    reading_seconds: float
    drift: bool = False
    mask_seconds: float = 0.0
    """The longest that a constraint takes to answer."""
    speculates: bool = False
    overlaps: bool = False
    heals_at: float = 12.0
    """The time after which no new fault occurs."""
    max_context: int = MAX_CONTEXT
    heartbeat_seconds: float = 0.9
    tick_seconds: float = 0.7
    faults_at: list[float] = field(default_factory=list)
    """Times of the faults outside engines."""

    def script(self, number: int) -> Script:
        """The faults of the next engine."""
        random = self.random
        script = Script(load_seconds=0.1 + random())
        for kind in self.kinds:
            if kind in SCRIPTS and random() < (0.9 if kind == "suspects" else 0.6):
                SCRIPTS[kind](script, random)
        if script.load_end == "refused" and number == 0 and random() < 0.9:
            script.load_end = "ready"  # At the start it is final, and seldom of interest.
        return script

    @property
    def only_requests_fail(self) -> bool:
        """Whether only requests are faulty, and too few of them to make the supervisor give up."""
        poisons = sum(
            choice.fault.startswith("poison") for call in self.calls for choice in call.choices
        )
        return poisons < MAX_QUARANTINES and all(kind.startswith("request") for kind in self.kinds)

    def spawn_fails(self, number: int) -> bool:
        """Whether the next engine cannot be spawned; the first always can, as there is no server
        without it.
        """
        return "spawn" in self.kinds and self.random() < (0.5 if number else 0.05)


def _kill_at(script: Script, random: Random) -> None:
    script.kill_at = 1 + int(random() ** 2 * 60)


def _hang_at(script: Script, random: Random) -> None:
    script.hang_at = 1 + int(random() ** 2 * 60)
    script.beats_when_hung = random() < 0.5


def _mute(script: Script, random: Random) -> None:
    script.mute_at = int(random() * 30)


def _slow_load(script: Script, random: Random) -> None:
    script.load_seconds = 3.0 + 7.0 * random()


def _load_end(end: str) -> Callable[[Script, Random], None]:
    def change(script: Script, random: Random) -> None:
        script.load_end = end

    return change


def _memory(script: Script, random: Random) -> None:
    script.most_tokens = 1 + int(random() * 5)


def _garbage(script: Script, random: Random) -> None:
    script.garbage_at = 1 + int(random() ** 2 * 40)


def _left_out(script: Script, random: Random) -> None:
    script.left_out = 0.15


def _duplicated(script: Script, random: Random) -> None:
    script.duplicated = 0.3


def _batched(script: Script, random: Random) -> None:
    script.batched = 0.1


def _late(script: Script, random: Random) -> None:
    script.late = True
    script.batched = 0.1
    if random() < 0.7:
        _kill_at(script, random)


def _lost_submits(script: Script, random: Random) -> None:
    script.lost_submits = 0.3


def _suspects(script: Script, random: Random) -> None:
    script.kill_rows = 2


SCRIPTS: dict[str, Callable[[Script, Random], None]] = {
    "kill at": _kill_at,
    "hang at": _hang_at,
    "mute": _mute,
    "slow load": _slow_load,
    "load hangs": _load_end("hang"),
    "load dies": _load_end("die"),
    "refused": _load_end("refused"),
    "memory": _memory,
    "garbage": _garbage,
    "left out": _left_out,
    "duplicated": _duplicated,
    "batched": _batched,
    "late": _late,
    "lost submits": _lost_submits,
    "suspects": _suspects,
}


def plan(random: Random, windows: bool) -> Scenario:
    """The scenario from a source of random numbers."""
    kinds = tuple(
        KINDS[int(random() * len(KINDS))]
        for _ in range(1 + int(random() * 3) if random() < 0.9 else 0)
    )
    page_size = 2 + int(random() * 3)
    the_layout = layout(page_size, windows)
    max_running = 1 + int(random() * 4)
    step_tokens = max_running + int(random() * 8)
    calls = _calls(random, kinds)
    longest = max(len(choice.prompt) + choice.max_new for call in calls for choice in call.choices)
    scenario = Scenario(
        random=random,
        layout=the_layout,
        pages=the_layout.most_pages(longest, step_tokens) + int(random() ** 3 * 8),
        max_running=max_running,
        step_tokens=step_tokens,
        kinds=kinds,
        calls=calls,
        retention=_retention(random),
        lag=0.02 if random() < 0.5 else 0.4,
        step_seconds=0.1 + 0.3 * random(),
        reading_seconds=0.01 if random() < 0.7 else 0.8,
        drift=not windows and random() < 0.3,
    )
    scenario.faults_at = [8.0 * random() for _ in range(1 + int(random() * 2))]
    if scenario.drift:
        for call in calls:
            for choice in call.choices:
                choice.grammar = "" if choice.grammar == "force" else choice.grammar
    return scenario


def _retention(random: Random) -> Retention:
    small = random() < 0.3
    return Retention(
        seconds=2.0 + 8.0 * random(),
        stream_bytes=250 if small else 4000,
        total_bytes=600 if random() < 0.3 else 10_000,
        detach_seconds=1.0 + 4.0 * random(),
        max_detached=1 + int(random() * 3),
    )


def _calls(random: Random, kinds: tuple[str, ...]) -> list[Call]:
    calls: list[Call] = []
    late = 70.0 if "pause" in kinds else 0.0
    spread = SPREADS[int(random() * len(SPREADS))]
    priorities = random() < 0.3
    for number in range(2 + int(random() * 3)):
        common = (
            calls[int(random() * len(calls))].choices[0].prompt if calls and random() < 0.4 else []
        )
        choices = _choices(random, priorities, common)
        call = Call(
            spread * random() + (late if number and random() < 0.5 else 0.0),
            choices,
            random() < 0.5,
        )
        call.doings = _doings(random, call.resumable)
        calls.append(call)
    for kind in kinds:
        if kind.startswith("request "):
            for _ in range(1 + int(random() ** 3 * 4)):
                choices = calls[int(random() * len(calls))].choices
                _mark(choices[int(random() * len(choices))], kind.removeprefix("request "), random)
    return calls


def _choices(random: Random, priorities: bool, common: list[int]) -> list[Choice]:
    """The choices of a request, whose prompt may share a prefix with another."""
    prompt = [int(random() * 64) for _ in range(1 + int(random() ** 2 * 12))]
    prompt = (common[: int(random() * 13)] + prompt)[:12]
    max_new = 1 + int(random() ** 2 * 9)
    count = 1 if random() < 0.7 else 2 + int(random() * 2)
    choices = [Choice(prompt, max_new, int(random() * 10**6)) for _ in range(count)]
    ends, priority, extra = random() < 0.7, int(random() * 3) - 1 if priorities else 0, random()
    for choice in choices:
        choice.stops = frozenset({0}) if ends else frozenset()
        choice.min_new = 2 if ends and max_new > 2 and extra < 0.3 else 0
        choice.priority = priority
        choice.scores = 0.3 < extra < 0.45
        choice.grammar = "force" if extra > 0.85 else ""
    return choices


def _mark(choice: Choice, fault: str, random: Random) -> None:
    choice.fault, choice.fails_at = (
        fault,
        0 if fault == ENTERING else int(random() * choice.max_new),
    )
    if fault in GRAMMARS:  # A grammar decides where its output ends.
        choice.grammar, choice.min_new = f"{fault}:{choice.fails_at + 1}", 0
    else:
        choice.grammar = ""


def _doings(random: Random, resumable: bool) -> list[tuple[float, str, object]]:
    if not resumable:
        return [(4.0 * random(), "cancel", None)] if random() < 0.15 else []
    doings: list[tuple[float, str, object]] = []
    time = 0.0
    for _ in range(int(random() * 4)):
        time += 2.0 * random()
        what = random()
        if what < 0.4:
            doings.append((time, "detach", None))
            time += 3.0 * random()
            doings.append((time, "resume", random() < 0.2))
        elif what < 0.7:
            doings.append((time, "resume", random() < 0.3))
        elif what < 0.8:
            doings.append((time, "detach", None))
        elif what < 0.9:
            doings.append((time, "follow", 3 + int(random() * 20)))
        else:
            doings.append((time, "delete", None))
    return doings


def standard(random: Random) -> Scenario:
    """The standard history: no faults, a little of everything. Each of its calls is made to fail in
    turn.
    """
    three = [
        Choice([5, 6, 7, 8, 9], 3, seed, grammar="force" if seed == 2 else "") for seed in range(3)
    ]
    calls = [
        Call(0.2, three, True, [(1.0, "detach", None), (2.0, "resume", False)]),
        Call(0.3, [Choice([9] * 11, 6, 3, scores=True)], True, [(0.5, "resume", True)]),
        Call(0.4, [Choice([4, 3], 8, 4, priority=-1)], False),
        Call(1.2, [Choice([4, 3, 2], 8, 5)], False, [(1.0, "cancel", None)]),
    ]
    return Scenario(
        random=random,
        layout=layout(3, False),
        pages=7,
        max_running=3,
        step_tokens=6,
        kinds=(),
        calls=calls,
        retention=Retention(stream_bytes=4000, total_bytes=10_000, detach_seconds=20.0),
        lag=0.2,
        step_seconds=0.2,
        reading_seconds=0.01,
    )
