"""Scene: a faulty server, clients that talk to it, a nemesis that hurts it, a history of it all,
and the verdict at the end.

A case is a function of a Scene. What holds in every case is checked here: the invariants of
tests.faults.checker, tokens as of an undisturbed server, never two engines, /live always answered,
no page held at the end (I6), the exit status, no traceback in the log.
"""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.checker import verdict
from tests.faults.clients import Ask, Exchange, asks
from tests.faults.history import History
from tests.faults.rules import FOLDER_VARIABLE, Rule, as_json, never_struck
from tests.support.processes import LB_GRACE, ServerProcess, alive, children, forked, wait_until

LIVE_SECONDS = 2.0
WATCH_SECONDS = 0.05
ORACLES = 4
"""Answers that the undisturbed server is asked for at once."""


@dataclass(frozen=True)
class Case:
    """A fault by its number, what becomes of it in a few words, and the function that shows it,
    with its arguments.
    """

    fault: str
    what: str
    script: Callable[..., None]
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.fault}-{self.what.replace(' ', '_')}"


class Undisturbed:
    """The server that nothing happens to: what every request must be answered with."""

    def __init__(self, folder: Path) -> None:
        self.server = ServerProcess(folder)
        self._known: dict[str, tuple[list[int], str]] = {}

    def answer(self, ask: Ask) -> tuple[list[int], str]:
        """Tokens and text."""
        body = Ask(ask.prompt, ask.max_new_tokens, ask.parameters, stream=False).body
        key = json.dumps(body)
        if key not in self._known:
            status, answer = self.server.post("/generate", body)
            assert status == 200, answer
            self._known[key] = (
                [token["id"] for token in answer["details"]["tokens"]],
                answer["generated_text"],
            )
        return self._known[key]


