"""Mutants: bugs planted into the real classes, one at a time, each of which the simulation must
find.

A mutant is one edit of the source of one function. `caught` returns after how many histories it was
found, and as what; a history that also fails without the mutant does not count.

    python -m tests.simulation.mutants [NAME...]   a table of these mutants, or of all
"""

import inspect
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from rich import box
from rich.console import Console
from rich.table import Table

from cache.pages import PageAllocator
from cache.prefix import PrefixCache
from cache.table import PageTable
from model.step import Row
from server.engine import core, fair_shares
from server.engine.core import EngineCore
from server.engine.decoding import Decoding
from server.engine.fair_shares import FairShares
from server.engine.prefix_reuse import PrefixReuse
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence
from server.engine.worker import Worker
from server.http.stream_buffer import StreamBuffer, StreamStore
from server.supervision.crash_policy import CrashPolicy
from server.supervision.journal import OpenSequence
from server.supervision.supervisor import Supervisor
from tests.simulation import simulation

MOST_SEEDS = 10_000
DEADLY = "sequence.deliver(token)"


@dataclass(frozen=True, slots=True)
class Mutant:
    """In the source of `owner.name`, the text `old`, which occurs once, becomes `new`."""

    what: str
    owner: Any
    name: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        original: Any = inspect.getattr_static(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(original))
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.what}: {self.owner.__name__}.{self.name} has {source.count(self.old)} "
                f"times {self.old!r}"
            )
        namespace = dict(original.__globals__)
        exec(source.replace(self.old, self.new), namespace)  # noqa: S102  (our own source, with a bug)
        # Kept in the module's own globals, so that what it calls is what everybody calls.
        changed = type(original)(
            namespace[self.name].__code__, original.__globals__, self.name, original.__defaults__
        )
        changed.__kwdefaults__ = original.__kwdefaults__
        with mock.patch.object(self.owner, self.name, changed):
            yield


