"""SupervisedEngine: an engine process, its supervisor and a Generation, in an event loop, without
HTTP.

Invariant: the engine process has ended when `close` returns. It knows no routes and no sockets.
"""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import ProcessCollector

from model.checkpoint.families import read_spec
from model.control_groups import num_oom_kills
from model.spec import CheckpointError
from server import child_process, protocol
from server.config import EngineSettings, ServerSection
from server.errors import ConfigurationError, ResourceError, Unavailable
from server.generation.engine_client import EngineClient
from server.generation.generation import Generation
from server.hub.tokenizer_file import tokenizer_path
from server.metrics import Metrics
from server.protocol import EngineOptions
from server.supervision.crash_policy import Timeouts
from server.supervision.processors import available_processors, engine_threads, on_gpu, step_sizes
from server.supervision.supervisor import State, Supervisor
from server.supervision.transport import EngineHolder, EngineProcess
from server.text.codec import TextCodec
from server.text.jobs import Texts
from server.text.service import TextService
from server.text.workers import Workers

START_SECONDS, ENGINE_EXIT_SECONDS = 600.0, 5.0
"""Time that an engine gets to load, and to exit once it was told to."""
TICK_SECONDS = 0.25
log = logging.getLogger("onehead")


def engine_options(settings: EngineSettings) -> EngineOptions:
    """The options `engine.*` and `cache.*` for an engine process, with threads, context and the
    sizes of steps set where they are left to defaults.
    """
    engine, cache = settings.engine.model_dump(), settings.cache.model_dump()
    max_running, step_tokens = step_sizes(
        settings.engine.max_running, settings.engine.step_tokens, settings.engine.device
    )
    found = {
        "max_running": max_running,
        "step_tokens": step_tokens,
        "threads": engine_threads(settings.engine.threads),
        "max_context": settings.engine.max_context or 0,
        "draft": str(settings.engine.draft or ""),
        "cache_disk": str(cache.pop("disk") or ""),
        "cache_disk_size": cache.pop("disk_size"),
        "cache_dtype": cache.pop("dtype"),
    }
    return EngineOptions(**engine | cache | found)


def start_message(settings: EngineSettings, section: ServerSection) -> protocol.Start:
    """The first message to an engine process: its settings."""
    return protocol.Start(
        version=protocol.VERSION,
        model=str(settings.model),
        tokenizer=str(tokenizer_path(settings.model)),
        options=engine_options(settings),
        heartbeat_seconds=section.stall_after / 4,
        forks=sys.platform == "linux" and not on_gpu(settings.engine.device),
        log_level=section.log_level,
        log_format=section.log_format,
        kv_events=protocol.KvEvents(
            section.kv_events, section.kv_events_replay, section.kv_events_topic
        ),
    )


def read_texts(folder: Path, section: ServerSection) -> Texts:
    """The tokenizer and chat template of a checkpoint. Raises ConfigurationError, or
    CheckpointError if the tokenizer does not fit the model.
    """
    # In a thread, whose allocations have an arena of their own: what this process and its children
    # allocate later would else lie between them, and copy the pages that they share.
    with ThreadPoolExecutor(1) as pool:
        codec = pool.submit(TextCodec, folder, section.chat_template).result()
    spec = read_spec(folder, warn=False, pools=True)  # The engine reads the spec too, and warns.
    # EmbeddingGemma's tokenizer has a token for images, and a text that holds it is refused.
    if codec.largest_id >= spec.vocab_size and spec.pooling is None:
        raise CheckpointError(
            f"{codec.path}: has ids up to {codec.largest_id}, expected all below vocab_size "
            f"{spec.vocab_size} of config.json"
        )
    if not (spec.end_token_ids or codec.end_token_ids or spec.pooling):
        raise CheckpointError(
            f"{folder}: no end-of-sequence token; expected eos_token_id in generation_config.json "
            "or config.json, or eos_token in tokenizer_config.json"
        )
    texts = Texts(codec, spec.end_token_ids)
    _ = texts.calls  # Which may ask for every token of the vocabulary.
    gc.collect()
    gc.freeze()  # A collection here or in a child would copy the pages that they share.
    child_process.release_freed_memory()  # Reading frees as much as it keeps.
    return texts


