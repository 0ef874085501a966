"""FrontProcess: what serves around one engine that is loading or loaded, whether HTTP is served in this process or in API processes.

It handles signals, drains, copies counts into the metrics, announces the server when it is ready, and decides the exit status. Invariant:
no request is cut while it is drained. It binds no port, starts no process, and knows no routes.
"""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import threading
import time
from typing import Protocol

from server import logs
from server.api_protocol import ApiStats
from server.config import ServerSection
from server.drain import SIGNALS, Drain
from server.http.keys import Keys
from server.load_log import LoadLog
from server.loop_lag import LoopLag
from server.protocol import Ready
from server.service import SupervisedEngine
from server.supervision.supervisor import State

EXIT_STREAMS_CUT = 75
log = logging.getLogger("onehead")


class HttpServers(Protocol):
    """What serves HTTP: web_server.WebServer in this process, or api_processes.ApiProcesses in several others."""

    failed: "asyncio.Future[None]"
    """Gets the exception for which HTTP cannot be served any more."""

    @property
    def num_running(self) -> int:
        """The processes that serve."""

    def start(self) -> None:
        """Begins to serve. Raises OSError."""

    async def started(self) -> None:
        """Waits until every process serves, or serving has ended."""

    def sweep(self) -> None:
        """Called once a second."""

    def stats(self) -> ApiStats:
        """Counts of all processes, those that have ended included."""

    def reload(self) -> None:
        """Uses the keys that are valid now, and reads the certificate again."""

    def end(self, timeout: float) -> None:
        """Stops listening, and after `timeout` seconds aborts the connections that are still open."""

    async def ended(self) -> bool:
        """Waits for the end, which begins with this call if `end` was not called. Returns whether a connection was aborted with unsent
        bytes.
        """


class FrontProcess:
    """Serves one engine. `lag` is the selector of the running event loop; `address`: host and port that are listened on; `shown`: the
    model's name.
    """

    def __init__(
        self,
        engine: SupervisedEngine,
        section: ServerSection,
        servers: HttpServers,
        keys: Keys,
        address: tuple[str, int],
        shown: str,
        sink: logs.Sink,
        lag: LoopLag,
    ) -> None:
        self._engine = engine
        self._section = section
        self._servers = servers
        self._address = address
        self._shown = shown
        self._keys = keys
        self._sink = sink
        self._lag = lag
        self._drain = Drain(servers.end, engine.client, section.drain_timeout, section.lb_grace)
        load = LoadLog(engine.client, time.monotonic())
        engine.every_second += [servers.sweep, self._observe, lambda: load.tick(time.monotonic())]

    async def run(self) -> int:
        """Serves until a signal, or until the engine is given up. Returns the exit status. Raises OneheadError if it cannot serve."""
        loop = asyncio.get_running_loop()
        # SIGHUP reloads the keys under nohup too, else a removed key would stay valid.
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._engine.metrics.event_loop_lag.set_function(self._longest_lag)
        self._engine.metrics.api_processes.set_function(lambda: self._servers.num_running)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # Ignored by the parent, as shells do for background jobs: keep it.
                loop.add_signal_handler(number, self._drain.on_signal, number)
        # Excludes the objects of start-up from garbage collections, which would else delay requests by about 0.1 s.
        gc.collect()
        gc.freeze()
        self._lag.start(loop)
        self._servers.start()
        serving = asyncio.create_task(self._serve())
        try:
            await asyncio.wait({serving, self._servers.failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._servers.failed.done():
                self._servers.failed.result()
            await serving
        finally:
            serving.cancel()
            cut = await self._servers.ended()
        return EXIT_STREAMS_CUT if self._drain.cut or cut else 0

    async def _serve(self) -> None:
        await self._announce()
        await self._engine.wait_for(State.STOPPED)
        self._engine.client.raise_if_over()

    def _reload(self) -> None:
        """Reads the files again that are named by options."""
        self._keys.reload()
        self._servers.reload()

    def _longest_lag(self) -> float:
        return max(self._lag.longest(), self._servers.stats().event_loop_lag)

    def _observe(self) -> None:
        """Copies into the metrics what is counted by objects that do not know them."""
        metrics, stats = self._engine.metrics, self._servers.stats()
        metrics.streams_detached.set(stats.streams_detached)
        metrics.resume_bytes.set(stats.resume_bytes)
        metrics.reach(metrics.log_lines_dropped, self._sink.num_dropped + stats.log_lines_dropped)
        metrics.reach(metrics.requests.labels("refused"), stats.refused)
        metrics.reach(metrics.requests_quarantined, self._engine.supervisor.crash_policy.num_quarantined)

    async def _announce(self) -> None:
        """Waits for the engine, logs what is served, and prints one line with the URL."""
        await self._engine.check_texts()
        if await self._engine.wait_for(State.READY) is not State.READY:
            return
        await self._servers.started()
        host, port = self._address
        log.info("%s: %s", self._shown, in_words(self._engine.generation.ready))
        if self._keys.terms is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            log.warning("every host that reaches this port can use it: no key is needed (server.api_keys, server.api_keys_file)")
        scheme = "https" if self._section.tls_key else "http"
        line = f"onehead serves {self._shown} on {scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if isinstance(self._sink.formatter, logs.JsonFormatter):  # A log collector that reads both outputs must find JSON only.
            line = self._sink.format(log.makeRecord(log.name, logging.INFO, __file__, 0, line, (), None))
        # A thread, without buffers that the exit would wait for: standard output may be a pipe that is full, and never read.
        threading.Thread(target=_write_line, args=(line,), daemon=True, name="stdout").start()


def in_words(ready: Ready) -> str:
    """What an engine holds, and on what."""
    forms = " and ".join(f"{count} matrices in {form} blocks" for form, count in sorted(ready.block_forms.items()))
    weights = f"as in the file ({forms})" if forms else f"in {ready.dtype if ready.quantization == 'none' else ready.quantization}"
    words = (
        f"{ready.model_type}, {ready.num_parameters / 1e6:.1f}M parameters {weights} on {ready.hardware or ready.device}, "
        f"by {ready.kernels}, {'batch-invariant' if ready.deterministic else 'not batch-invariant'}; "
        f"cache {ready.kv_bytes_per_token} bytes per token in {ready.kv_dtype}, {ready.num_pages} pages of {ready.page_size}, "
        f"up to {ready.capacity} tokens a sequence"
    )
    free, total = (size / 2**30 for size in ready.device_memory)
    return f"{words}; {free:.1f} of {total:.1f} GiB of GPU memory are free, {ready.num_graphs} CUDA graphs" if total else words


def _write_line(line: str) -> None:
    with contextlib.suppress(OSError):  # Standard output may be closed; serve anyway.
        os.write(1, f"{line}\n".encode())