MUTANTS = (
    # --- lost, repeated and crossed tokens
    Mutant("a lost token", Supervisor, "_on_token", DEADLY, f"token.index == 2 or {DEADLY}"),
    Mutant(
        "a repeated token", Supervisor, "_on_token", "token.index < len(sequence.output)", "False"
    ),
    Mutant(
        "a token left out and not missed",
        Supervisor,
        "_on_token",
        "if token.index > len(sequence.output)",
        "if False",
    ),
    Mutant(
        "crossed streams",
        Worker,
        "_send_events",
        "tokens.append(event)",
        "tokens.append(msgspec.structs.replace(event, id=tokens[0].id) if tokens else event)",
    ),
    Mutant(
        "a replay without its tokens",
        OpenSequence,
        "resubmission",
        "output=self.output",
        "output=[]",
    ),
    Mutant(
        "scores told again",
        Supervisor,
        "_on_scores",
        "message.scores[sequence.num_scored - message.first :]",
        "message.scores",
    ),
    Mutant(
        "a row that does not fit has no outcome",
        EngineCore,
        "_run_rows",
        "drawn.append(OUT_OF_MEMORY)",
        "pass",
    ),
    Mutant(
        "scores of a step row by row in the wrong place",
        EngineCore,
        "_run_rows",
        "scored[index]",
        "scored[0]",
    ),
    # --- epochs and ends
    Mutant(
        "the words of a dead engine", Supervisor, "_on_message", "epoch != self._epoch", "False"
    ),
    Mutant(
        "no end when the server ends", Supervisor, "_end", "self._fail_all(reason, code)", "pass"
    ),
    Mutant(
        "no end for a failed request", Supervisor, "_on_failed", "sequence.deliver(failed)", "pass"
    ),
    Mutant(
        "two ends for a failed request",
        Supervisor,
        "_on_failed",
        "self.open.pop(failed.id, None)",
        "self.open.get(failed.id)",
    ),
    Mutant(
        "two engines at once",
        Supervisor,
        "_kill",
        "self._engine.kill()",
        "self._engine.kill(); self.start()",
    ),
    Mutant(
        "the waiting are not told in time",
        Supervisor,
        "_tick_without_engine",
        "if self.recovery_overdue and not was_overdue",
        "if False",
    ),
    # --- stalls
    Mutant(
        "beats without progress suffice",
        Supervisor,
        "_on_report",
        "if report.progress != self._progress",
        "if True",
    ),
    Mutant("silence suffices", Supervisor, "tick", "self._silent_seconds += elapsed", "pass"),
    Mutant(
        "loading may take for ever",
        Supervisor,
        "_tick_without_engine",
        "self._loading_seconds += elapsed",
        "pass",
    ),
    Mutant(
        "no engine after a pause", Supervisor, "_tick_without_engine", "self._respawn()", "pass"
    ),
    # --- blame
    Mutant(
        "suspects are never sent one at a time",
        Supervisor,
        "_dispatch",
        "suspects[:1] or",
        "",
    ),
    Mutant(
        "a death before anything runs is nobody's",
        CrashPolicy,
        "record_crash",
        "if sequence.started] or sent",
        "if sequence.started]",
    ),
    Mutant(
        "no sequence is blamed for a crash",
        CrashPolicy,
        "record_crash",
        "sequence.crashes += 1",
        "pass",
    ),
    Mutant(
        "blame is never forgotten",
        Supervisor,
        "_on_token",
        "sequence.crashes = sequence.crashes_alone = 0",
        "0",
    ),
    Mutant(
        "one death alone suffices",
        CrashPolicy,
        "record_crash",
        "alone.crashes_alone < CRASHES_ALONE",
        "False",
    ),
    Mutant("a trial never ends", Supervisor, "_end_isolation", "self._dispatch()", "pass"),
    Mutant(
        "a suspect is not called back",
        Supervisor,
        "_cancel_in_engine",
        "self._engine.send(protocol.Cancel(sequence.submit.id))",
        "pass",
    ),
    Mutant(
        "what was sent before is not sent again",
        Supervisor,
        "_on_exit",
        "sequence.sent = sequence.started =",
        "sequence.started =",
    ),
    # --- pages
    Mutant("a leaked page", PageTable, "release", "release(reversed(owned))", "release(owned[1:])"),
    Mutant(
        "a page forgotten in preemption",
        Scheduler,
        "_preempt",
        "sequence.table.release()",
        "sequence.table = None or sequence.table",
    ),
    Mutant(
        "preempted, and taken for computed",
        Scheduler,
        "_preempt",
        "sequence.num_computed = 0",
        "pass",
    ),
    Mutant("NaN left in a page", Scheduler, "_mark_corrupt", "sequence.corrupt = True", "pass"),
    Mutant(
        "a block is published before it is whole",
        PrefixReuse,
        "publish",
        "end // self._page_size",
        "-(-end // self._page_size)",
    ),
    Mutant(
        "a block is claimed by one who left",
        Scheduler,
        "_stop_running",
        "self._prefix_reuse.release_claims(sequence)",
        "pass",
    ),
    Mutant(
        "pages of a row in flight are given away",
        Scheduler,
        "cancel",
        "if sequence.num_in_flight",
        "if False",
    ),
    Mutant(
        "a row in flight is taken for another's",
        Scheduler,
        "_commit_decode",
        "self.running.get(sequence.id) is not sequence",
        "False",
    ),
    Mutant(
        "a Row in flight is taken for another's",
        Scheduler,
        "_commit_row",
        "self.running.get(row.sequence) is not sequence",
        "False",
    ),
    Mutant(
        "planned after a token that it must know",
        Scheduler,
        "_ready",
        "elif not sequence.needs_pending_token",
        "else",
    ),
    Mutant(
        "NaN left by a row in flight", Scheduler, "_discard", "if _is_corrupt(drawn)", "if False"
    ),
    Mutant(
        "a block without a page is still listed",
        PrefixCache,
        "_evicted",
        "self.retract(block)",
        "pass",
    ),
    Mutant(
        "the last token is not computed",
        PrefixReuse,
        "find",
        "sequence.num_skippable",
        "sequence.num_tokens",
    ),
    Mutant(
        "a line keeps the number of the one that left",
        Decoding,
        "leave",
        "self.sequences[line].line = line",
        "pass",
    ),
    Mutant(
        "a known token is taken for one in flight",
        Scheduler,
        "_ready",
        "self._decoding.know_tokens()",
        "pass",
    ),
    # --- masks
    Mutant(
        "a mask is taken before it is there",
        Scheduler,
        "take_masks",
        "not s.constraint.is_pending",
        "True",
    ),
    Mutant(
        "a row is planned without its mask", Sequence, "append", "self.awaits_mask = self", "self"
    ),
    Mutant(
        "waiting for a mask is a stall",
        Worker,
        "progress",
        "self._num_idle_beats += self._waits_for_masks",
        "pass",
    ),
    Mutant(
        "a constraint is followed although its sequence waits",
        Scheduler,
        "_stop_running",
        "sequence.end_constraint()",
        "pass",
    ),
    # --- guesses
    Mutant(
        "a wrong guess is taken for computed",
        Scheduler,
        "_launch",
        "len(row.tokens) - row.drafts",
        "len(row.tokens)",
    ),
    Mutant("what follows a wrong guess is kept", Row, "settle", "draw.token != draft", "False"),
    Mutant(
        "NaN left by a guess",
        Scheduler,
        "_recompute_without_drafts",
        "self._clear_later(sequence.table.release())",
        "sequence.table.release()",
    ),
    Mutant(
        "a guess fails its sequence",
        Scheduler,
        "_commit_row",
        "if row.drafts and _is_corrupt",
        "if False and _is_corrupt",
    ),
    Mutant(
        "a failure goes before its tokens", Worker, "_send_events", "failures.append(", "self.send("
    ),
    Mutant(
        "guesses are lost with memory", core, "_without_drafts", "drafts=0", "drafts=row.drafts"
    ),
    # --- clients
    Mutant(
        "the first to come is served first",
        fair_shares,
        "served_order",
        "sequence.account.served",
        "0.0",
    ),
    Mutant("who was served most is served next", FairShares, "next", "min(", "max("),
    Mutant(
        "one sequence more than a client may have", FairShares, "_contenders", "<= held", "< held"
    ),
    # --- streams
    Mutant(
        "resumed one event too early",
        StreamBuffer,
        "after",
        "max(0, seen + 1 - first)",
        "max(0, seen - first)",
    ),
    Mutant(
        "resumed one event too late",
        StreamBuffer,
        "after",
        "max(0, seen + 1 - first)",
        "max(0, seen + 2 - first)",
    ),
    Mutant(
        "a gap in the events is not reported",
        StreamBuffer,
        "after",
        "return seen + 1 < first",
        "return False",
    ),
    Mutant(
        "bytes that are never freed",
        StreamStore,
        "_expire",
        "self._count(buffer, -buffer.num_bytes)",
        "pass",
    ),
    Mutant("a superseded reader waits on", StreamStore, "attach", "old.tell()", "pass"),
    Mutant("a stream without a reader goes on", StreamStore, "sweep", "buffer.stop(", "str("),
    Mutant("expired too early", StreamStore, "sweep", "< self.retention.seconds", "< 0"),
    Mutant("somebody else's stream", StreamStore, "find", "buffer.owner == owner", "True"),
    Mutant("a stream stopped twice", StreamBuffer, "stop", "not self._stopped and", ""),
    # --- what an engine leaves behind
    Mutant(
        "a page that is written again and still recorded",
        PageAllocator,
        "allocate",
        "self.marks[page] = TAKEN",
        "pass",
    ),
    Mutant(
        "a block of a corrupt sequence that is still recorded",
        Scheduler,
        "_clear_later",
        "self.allocator.marks[page] = TAKEN",
        "pass",
    ),
    Mutant(
        "a tail of other tokens",
        PrefixCache,
        "take_tail",
        "block.link.tokens[:num_bytes] == wanted[:num_bytes]",
        "True",
    ),
    Mutant(
        "a tail with two owners",
        PrefixCache,
        "take_tail",
        "self._forget_tail(root, block)",
        "pass",
    ),
    Mutant(
        "tokens recorded that are not computed",
        PrefixReuse,
        "record",
        "min(end, (start // size + 1) * size)",
        "min(sequence.num_tokens, (start // size + 1) * size)",
    ),
    Mutant(
        "pages of unknown contents that nobody clears",
        PrefixCache,
        "adopt",
        "self.unknown.append(page)",
        "pass",
    ),
)


