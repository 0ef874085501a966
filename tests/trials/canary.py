"""Canary: what another client of an attacked server notices: answers of /live and to new grammars,
gaps between tokens, memory, engines replaced.

It runs in a process of its own, so that an attacker's work does not delay its measures. Invariant:
it asks for one stream at a time, always the same, so that every answer must have the same text. It
knows no attacks.
"""

import itertools
import json
import multiprocessing
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.support.processes import Stream, children
from tests.support.report import Check
from tests.support.wire import exchange, http_request

LIVE_SECONDS, GAP_SECONDS, GRAMMAR_SECONDS, MEMORY_BYTES = 0.1, 0.060, 1.0, 512 * 2**20
"""Limits while a server is attacked: an answer of /live; the 99th percentile of gaps, if three
times the quiet one is less; the answer to a new grammar; memory above the quiet server's."""
PROBE_SECONDS, WEIGH_SECONDS, GRAMMAR_PAUSE = 0.05, 0.1, 0.3
KEY, ATTACKERS_KEY = "canary", "attacker"
BEARER = {"authorization": f"Bearer {KEY}"}
BODY = {"prompt": "def f(", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}


@dataclass(slots=True)
class Noticed:
    """What a canary noticed in one span of time. `late`: (time, seconds) of the answers of /live
    above LIVE_SECONDS.
    """

    lives: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    grammars: list[float] = field(default_factory=list)
    """Seconds of each answer of one token bound by a new grammar."""
    memory: list[int] = field(default_factory=list)
    late: list[tuple[float, float]] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    engines: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)

    def row(self) -> tuple[float, float, float, float]:
        """Longest answer of /live, gaps' median and 99th percentile, in seconds; most memory in
        MiB.
        """
        return (
            max(self.lives, default=0.0),
            quantile(self.gaps, 0.5),
            quantile(self.gaps, 0.99),
            max(self.memory, default=0) / 2**20,
        )


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def processes(pid: int) -> tuple[int, int]:
    """Bytes of the API process and all worker processes, without the engine, and the engine's pid
    (0 while there is none). A page that processes share counts once (proportional set size).
    """
    total, engine, remaining = 0, 0, [pid]
    while remaining:
        each = remaining.pop()
        with suppress(OSError):  # It may have ended meanwhile.
            remaining += children(each)
            if b"server.engine.worker" in Path(f"/proc/{each}/cmdline").read_bytes():
                engine = each
                continue
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += next(
                (
                    int(line.split()[1]) * 1024
                    for line in rollup.splitlines()
                    if line.startswith("Pss:")
                ),
                0,
            )
    return total, engine