class SupervisedEngine:
    """Starts, watches, restarts and ends the engine process; `generation` submits requests to it.
    Raises ConfigurationError, CheckpointError, or OSError if a process cannot be started.
    """

    def __init__(
        self,
        settings: EngineSettings,
        section: ServerSection,
        name: str,
        recovery: float | None,
    ) -> None:
        # The engine needs the processors more.
        places = max(1, int(available_processors()) // 4)
        self.workers = Workers(max(2, places), places)
        self._start = start_message(settings, section)
        self._changed = asyncio.Event()
        # Before the tokenizer is read, as the engine's imports and weights take longer.
        self._holder = EngineHolder(self._start, self.workers.grammars)
        self._process = EngineProcess(self._holder)
        self._num_spawned = 0
        self._crashed_at: float | None = None
        self._tick = min(TICK_SECONDS, section.stall_after / 10)
        self._watch: asyncio.Task[None] | None = None
        self._num_oom_kills = num_oom_kills()
        self.every_second: list[Callable[[], None]] = [self._keep_workers]
        """Called once a second."""
        self.metrics = Metrics(name, section.metrics_aliases)
        ProcessCollector(
            "onehead_engine",
            lambda: self._process.pid,
            registry=self.metrics.process_registry,
        )
        timeouts = Timeouts(section.stall_after, START_SECONDS, recovery)
        self.supervisor = Supervisor(
            self._spawn, self._on_state, lambda event: self.client.on_engine_event(event), timeouts
        )
        self.client = EngineClient(
            self.supervisor, self.metrics, section, self._start.options.max_running
        )
        try:
            texts = read_texts(settings.model, section)
            self.workers.start(texts)  # While this process has no threads that could hold a lock.
        except BaseException:
            self._process.end()
            raise
        self.generation = Generation(self.client, TextService(texts, self.workers), section)

    def start(self) -> None:
        """Watches the engine. Raises OSError."""
        self.supervisor.start()
        self._watch = asyncio.create_task(self._pass_time())

    async def _pass_time(self) -> None:
        """Passes elapsed time to the supervisor. Time in which this process did not run does not
        count as time without progress.
        """
        last = second = time.monotonic()
        while True:
            await asyncio.sleep(self._tick)
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * self._tick), now
            calls: list[Callable[[], None]] = [partial(self.supervisor.tick, elapsed)]
            if now >= second:
                second = now + 1.0
                calls += self.every_second
            for call in calls:
                try:
                    call()
                except Exception:  # A failed call must not stop the others, or the watching.
                    log.exception("a periodic task failed")

    def _spawn(
        self, on_message: Callable[[protocol.FromEngine], None], on_exit: Callable[[int], None]
    ) -> EngineProcess:
        ready = self.supervisor.ready
        # A restarted engine gets the first one's pool size and device, by which open requests were
        # admitted, and its model.
        start = self._start
        if ready is not None:
            options = dataclasses.replace(start.options, pages=ready.num_pages, device=ready.device)
            start = msgspec.structs.replace(start, options=options, digest=ready.digest)
        if self._num_spawned:
            self.metrics.engine_restarts.inc()
            if self._holder.has_ended:
                self._holder = EngineHolder(start, self.workers.grammars)
            self._process = EngineProcess(self._holder)
        self._num_spawned += 1
        self._process.listen(on_message, partial(self._on_exit, on_exit))
        return self._process

    def _on_exit(self, then: Callable[[int], None], status: int) -> None:
        before, self._num_oom_kills = self._num_oom_kills, num_oom_kills()
        if status == -signal.SIGKILL and self._num_oom_kills > before:
            log.error(
                "the kernel ended a process for lack of memory (OOM killer): lower cache.memory or "
                "cache.pages, hold the weights in fewer bits (engine.quantization), or raise the "
                "limit of memory of this container or service"
            )
            # Which gives back the memory of the cache, too.
            self._holder.kill()
        then(status)

    def _keep_workers(self) -> None:
        # Where no process can be started, the next second may be better.
        with contextlib.suppress(OSError):
            self.workers.keep_running()

    def _on_state(self, state: State) -> None:
        log.info(
            "engine: %s%s",
            self.supervisor.status,
            f" ({self.supervisor.reason})" if self.supervisor.reason else "",
        )
        if state is State.READY and self.supervisor.ready is not None:
            self.metrics.loaded(self.supervisor.ready)
            if self._crashed_at is not None:
                seconds = time.monotonic() - self._crashed_at
                self.metrics.engine_recovery.observe(seconds)
                log.info("the engine was replaced in %.2f s", seconds)
                self._crashed_at = None
            elif self.supervisor.ready.device == "cpu":
                _warn_of_threads(self._start.options.threads)
        if state is State.STARTING:
            self._crashed_at = time.monotonic()
            self.metrics.idle()
        self._changed.set()

    async def check_texts(self) -> None:
        """Waits until the workers have read the checkpoint. Raises ConfigurationError if they
        refuse it, and ResourceError if there are none.
        """
        try:
            loaded = await self.workers.loaded()
        except Unavailable as error:
            raise ResourceError(error.message) from None
        if loaded.error:
            raise ConfigurationError(loaded.error)
        self.generation.texts.cheap_template = loaded.cheap_template
        self.generation.codec.end_at(loaded.turn_end)
        self.generation.texts.variables = frozenset(loaded.variables)

    async def wait_for(self, *states: State) -> State:
        """Waits until the supervisor is in one of these states or in a final one, and returns
        it.
        """
        final = (State.STOPPED, State.REFUSED, State.GAVE_UP)
        while self.supervisor.state not in (*states, *final):
            self._changed.clear()
            await self._changed.wait()
        return self.supervisor.state

    async def close(self) -> None:
        """Stops the engine process, and kills it if it has not ended in time; ends the workers."""
        self.supervisor.stop()
        self.workers.close()
        if self._watch is not None:
            self._watch.cancel()
        await self._process.ended(ENGINE_EXIT_SECONDS)


