"""The engine process: receives messages, runs steps, sends events. server/child_process.py runs it,
on an inherited pipe, a channel on which processes that follow constraints are asked for, and one on
which further engines are asked for (server.engine.holder).

Invariant: it runs until Shutdown or until the other end of the pipe is closed. An exception in a
step ends the process, and the supervisor replays its sequences; an exception in a submission fails
that sequence alone. A thread sends heartbeats.
"""

import contextlib
import dataclasses
import gc
import hashlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import msgspec

from cache.disk import DiskCache
from cache.ledger import PageLedger
from model.checkpoint.conversion import only_pooled
from model.checkpoint.families import read_spec
from model.checkpoint.identity import ModelFiles
from model.options import EngineOptions
from model.spec import CheckpointError, ModelSpec, OptionError
from server import logs, protocol
from server.child_process import allow_files, release_freed_memory
from server.engine.cache_view import CacheViews
from server.engine.core import EngineCore
from server.engine.drafts import Drafts
from server.engine.holder import hold, in_a_thread
from server.engine.kv_events import KvPublisher
from server.engine.masks import MaskProcesses
from server.engine.open_sequences import Event
from server.engine.scheduler import Limits, NeverFits, Scheduler
from server.engine.speculation import load_drafts
from server.errors import one_line

if TYPE_CHECKING:
    from model.checkpoint.weights import Report
    from model.devices.device import Device
    from model.runner.runner import ModelRunner

log = logging.getLogger("onehead")

PATIENCE = 0.5
"""Share of the time of a step for which the next one waits for masks, so that constrained sequences
run together."""
OTHER_FILES = 64
"""Open files of an engine besides a pipe for each sequence."""
READ_BYTES = 2**20
"""Messages that are read between two steps, about 10 ms of work, so that many large ones do not
hold up the sequences that run."""


def load(start: protocol.Start, report: "Report") -> tuple[EngineCore, protocol.Ready]:
    """Loads the engine; checks the config before it imports torch. Raises CheckpointError,
    OptionError or MemoryError.
    """
    folder = Path(start.model)
    spec = read_spec(folder, pools=True)
    _check_files(start.options.max_running)
    # Hashed in threads while torch is imported and the weights are read.
    files = ModelFiles(folder, Path(start.tokenizer), spec)
    if (fact := only_pooled(folder)) is not None:
        log.warning("%s; `onehead train --init %s --output NEW` trains it", fact, folder)
    make_drafts, options = load_drafts(_options(start, spec), spec, report)
    from model.runner.runner import ModelRunner  # Which imports torch.

    runner = ModelRunner.load(folder, spec, options, report)
    limits = _limits(runner, options)
    pooling = spec.pooling
    kv_dtype, forms = runner.pool.dtype, runner.decoder.block_forms
    ready = protocol.Ready(
        model_type=spec.model_type,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=runner.device.name,
        vocab_size=spec.vocab_size,
        max_context=options.max_context,
        end_token_ids=list(spec.end_token_ids),
        num_parameters=runner.decoder.num_parameters,
        page_size=start.options.page_size,
        num_pages=runner.pool.num_pages,
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        kv_bytes_per_token=spec.kv_bytes_per_token(kv_dtype.itemsize),
        capacity=limits.capacity - bool(pooling),
        quantization="+".join(sorted(forms)) or start.options.quantization.replace("auto", "none"),
        block_forms=forms,
        weight_bytes=runner.weight_bytes,
        page_bytes=runner.pool.num_bytes // runner.pool.num_pages,
        kernels=runner.kernels,
        deterministic=runner.deterministic,
        multi_head_bytes_per_token=spec.multi_head_bytes_per_token(kv_dtype.itemsize),
        sequences=_sequences(limits, spec.contexts(options.max_context)),
        digest=_same_model(start, files.digest()),
        hardware=runner.device.description(),
        device_memory=runner.device.own_memory(),
        num_graphs=runner.num_graphs,
        vector_size=pooling.size(spec.hidden_size) if pooling else 0,
        classes=protocol.Classes(pooling.labels, pooling.scores)
        if pooling and pooling.labels
        else None,
    )
    return EngineCore(_scheduler(start, limits, runner, ready, make_drafts(runner)), runner), ready


def _limits(runner: "ModelRunner", options: EngineOptions) -> Limits:
    spec = runner.decoder.spec
    limits = Limits(
        runner.pool.num_pages,
        runner.pool.layout,
        # A vector is the token after a text, which is not computed.
        options.max_context + (spec.pooling is not None),
        options.max_running,
        options.step_tokens,
        spec.is_whole,
    )
    if limits.capacity < options.max_context:
        short = (
            "the KV cache holds %d tokens of one sequence, fewer than the context of %d: "
            "longer requests are refused; see cache.memory"
        )
        log.warning(short, limits.capacity, options.max_context)
    return limits


