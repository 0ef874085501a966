"""`onehead serve`: HTTP over a supervised engine process, from start-up to the exit after a drain.

Invariant: the port is bound before the model is loaded, and the engine process and all API processes have ended when `serve` returns.
"""

import contextlib
import signal
import socket

from server import logs
from server.config import ServerSection, ServeSettings
from server.errors import ResourceError
from server.front_process import FrontProcess, HttpServers
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.http.tls import check_certificate
from server.hub.download import model_id
from server.loop_lag import LoopLag
from server.service import SupervisedEngine, started_engine
from server.supervision.processors import api_processes


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """A listening socket. One that is `shared` with others on the same address listens when an API process serves it: connections are
    refused until then, so that a proxy tries another server at once. Raises ResourceError if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol: asyncio sets TCP_NODELAY only on connections of such a socket, and without it a response that is written in two
    # parts waits 40 ms for an acknowledgement of the first.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((host, port))
        except OSError:  # Connections of an earlier server may not be over yet.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        if not shared:
            listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ResourceError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port or --host") from None
    return listener


def bind_several(host: str, port: int, count: int) -> list[socket.socket]:
    """So many sockets on one address; the kernel distributes connections among those that listen. Raises ResourceError, also where another
    server has shared sockets there.
    """
    # The first socket is refused where any server has the address, also one that is loading: its shared sockets, which do not listen yet,
    # are bound without SO_REUSEADDR.
    with bind(host, port) as first:
        port = first.getsockname()[1]
    return [bind(host, port, shared=True) for _ in range(count)]


def _leave(*_: object) -> None:
    """Ends a server that has accepted nothing yet; once FrontProcess runs, it drains instead."""
    raise SystemExit(0)


def _servers(
    engine: SupervisedEngine, settings: ServeSettings, keys: Keys, names: ModelNames, listeners: list[socket.socket]
) -> HttpServers:
    """What serves HTTP on these sockets: this process if there is one, else as many API processes."""
    if len(listeners) == 1:
        # FastAPI and uvicorn are imported while the engine process imports torch.
        from server.web_server import WebServer

        return WebServer(engine.generation, settings.server, keys, names, listeners[0])
    from server.api_processes.processes import ApiProcesses
    from server.api_processes.settings import ApiSettings

    return ApiProcesses(engine, settings.server, ApiSettings(engine, settings, keys, names, len(listeners)), listeners)


async def serve(settings: ServeSettings, sink: logs.Sink, lag: LoopLag) -> int:
    """Serves until a signal, or until the engine is given up. Returns the exit status. `lag` is the selector of the running event loop.
    Raises OneheadError if it cannot serve.
    """
    section: ServerSection = settings.server
    count = api_processes(section.api_processes, settings.engine.device)
    with contextlib.ExitStack() as stack:
        listeners = [bind(settings.host, settings.port)] if count == 1 else bind_several(settings.host, settings.port, count)
        for listener in listeners:
            stack.enter_context(listener)
        address = listeners[0].getsockname()[:2]
        name = model_id(settings.model)
        names = ModelNames.of((section.model_name or name, *section.served_model_names), (settings.given, name))
        if section.tls_certificate and section.tls_key:
            check_certificate(section.tls_certificate, section.tls_key)
        keys = Keys(section.api_keys, section.api_keys_file)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # Else it is ignored, and stays so.
            signal.signal(signal.SIGTERM, _leave)
        engine = started_engine(settings, section, names.shown)
        try:
            servers = _servers(engine, settings, keys, names, listeners)
            return await FrontProcess(engine, section, servers, keys, address, names.shown, sink, lag).run()
        finally:
            await engine.close()