class Watcher:
    """The threads of the canary's process. `grammars`: whether it asks for new grammars, too."""

    def __init__(self, port: int, pid: int, grammars: bool) -> None:
        self.port, self.pid, self.grammars = port, pid, grammars
        self.noticed = Noticed()
        self.over = threading.Event()

    def take(self) -> Noticed:
        """What was noticed since the last call."""
        found, self.noticed = self.noticed, Noticed()
        return found

    def probe(self) -> None:
        while not self.over.wait(PROBE_SECONDS):
            began, at = time.perf_counter(), time.time()
            try:
                exchange(self.port, http_request("GET", "/live"), 120)
            except (OSError, EOFError) as error:
                self.noticed.errors.append(f"/live: {type(error).__name__}")
            seconds = time.perf_counter() - began
            self.noticed.lives.append(seconds)
            if seconds > LIVE_SECONDS:
                self.noticed.late.append((at, seconds))

    def stream(self) -> None:
        while not self.over.wait(PROBE_SECONDS):
            stream, text, last = Stream(self.port, "/v1/completions", BODY, BEARER), "", None
            try:
                for event in stream.response().events():
                    now = time.perf_counter()
                    if last is not None:
                        self.noticed.gaps.append(now - last)
                    last = now
                    text += (
                        ""
                        if event.data == "[DONE]"
                        else json.loads(event.data or "")["choices"][0]["text"]
                    )
                self.noticed.texts.add(text)
            except (OSError, EOFError, KeyError, json.JSONDecodeError, AssertionError) as error:
                self.noticed.errors.append(f"stream: {type(error).__name__}")
            finally:
                stream.close()

    def compile(self) -> None:
        for number in itertools.count():
            if self.over.wait(GRAMMAR_PAUSE):
                return
            body = {
                "prompt": "a",
                "max_tokens": 1,
                "structured_outputs": {"regex": f"[a-z]{{3}}-{number}"},
            }
            began = time.perf_counter()
            try:
                response, said = exchange(
                    self.port, http_request("POST", "/v1/completions", body, BEARER), 120
                )
                if response.status != 200:
                    self.noticed.errors.append(f"grammar: {said[:200].decode(errors='replace')}")
            except (OSError, EOFError) as error:
                self.noticed.errors.append(f"grammar: {type(error).__name__}")
            self.noticed.grammars.append(time.perf_counter() - began)

    def weigh(self) -> None:
        while not self.over.wait(WEIGH_SECONDS):
            memory, engine = processes(self.pid)
            self.noticed.memory.append(memory)
            if engine:
                self.noticed.engines.add(engine)

    def serve(self, pipe: Connection) -> None:
        for work in (
            self.probe,
            self.stream,
            self.weigh,
            *([self.compile] if self.grammars else []),
        ):
            threading.Thread(target=work, daemon=True).start()
        while pipe.poll(None) and pipe.recv():
            pipe.send(self.take())
        self.over.set()


def _main(port: int, pid: int, grammars: bool, pipe: Connection) -> None:
    Watcher(port, pid, grammars).serve(pipe)


class Canary:
    """The canary's process, of a server at `port` whose API process is `pid`."""

    def __init__(self, port: int, pid: int, grammars: bool = True) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_main, args=(port, pid, grammars, theirs), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        self.take()
        return self

    def __exit__(self, *_: Any) -> None:
        self._pipe.send(False)
        self._process.join(10)
        self._process.kill()

    def take(self) -> Noticed:
        """What was noticed since the last call."""
        self._pipe.send(True)
        found = self._pipe.recv()
        assert isinstance(found, Noticed)
        return found


def checks(what: str, quiet: Noticed, attacked: Noticed) -> list[Check]:
    """The limits that another client is promised while a server is attacked."""
    live = max(attacked.lives, default=0.0)
    gap = quantile(attacked.gaps, 0.99)
    before = max(quiet.memory, default=0)
    most_gap = max(GAP_SECONDS, 3 * quantile(quiet.gaps, 0.99))
    grown = max(attacked.memory, default=0) - before
    texts, grammar = quiet.texts | attacked.texts, max(attacked.grammars, default=0.0)
    return [
        Check(f"{what}: /live within {LIVE_SECONDS} s", live <= LIVE_SECONDS, f"{live:.3f} s"),
        Check(
            f"{what}: gaps' 99th percentile within {most_gap * 1e3:.0f} ms",
            gap <= most_gap,
            f"{gap * 1e3:.0f} ms",
        ),
        Check(
            f"{what}: new grammars within {GRAMMAR_SECONDS:g} s",
            grammar <= GRAMMAR_SECONDS,
            f"{grammar:.2f} s",
        ),
        Check(
            f"{what}: at most {MEMORY_BYTES >> 20} MiB more",
            grown <= MEMORY_BYTES,
            f"{grown / 2**20:.0f} MiB",
        ),
        Check(
            f"{what}: no engine replaced",
            len(quiet.engines | attacked.engines) == 1,
            f"{len(attacked.engines)} engines",
        ),
        Check(f"{what}: the same text in each stream", len(texts) == 1, f"{len(texts)} texts"),
        Check(
            f"{what}: no stream or probe failed",
            not attacked.errors,
            ", ".join(sorted(set(attacked.errors))) or "none",
        ),
    ]