def _scheduler(
    start: protocol.Start,
    limits: Limits,
    runner: "ModelRunner",
    ready: protocol.Ready,
    drafts: Drafts | None,
) -> Scheduler:
    """A scheduler whose pages are found by the engine after this one if the backend can vouch for
    what they hold, and by later servers if there is a disk for them.
    """
    ledger = None
    if runner.backend.are_whole is not None and not limits.is_whole:
        ledger = PageLedger(limits.num_pages, limits.layout, runner.backend.are_whole)
    disk = _disk(start, runner, ready) if start.options.cache_disk else None
    return Scheduler(limits, drafts, ledger, disk)


def _disk(start: protocol.Start, runner: "ModelRunner", ready: protocol.Ready) -> DiskCache:
    """The files of pages with the same bits as this engine computes. Raises OptionError."""
    if ready.device != "cpu" or not ready.deterministic:
        text = "cache.disk needs an engine on a CPU with batch-invariant kernels, to find what it "
        raise OptionError(f"{text}would compute; this one is on {ready.device}, by {ready.kernels}")
    same = (
        version("onehead"),
        version("torch"),
        ready.digest,
        ready.kernels,
        ready.dtype,
        ready.kv_dtype,
        ready.quantization,
        repr(runner.pool.layout),
    )
    folder = Path(start.options.cache_disk, hashlib.sha256(repr(same).encode()).hexdigest()[:32])
    pool = runner.pool
    disk = DiskCache(folder, start.options.cache_disk_size, pool.layout, pool.parts)
    try:
        disk.make_folder()
    except OSError as error:
        if not start.digest:  # A later engine does without it, as one that runs does.
            raise OptionError(f"cache.disk {folder.parent}: {error.strerror}") from None
    return disk


def _check_files(max_running: int) -> None:
    """Allows a pipe for each sequence that runs, to a process that follows its constraint. Raises
    OptionError.
    """
    needed = max_running + OTHER_FILES
    if (limit := allow_files(needed)) < needed:
        raise OptionError(
            f"engine.max_running {max_running} needs {needed} open files, and this process may "
            f"have {limit} "
            "at most (ulimit -Hn): lower it, or allow more"
        )


def _sequences(limits: Limits, contexts: list[int]) -> list[tuple[int, int]]:
    """For each context length the number of sequences that fit the KV cache at once."""
    return [
        (context, limits.layout.sequences(limits.num_pages, context, limits.step_tokens))
        for context in contexts
    ]


def _same_model(start: protocol.Start, digest: str) -> str:
    """The digest of the model that was loaded. Raises CheckpointError if the server began with
    another one.
    """
    if start.digest not in ("", digest):
        what = "the config, tokenizer or weights are not those that the server began with"
        raise CheckpointError(
            f"{start.model}: {what}; put the same files back, or restart the server to serve these"
        )
    return digest


def _options(start: protocol.Start, spec: ModelSpec) -> EngineOptions:
    """The options with the context, and with steps that hold it where a sequence needs that."""
    asked, positions = start.options.max_context, spec.max_positions
    if asked > positions:
        raise CheckpointError(
            f"engine.max_context {asked} is above the {positions} positions of the checkpoint"
        )
    max_context = asked or positions
    step_tokens = max(start.options.step_tokens, max_context * spec.is_whole)
    return dataclasses.replace(start.options, max_context=max_context, step_tokens=step_tokens)


def load_report(pipe: Connection) -> "Report":
    """A callback that sends the loading phase to the API process, and logs how long each phase
    took.
    """
    last, began, sent = "starting", time.perf_counter(), ""

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last, began, sent
        if phase != last:
            log.info("%s took %.2f s", last, time.perf_counter() - began)
            last, began = phase, time.perf_counter()
            if total:
                log.info("%s, %d bytes", phase, total)
        text = f"{phase} {100 * done // total} %" if total else phase
        if text != sent:
            pipe.send_bytes(protocol.encode(protocol.Loading(text)))
        sent = text

    return report


