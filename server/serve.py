"""`onehead serve`: HTTP over a supervised engine process, from start-up to the exit after a drain.

It handles signals, drains, copies counts into the metrics, announces the server when it is ready, and decides the exit status. Invariant:
the port is bound before the model is loaded, no request is cut while it is drained, and the engine process has ended when `serve` returns.
"""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from server import logs
from server.config import ServerSection, ServeSettings
from server.drain import SIGNALS, Drain
from server.errors import ResourceError
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.http.tls import check_certificate
from server.hub.download import model_id
from server.load_log import LoadLog
from server.protocol import Ready
from server.service import SupervisedEngine, started_engine
from server.supervision.supervisor import State

if TYPE_CHECKING:
    from server.web_server import WebServer

EXIT_STREAMS_CUT = 75
log = logging.getLogger("onehead")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ResourceError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol: asyncio sets TCP_NODELAY only on connections of such a socket, and without it a response that is written in two
    # parts waits 40 ms for an acknowledgement of the first.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ResourceError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port or --host") from None
    return listener


def _leave(*_: object) -> None:
    """Ends a server that has accepted nothing yet; once Server runs, it drains instead."""
    raise SystemExit(0)


class Server:
    """One engine, and the HTTP in front of it. `address`: host and port that are listened on; `shown`: the model's name."""

    def __init__(
        self,
        engine: SupervisedEngine,
        section: ServerSection,
        web: "WebServer",
        keys: Keys,
        address: tuple[str, int],
        shown: str,
        sink: logs.Sink,
    ) -> None:
        self._engine = engine
        self._section = section
        self._web = web
        self._address = address
        self._shown = shown
        self._keys = keys
        self._sink = sink
        self._drain = Drain(web.end, engine.client, section.drain_timeout, section.lb_grace)
        load = LoadLog(engine.client, time.monotonic())
        engine.every_second += [web.sweep, self._observe, lambda: load.tick(time.monotonic())]

    async def run(self) -> int:
        """Serves until a signal, or until the engine is given up. Returns the exit status. Raises OneheadError if it cannot serve."""
        loop = asyncio.get_running_loop()
        # SIGHUP reloads the keys under nohup too, else a removed key would stay valid.
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # Ignored by the parent, as shells do for background jobs: keep it.
                loop.add_signal_handler(number, self._drain.on_signal, number)
        # Excludes the objects of start-up from garbage collections, which would else delay requests by about 0.1 s.
        gc.collect()
        gc.freeze()
        self._web.start()
        try:
            await self._announce()
            await self._engine.wait_for(State.STOPPED)
            self._engine.client.raise_if_over()
        finally:
            cut = await self._web.ended()
        return EXIT_STREAMS_CUT if self._drain.cut or cut else 0

    def _reload(self) -> None:
        """Reads the files again that are named by options."""
        self._keys.reload()
        self._web.reload()

    def _observe(self) -> None:
        """Copies into the metrics what is counted by objects that do not know them."""
        metrics, store = self._engine.metrics, self._web.store
        metrics.streams_detached.set(store.num_detached)
        metrics.resume_bytes.set(store.num_bytes)
        metrics.reach(metrics.log_lines_dropped, self._sink.num_dropped)
        metrics.reach(metrics.requests_quarantined, self._engine.supervisor.crash_policy.num_quarantined)

    async def _announce(self) -> None:
        """Waits for the engine, logs what is served, and prints one line with the URL."""
        await self._engine.check_texts()
        if await self._engine.wait_for(State.READY) is not State.READY:
            return
        await self._web.started()
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
    form = ready.dtype if ready.quantization == "none" else ready.quantization
    weights = f"as in the file ({forms})" if forms else f"in {form}"
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


async def serve(settings: ServeSettings, sink: logs.Sink) -> int:
    """Serves until a signal, or until the engine is given up. Returns the exit status. Raises OneheadError
    if it cannot serve.
    """
    section = settings.server
    with bind(settings.host, settings.port) as listener:
        name = model_id(settings.model)
        names = ModelNames.of((section.model_name or name, *section.served_model_names), (settings.given, name))
        if section.tls_certificate and section.tls_key:
            check_certificate(section.tls_certificate, section.tls_key)
        keys = Keys(section.api_keys, section.api_keys_file)
        # Handled once the event loop runs: what changes while the engine is started is not missed.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # Else it is ignored, and stays so.
            signal.signal(signal.SIGTERM, _leave)
        engine = started_engine(settings, section, names.shown)
        try:
            # FastAPI and uvicorn are imported while the engine process imports torch.
            from server.web_server import WebServer

            web = WebServer(engine.generation, section, keys, names, listener)
            address = listener.getsockname()[:2]
            return await Server(engine, section, web, keys, address, names.shown, sink).run()
        finally:
            await engine.close()
