"""The engine process with faults: server.engine.worker, with a runner, a pipe and grammars that
obey tests.faults.rules.

Nothing of the production engine is replaced, only wrapped: load, the runner's steps, its layers and
logits, what goes into the pipe.
"""

import ctypes
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msgspec import structs

from model.step import StepPlan
from server import protocol
from server.engine import holder, masks, worker
from server.errors import ConstraintFailed
from tests.faults.faulty_server import time_jumps
from tests.faults.rules import Rule, Rules

FOREVER = 10**6
HUGE = 2**30
GARBAGE = b"\xc1 is no byte of msgpack"


class Faults:
    """What the rules of this process do, each by its name."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def die(self, rule: Rule) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self, rule: Rule) -> None:
        time.sleep(FOREVER)

    def hang_with_lock(self, rule: Rule) -> None:
        """As native code that never gives the interpreter back: no other thread of the process runs
        either.
        """
        ctypes.PyDLL(None).sleep(FOREVER)

    def pace(self, rule: Rule) -> None:
        time.sleep(rule.seconds)

    def device(self, rule: Rule) -> None:
        """What torch says when the context of a GPU is beyond use."""
        import torch

        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def oom(self, rule: Rule) -> None:
        """The three ways in which memory is said to be short."""
        import torch

        if rule.error == "gpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if rule.error == "cpu":
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
                "allocate memory: you tried"
            )
        raise MemoryError

    def carry_out(self, rule: Rule) -> None:
        if self.rules.strike(rule):
            getattr(self, rule.do)(rule)

    def loading(self) -> None:
        for rule in self.rules.named("slow_load"):
            if self.rules.strike(rule):
                time.sleep(rule.seconds)
        for rule in self.rules.named("die_loading"):
            if self.rules.strike(rule):
                self.die(rule)


class FaultyRunner:
    """A ModelRunner whose steps meet the rules."""

    BEFORE = ("die", "hang", "hang_with_lock", "pace", "device")

    def __init__(self, runner: Any, scheduler: Any, faults: Faults, tokenizer: Path) -> None:
        from tokenizers import Tokenizer

        self.runner = runner
        self.scheduler = scheduler
        self.faults = faults
        self.plan: Any = None
        codec = Tokenizer.from_file(str(tokenizer))
        self.markers = {
            rule.marker: codec.encode(rule.marker, add_special_tokens=False).ids
            for rule in faults.rules.rules
        }
        runner.decoder = FaultyDecoder(runner.decoder, self)
        self._forward, runner.forward = runner.forward, self._faulty_forward

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.runner, name)
        return partial(self._do, found) if name == "launch" else found

    def run(self, plan: Any) -> Any:
        return self._do(self.runner.run, plan)

    def _do(self, run: Any, plan: Any) -> Any:
        for rule in self.faults.rules.named(*self.BEFORE):
            if self.rows(rule, plan):
                self.faults.carry_out(rule)
        self.plan = self._break_sampling(plan)
        return run(self.plan)

    def _faulty_forward(self, batch: Any, plan: Any) -> Any:
        """Layers that find NaN in their pages, or that run out of memory once keys and values have
        been written.
        """
        for rule in self.faults.rules.named("nan_pages"):
            self._poison(rule)
        states = self._forward(batch, plan)
        for rule in self.faults.rules.named("oom"):
            if self.rows(rule, self.plan):
                self.faults.carry_out(rule)
        return states

    def _poison(self, rule: Rule) -> None:
        for index in self.rows(rule, self.plan):
            if self.faults.rules.strike(rule):
                pages = [page for group in self.plan.rows[index].pages for page in group]
                self.runner.pool.numbers_PN[pages] = float("nan")

    def rows(self, rule: Rule, plan: Any) -> list[int]:
        """The rows of a step that a rule speaks of; none where the step is too small for it."""
        if len(plan.rows) <= rule.rows:
            return []
        return [
            index
            for index, row in enumerate(plan.rows)
            if self._speaks_of(rule, self.scheduler.running[row.sequence])
        ]

    def _speaks_of(self, rule: Rule, sequence: Any) -> bool:
        return len(sequence.output) >= rule.after and contains(
            sequence.prompt, self.markers[rule.marker]
        )

    def _break_sampling(self, plan: Any) -> Any:
        """A row whose draw raises: what forbids its tokens cannot be read."""
        rows, is_broken = list(plan.rows), False
        for rule in self.faults.rules.named("sampling_fails"):
            for index in self.rows(rule, plan):
                if rows[index].sample is not None and self.faults.rules.strike(rule):
                    rows[index] = structs.replace(
                        rows[index],
                        sample=structs.replace(rows[index].sample, forbidden=Unreadable()),
                    )
                    is_broken = True
        return StepPlan(tuple(rows), plan.clear) if is_broken else plan


class Unreadable(Sequence[int]):
    """Has a length, and raises when it is read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        raise ZeroDivisionError("a fault of the suite's, in one row's sampling")