class FaultyServer(ServerProcess):
    """`onehead serve` with rules. Its standard error goes to a file, or to where a case wants
    it.
    """

    def __init__(
        self,
        folder: Path,
        options: tuple[str, ...],
        rules: tuple[Rule, ...],
        files: Path,
        constants: dict[str, float] | None = None,
        port: int = 0,
        stderr: Any = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        files.mkdir(parents=True)
        self.files = files
        self.rules = rules
        self.log_path = files / "stderr"
        launcher = ("tests.faults.faulty_server", as_json(rules), str(files))
        # ServerProcess sets it to 0; a shutdown as users have it is part of the cases.
        grace = () if "--server.lb_grace" in options else ("--server.lb_grace", LB_GRACE)
        with self.log_path.open("w") as log:
            super().__init__(
                folder,
                *grace,
                *options,
                launcher=launcher,
                constants=constants,
                port=port,
                stderr=log if stderr is None else stderr,
                prepare=prepare,
                wait=False,
            )

    def started(self) -> "FaultyServer":
        """Waits until it is ready."""
        self.wait_started()
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def engines(self) -> list[int]:
        """The engine processes that live: one, or what will fork it."""
        return forked(self.holders)

    @property
    def holders(self) -> list[int]:
        """The process that holds the weights, while it lives."""
        return [
            pid
            for pid in children(self.process.pid)
            if alive(pid) and b"faulty_worker" in command_line(pid)
        ]

    @property
    def engine_pid(self) -> int:
        return int(wait_until(lambda: self.engines, "an engine process")[0])

    @property
    def restarts(self) -> int:
        return int(self.metric("onehead_engine_restarts_total"))

    def kill_all(self) -> None:
        """The server, and engines that have outlived it: they are known by the folder they were
        given.
        """
        mark = f"{FOLDER_VARIABLE}={self.files}".encode()
        if self.process.poll() is None:
            self.process.kill()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in environment.read_bytes().split(b"\0"):
                    os.kill(int(environment.parent.name), signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def is_ready(self) -> bool:
        return self.get("/ready")[0] == 200

    def wait_ready(self) -> None:
        wait_until(lambda: self.is_ready, "ready")


def recovery_within(seconds: float) -> dict[str, float]:
    """Constants with which open requests wait this long for an engine that replaces another."""
    policy = "server.supervision.crash_policy"
    return {f"{policy}.MIN_RECOVERY": seconds, f"{policy}.LOADS": 0.0}


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@dataclass
class Watch:
    """What was seen of a server while it was watched."""

    over: threading.Event = field(default_factory=threading.Event)
    problems: list[str] = field(default_factory=list)
    ready: list[tuple[float, bool]] = field(default_factory=list)
    """(when, whether), at each change."""
    slowest: float = 0.0
    """Seconds that /live took to answer, at worst."""
    thread: threading.Thread | None = None

    def not_ready_since(self, moment: float) -> float:
        """Seconds from a moment until /ready said so."""

        def found() -> list[float]:
            return [when for when, ready in self.ready if not ready and when >= moment]

        return float(wait_until(found, "/ready says no")[0]) - moment


class Scene:
    """One case from its servers' start to its verdict."""

    def __init__(
        self, folder: Path, files: Path, history: History, undisturbed: Undisturbed, seed: str
    ) -> None:
        self.folder = folder
        self.files = files
        self.history = history
        self.undisturbed = undisturbed
        self.rng = random.Random(f"{seed}/{history.path.stem}")
        self._prompts = random.Random(seed)
        """The same in every case, so that an undisturbed server answers each request once for all
        of them."""
        self.exchanges: list[Exchange] = []
        self.servers: list[FaultyServer] = []
        self.resources = contextlib.ExitStack()
        """What is closed at the end whatever happens."""
        self.traces = False
        """Whether a traceback in the log is part of the case."""

    @property
    def server(self) -> FaultyServer:
        return self.servers[-1]

    def start(
        self, *options: str, rules: tuple[Rule, ...] = (), wait: bool = True, **more: Any
    ) -> FaultyServer:
        """A server of these options; it is the scene's from now on."""
        self.history.act("start", options=options, rules=json.loads(as_json(rules)))
        files = self.files / f"server-{len(self.servers)}"
        server = FaultyServer(self.folder, options, rules, files, **more)
        self.servers.append(server)
        return server.started() if wait else server

    def ask(self, ask: Ask, **how: Any) -> Exchange:
        exchange = Exchange(self.server.port, ask, self.history, **how)
        self.exchanges.append(exchange)
        return exchange

    def asks(self, count: int, max_new_tokens: int = 60, **same: Any) -> list[Ask]:
        """Requests of all kinds."""
        return asks(self._prompts, count, max_new_tokens, **same)

    def ask_all(self, asks: list[Ask], **how: Any) -> list[Exchange]:
        return [self.ask(ask, **how) for ask in asks]

    def strike(self, pid: int, number: int, what: str) -> float:
        """Sends a signal as an act of the nemesis; when."""
        self.history.act(what, pid=pid, signal=number)
        os.kill(pid, number)
        return time.monotonic()

    def kill_holder(self) -> int:
        """SIGKILL for the process that holds the weights, with which its engine ends."""
        self.server.wait_ready()
        (pid,) = self.server.holders
        self.strike(pid, signal.SIGKILL, "kill holder")
        wait_until(lambda: not alive(pid), "the holder is dead")
        return pid

    def kill_engine(self) -> int:
        """SIGKILL; the pid that it had. Returns when it is dead."""
        pid = self.server.engine_pid
        self.strike(pid, signal.SIGKILL, "kill engine")
        wait_until(lambda: not alive(pid), "the engine is dead")
        return pid

    @contextlib.contextmanager
    def watched(self) -> Iterator[Watch]:
        """Looks at the server all the while: /live is always 200 at once, and there is never a
        second engine.
        """
        watch = Watch()
        watch.thread = threading.Thread(target=self._look, args=(self.server, watch), daemon=True)
        watch.thread.start()
        try:
            yield watch
        finally:
            watch.over.set()
            watch.thread.join()
        assert not watch.problems, watch.problems
        assert watch.slowest < LIVE_SECONDS, f"/live took {watch.slowest:.2f} s"

    def _look(self, server: FaultyServer, watch: Watch) -> None:
        while not watch.over.wait(WATCH_SECONDS):
            try:
                engines = server.engines
                began = time.monotonic()
                live = server.get("/live")[0]
                watch.slowest = max(watch.slowest, time.monotonic() - began)
                ready = server.is_ready
            except (OSError, ValueError) as error:
                live, ready, engines = 0, False, []
                watch.problems.append(f"/live was not answered: {error!r}")
            if live != 200 and not watch.problems:
                watch.problems.append(f"/live was {live}")
            if len(engines) > 1:
                watch.problems.append(f"{len(engines)} engines at once")
            if not watch.ready or watch.ready[-1][1] != ready:
                watch.ready.append((time.monotonic(), ready))
                self.history.add("ready", ready=ready)
            if watch.problems:
                return

    def outcomes(self) -> list[Exchange]:
        """All requests, at their ends."""
        return [exchange.join() for exchange in self.exchanges]

    def all_finished(self) -> None:
        """Every request that was not left by its client got all that it asked for."""
        for exchange in self.outcomes():
            assert exchange.finished or (
                exchange.leave_after is not None and not exchange.resumes
            ), f"request {exchange.number}: {exchange.status} {exchange.error}"

    def idle(self) -> bool:
        return not any(
            self.server.metric(f"onehead_{name}")
            for name in ("kv_pages_used", "requests_running", "requests_waiting")
        )

    def canary(self) -> None:
        """A request that must be answered right, whatever happened before."""
        exchange = self.ask(Ask("a canary after it all", 20)).join()
        assert exchange.finished, f"{exchange.status} {exchange.error}"

    def end(self, number: int = signal.SIGINT, status: int = 0) -> None:
        """Ends the server and checks how it ends: by itself where it is over already."""
        if self.server.process.poll() is None:
            wait_until(self.idle, "no page is held (I6)", 10.0)
        self.ended(self.server.stop(number), status)

    def ended(self, status: int, expected: int) -> None:
        self.history.add("exit", status=status, log=self.server.log[-20_000:])
        assert status == expected, f"exit status {status}: {self.server.log[-2000:]}"

    def judge(self) -> None:
        """The verdict on everything that was recorded."""
        answered = [exchange for exchange in self.outcomes() if exchange.ids]
        with ThreadPoolExecutor(ORACLES) as pool:
            for exchange, (tokens, text) in zip(
                answered, pool.map(self.undisturbed.answer, (e.ask for e in answered)), strict=True
            ):
                self.history.add("oracle", request=exchange.number, tokens=tokens, text=text)
        problems = verdict(self.history.records)
        for server in self.servers:
            problems += [
                f"the rule never struck: {rule}"
                for rule in never_struck(server.rules, server.files)
            ]
            if "Traceback" in server.log and not self.traces:
                problems.append(
                    f"a traceback in the log:\n{server.log[server.log.index('Traceback') :][:3000]}"
                )
        assert not problems, "\n".join(problems)

    def play(self, case: Case) -> None:
        """Runs a case, ends what it left running, and judges; says where the history is if anything
        is wrong.
        """
        try:
            case.script(self, *case.arguments)
            if self.servers and self.server.process.poll() is None:
                self.end()
            self.judge()
        except BaseException as error:
            error.add_note(f"history: {self.history.path}")
            for server in self.servers:
                lines = [line for line in server.log.splitlines() if "onehead.access" not in line]
                error.add_note("\n".join([f"log: {server.log_path}", *lines[-15:]]))
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Whatever is left is killed, stopped processes and orphans too."""
        for server in self.servers:
            server.kill_all()
        self.resources.close()
        self.history.close()