class Worker:
    """The message loop around one EngineCore."""

    def __init__(
        self,
        pipe: Connection,
        core: EngineCore,
        masks: MaskProcesses,
        device: "Device | None" = None,
        publisher: KvPublisher | None = None,
    ) -> None:
        self.pipe = pipe
        self.device = device
        self.core = core
        self.masks = masks
        self._publisher = publisher
        if publisher:
            core.scheduler.prefixes.on_change = publisher.log.changes.append
            publisher.publish()
        self._views = CacheViews(core.scheduler, publisher.log if publisher else None)
        self._sending = threading.Lock()
        self._num_idle_beats = 0
        self._waits_for_masks = False

    def start_heartbeat(self, seconds: float) -> None:
        """Starts a thread that sends a Heartbeat every `seconds` while the pipe is open."""

        def beat() -> None:
            try:
                while True:
                    free, total = (0, 0) if self.device is None else self.device.own_memory()
                    self.send(protocol.Heartbeat(self.progress(), total - free))
                    time.sleep(seconds)
            except OSError:
                return  # The pipe is closed; the message loop ends too.
            except RuntimeError as error:
                # The device is broken, while nothing may be running on it.
                _end(error, self.device)

        threading.Thread(target=beat, daemon=True, name="heartbeat").start()

    def progress(self) -> int:
        """A number that grows while steps are computed, and with each call while the next one waits
        for a mask, as that time is bounded.
        """
        self._num_idle_beats += self._waits_for_masks
        num_loaded = self.core.scheduler.prefixes.num_loaded
        return self.core.runner.progress + num_loaded + self._num_idle_beats

    def serve(self) -> None:
        """Handles messages and runs steps. Returns on Shutdown; raises EOFError when the other end
        of the pipe is closed.
        """
        patience = 0.0
        while True:
            self._waits_for_masks = self.core.is_blocked
            if self._waits_for_masks:
                self.masks.wait(self.pipe)
                self._waits_for_masks = False
            else:
                self.masks.collect(patience)
            handled = False
            num_bytes = 0
            while not self.core.scheduler.has_work or (
                num_bytes < READ_BYTES and self.pipe.poll(0)
            ):
                if handled and not self.core.scheduler.has_work and not self.pipe.poll(0):
                    # Idle after a cancellation: updates the gauges, as no step will.
                    self._report([], 0.0)
                    handled = False
                data = self.pipe.recv_bytes(protocol.MAX_FRAME_BYTES)
                num_bytes += len(data)
                message = protocol.decode_to_engine(data)
                if isinstance(message, protocol.Shutdown):
                    return
                self._handle(message)
                handled |= not isinstance(message, protocol.Look)
            began = time.perf_counter()
            events = self.core.step(self._send_started)
            step_seconds = time.perf_counter() - began
            if self._publisher:
                self._publisher.publish()
            if events or not self.core.is_blocked:
                self._send_events(events, step_seconds)
            patience = PATIENCE * step_seconds

    def _send_started(self) -> None:
        """Sends Started for sequences that are in a step for the first time, before it is
        computed.
        """
        started = self.core.scheduler.take_started()
        if started:
            self.send(protocol.Started([s.id for s in started], [s.num_cached for s in started]))

    def _send_events(self, events: list[Event], step_seconds: float) -> None:
        """Sends the events of a step: scores, then tokens, then failures, as a sequence may get
        tokens before it fails.
        """
        tokens, failures = [], []
        for event in events:
            if isinstance(event, protocol.Token):
                tokens.append(event)
            elif isinstance(event, protocol.Failed):
                failures.append(event)
            else:
                self.send(event)
        self._report(tokens, step_seconds)
        for failed in failures:
            self.send(failed)

    def _handle(self, message: protocol.ToEngine) -> None:
        if isinstance(message, protocol.Cancel):
            self.core.scheduler.cancel(message.id)
        elif isinstance(message, protocol.Look):
            self.send(self._views.answer(message))
        elif isinstance(message, protocol.Submit):
            try:
                self.core.scheduler.submit(message, self.masks.constraint(message))
            except NeverFits as error:
                self.send(protocol.Failed(message.id, str(error)))
            except MemoryError:
                raise
            except Exception:
                log.exception("sequence %d cannot be admitted", message.id)
                self.send(
                    protocol.Failed(
                        message.id,
                        "an internal error in admitting this request",
                        code="admission_error",
                    )
                )

    def _report(self, tokens: list[protocol.Token], step_seconds: float) -> None:
        scheduler = self.core.scheduler
        gauges = protocol.Gauges(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=scheduler.allocator.num_owned,
            pages_cached=len(scheduler.allocator.cached),
            preemptions=scheduler.num_preemptions,
            queried_tokens=scheduler.num_queried_tokens,
            hit_tokens=scheduler.num_hit_tokens,
            loaded_tokens=scheduler.prefixes.num_loaded * scheduler.limits.layout.page_size,
            drafted_tokens=scheduler.num_drafted_tokens,
            accepted_tokens=scheduler.num_accepted_tokens,
            step_seconds=step_seconds,
        )
        self.send(protocol.Tokens(tokens, gauges))

    def send(self, message: protocol.FromEngine) -> None:
        with self._sending:
            self.pipe.send_bytes(protocol.encode(message))