class FaultyDecoder:
    """A decoder whose logits turn to NaN."""

    def __init__(self, decoder: Any, runner: FaultyRunner) -> None:
        self._decoder = decoder
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def logits(self, states: Any) -> Any:
        logits = self._decoder.logits(states)
        runner = self._runner
        drawing = [index for index, row in enumerate(runner.plan.rows) if row.sample is not None]
        for rule in runner.faults.rules.named("nan_logits"):
            for index in runner.rows(rule, runner.plan):
                if (
                    index in drawing
                    and len(logits) == len(drawing)
                    and runner.faults.rules.strike(rule)
                ):
                    logits[drawing.index(index)] = float("nan")
        return logits


class FaultyPipe(Connection):
    """The engine's end of the pipe, which damages the frame after `after` others that bring
    tokens.
    """

    KINDS = ("garbage", "truncated", "truncated_end", "oversized", "swapped", "dropped", "repeated")
    faults: Faults
    frames = 0
    held: bytes | None = None

    def send_bytes(self, buffer: Any, *arguments: Any) -> None:
        message = protocol.decode_from_engine(buffer)
        if not isinstance(message, protocol.Tokens) or not message.tokens:
            super().send_bytes(buffer, *arguments)
            return
        self.frames += 1
        for rule in self.faults.rules.named(*self.KINDS):
            if self.frames > rule.after and self.faults.rules.strike(rule):
                getattr(self, rule.do)(bytes(buffer))
                return
        super().send_bytes(buffer, *arguments)
        if self.held is not None:
            late, self.held = self.held, None
            super().send_bytes(late)

    def garbage(self, frame: bytes) -> None:
        super().send_bytes(GARBAGE)

    def truncated(self, frame: bytes) -> None:
        """Half a frame, and then nothing that could complete it."""
        os.write(self.fileno(), struct.pack("!i", len(frame)) + frame[: len(frame) // 2])
        time.sleep(FOREVER)

    def truncated_end(self, frame: bytes) -> None:
        """Half a frame, and the end."""
        os.write(self.fileno(), struct.pack("!i", len(frame)) + frame[: len(frame) // 2])
        os._exit(0)

    def oversized(self, frame: bytes) -> None:
        os.write(self.fileno(), struct.pack("!i", HUGE) + frame)

    def swapped(self, frame: bytes) -> None:
        self.held = frame

    def dropped(self, frame: bytes) -> None: ...

    def repeated(self, frame: bytes) -> None:
        super().send_bytes(frame)
        super().send_bytes(frame)


class FaultyConstraint:
    """A grammar that breaks down when it is followed."""

    def __init__(self, constraint: Any, faults: Faults, rule: Rule) -> None:
        self._constraint = constraint
        self._faults = faults
        self._rule = rule
        self._broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._constraint, name)

    def advance(self, token: int) -> bool:
        self._broken = self._faults.rules.strike(self._rule)
        answers: bool = self._constraint.advance(token)
        return answers

    def take(self) -> Any:
        if self._broken:
            raise ConstraintFailed("a fault of the suite's, in one row's grammar", refused=False)
        return self._constraint.take()


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(
        tokens[start : start + len(part)] == part for start in range(len(tokens) - len(part) + 1)
    )


def install(faults: Faults) -> None:
    """Puts the wraps where the production engine looks its parts up."""
    load, serve, constraint = worker.load, worker.serve, masks.MaskProcesses.constraint

    def faulty_serve(*arguments: Any) -> None:
        faults.rules.count_engine()
        faults.loading()
        serve(*arguments)

    def faulty_load(start: protocol.Start, report: Any) -> Any:
        core, *others = load(start, report)
        core.runner = FaultyRunner(core.runner, core.scheduler, faults, Path(start.tokenizer))
        markers.extend(
            (rule, core.runner.markers[rule.marker]) for rule in faults.rules.named("grammar_fails")
        )
        return core, *others

    def faulty_constraint(processes: Any, asked: Any) -> Any:
        made: Any = constraint(processes, asked)
        struck = [
            rule for rule, marker in markers if made is not None and contains(asked.prompt, marker)
        ]
        return FaultyConstraint(made, faults, struck[0]) if struck else made

    markers: list[tuple[Rule, list[int]]] = []
    FaultyPipe.faults = faults
    worker.load, worker.serve = faulty_load, faulty_serve  # type: ignore[assignment]
    worker.Connection = holder.Connection = FaultyPipe  # type: ignore[misc, attr-defined]
    masks.MaskProcesses.constraint = faulty_constraint  # type: ignore[method-assign, assignment]


def main() -> None:
    rules = Rules.of_environment()
    for _ in rules.named("time_jumps"):
        time_jumps()
    install(Faults(rules))
    worker.main()


if __name__ == "__main__":
    sys.exit(main())