@dataclass(frozen=True, slots=True)
class Caught:
    """The number of histories until a mutant was found, and the failure. `histories` is None if it
    was not found.
    """

    mutant: Mutant
    histories: int | None
    found: str
    seconds: float


def caught(mutant: Mutant, most: int = MOST_SEEDS) -> Caught:
    began, first = time.perf_counter(), 0
    while True:
        with mutant.planted():
            seed, found = next(
                ((seed, found) for seed in range(first, most) if (found := _wrong(seed))),
                (most, ""),
            )
        if not found or not _wrong(seed):
            return Caught(mutant, seed + 1 if found else None, found, time.perf_counter() - began)
        first = seed + 1


def _wrong(seed: int) -> str:
    try:
        simulation.run(seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def show(results: list[Caught]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("planted", "in", "histories", "seconds", "found as"):
        table.add_column(
            heading,
            justify="right" if heading in ("histories", "seconds") else "left",
            overflow="fold",
        )
    for result in results:
        where = f"{result.mutant.owner.__name__}.{result.mutant.name}"
        table.add_row(
            result.mutant.what,
            where,
            str(result.histories or "NOT FOUND"),
            f"{result.seconds:.2f}",
            result.found[:90],
        )
    Console(width=200).print(table)


def main() -> int:
    simulation.silence()
    names = sys.argv[1:]
    results = [caught(mutant) for mutant in MUTANTS if not names or mutant.what in names]
    show(results)
    return sum(result.histories is None for result in results) > 0


if __name__ == "__main__":
    sys.exit(main())