def _refusal(error: Exception, start: protocol.Start) -> protocol.Refused:
    """The Refused message for an error while loading. An unexpected error is logged with its
    traceback.
    """
    reason = one_line(error)
    # Clients are told why there is no engine any more: with the names of files, without their
    # paths.
    if start.digest:
        if start.options.draft:
            reason = reason.replace(start.options.draft, "the draft model's folder")
        reason = (
            reason.replace(start.tokenizer, "tokenizer.json")
            .replace(f"{start.model}/", "")
            .replace(start.model, "the model's folder")
        )
    if isinstance(error, CheckpointError | OptionError):
        return protocol.Refused(reason)
    if not isinstance(error, MemoryError):
        log.error("the model could not be loaded", exc_info=error)
    # A library that cannot be mapped is an ImportError.
    resource = isinstance(error, MemoryError | RuntimeError | ImportError)
    return protocol.Refused(
        f"the model could not be loaded: {reason or 'memory is exhausted'}", resource
    )


def _refuse(pipe: Connection, error: Exception, start: protocol.Start) -> NoReturn:
    """Says why there is no engine, and ends the process; threads that still hash files are not
    waited for.
    """
    with contextlib.suppress(OSError):  # The API process has ended.
        pipe.send_bytes(protocol.encode(_refusal(error, start)))
    logging.shutdown()
    os._exit(0)


def _end(error: Exception, device: "Device | None") -> NoReturn:
    """Ends the process for an error that no single request has caused, with what is known of the
    hardware in the log.
    """
    log.error("the engine has failed", exc_info=error)
    if device is not None and (words := device.failure(error)):
        log.error("%s", words)
    logging.shutdown()
    # Skips the orderly release of a broken device, which can hang and would delay the restart.
    os._exit(1)


def main() -> None:
    """Entry point: receives Start, loads the engine and answers Refused, or becomes the holder of
    the engines that serve. Where that cannot be, as with a GPU, whose memory no fork can share, it
    serves itself.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A service manager may signal every process of the service; only the API process reacts,
        # and drains first.
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    # While it loads, which makes next to no garbage: collections would take a tenth of the time.
    gc.disable()
    try:
        start = protocol.decode_to_engine(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        return  # The API process has ended.
    if not isinstance(start, protocol.Start) or start.version != protocol.VERSION:
        raise CheckpointError(f"expected a Start message of protocol version {protocol.VERSION}")
    logs.configure(start.log_level, start.log_format)
    report = load_report(pipe)
    loading = partial(load, start, report)
    try:
        core, ready = in_a_thread(loading) if start.forks else loading()
        report("starting to serve", 0, 0)
    except Exception as error:
        _refuse(pipe, error, start)
    # Excludes what is loaded from garbage collections, whose pauses would delay steps, and which
    # would copy the memory that a fork shares.
    gc.freeze()
    release_freed_memory()
    grammars = socket.socket(fileno=int(sys.argv[2]))
    serving = partial(serve, start, core, ready, grammars)
    # Where a page cannot be checked, what an engine leaves in it must not reach the next one.
    if not start.forks or cast("ModelRunner", core.runner).backend.are_whole is None:
        serving(pipe)
        return
    control = socket.socket(fileno=int(sys.argv[3]))
    hold(control, pipe, serving, grammars.fileno())


def serve(
    start: protocol.Start,
    core: EngineCore,
    ready: protocol.Ready,
    grammars: socket.socket,
    pipe: Connection,
) -> None:
    """Serves with a loaded engine until Shutdown, or until the API process has ended. Sends Ready,
    or Refused where a thread or the address of KV events cannot be had.
    """
    device = cast("ModelRunner", core.runner).device
    try:
        logs.configure(start.log_level, start.log_format)
        device.use_threads(start.options.threads)
        # Numbers are above all of an engine or an earlier server, so that a subscriber sees a gap,
        # and not messages that it knows already.
        publisher = (
            KvPublisher(start.kv_events, time.time_ns()) if start.kv_events.address else None
        )
        worker = Worker(pipe, core, MaskProcesses(grammars), device, publisher)
        core.scheduler.prefixes.adopt()
        # Before Ready: an engine that cannot start a thread is refused.
        worker.start_heartbeat(start.heartbeat_seconds)
    except Exception as error:
        _refuse(pipe, error, start)
    gc.enable()
    try:
        worker.send(msgspec.structs.replace(ready, pid=os.getpid()))
        worker.serve()
    except (EOFError, ConnectionError):
        pass  # The API process has ended.
    except Exception as error:
        _end(error, device)
    core.scheduler.prefixes.close()
    logging.shutdown()


if __name__ == "__main__":
    main()