def _warn_of_threads(threads: int) -> None:
    """Logs that the engine has more threads than processors: at every barrier all threads wait for
    one that is not running.
    """
    processors = available_processors()
    if threads > processors:
        log.warning(
            "the engine has %d threads for %g processors (affinity and CPU quota of this "
            "process): steps take longer than with %d; "
            "set engine.threads, or leave it and OMP_NUM_THREADS out",
            threads,
            processors,
            max(1, int(processors)),
        )


@contextlib.asynccontextmanager
async def started_engine(
    settings: EngineSettings, section: ServerSection, name: str = "", recovery: float | None = None
) -> AsyncIterator[SupervisedEngine]:
    """An engine that is loading, closed at exit. `recovery`: as in crash_policy.Timeouts. Raises
    ConfigurationError, CheckpointError or ResourceError.
    """
    try:
        engine = SupervisedEngine(settings, section, name, recovery)
        engine.start()
    except OSError as error:
        raise ResourceError(f"no process can be started: {error.strerror}") from None
    try:
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def running_engine(
    settings: EngineSettings, section: ServerSection, recovery: float | None = None
) -> AsyncIterator[SupervisedEngine]:
    """A loaded engine, closed at exit. Raises ConfigurationError, ResourceError or EngineGaveUp if
    it cannot be loaded.
    """
    async with started_engine(settings, section, recovery=recovery) as engine:
        await engine.check_texts()
        await engine.wait_for(State.READY)
        engine.client.raise_if_over()
        yield engine
