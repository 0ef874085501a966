"""`onehead serve`: the HTTP server over a supervised engine process, from start-up to the exit after a drain.

Invariant: the port is bound before the model is loaded, and the engine process has ended when `serve` returns.
"""

import signal
import socket

from server import logs
from server.config import ServeSettings
from server.errors import ResourceError
from server.front_process import FrontProcess
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.http.tls import check_certificate
from server.hub.download import model_id
from server.loop_lag import LoopLag
from server.service import started_engine


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ResourceError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ResourceError(f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port or --host") from None
    return listener


def _leave(*_: object) -> None:
    """Ends a server that has accepted nothing yet; once WebServer runs, it drains instead."""
    raise SystemExit(0)


async def serve(settings: ServeSettings, sink: logs.Sink, lag: LoopLag) -> int:
    """Serves until a signal, or until the engine is given up. Returns the exit status. `lag` is the selector of the running event loop.
    Raises OneheadError if it cannot serve.
    """
    section = settings.server
    with bind(settings.host, settings.port) as listener:
        name = model_id(settings.model)
        names = ModelNames.of((section.model_name or name, *section.served_model_names), (settings.given, name))
        if section.tls_certificate and section.tls_key:
            check_certificate(section.tls_certificate, section.tls_key)
        keys = Keys(section.api_keys, section.api_keys_file)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # Else it is ignored, and stays so.
            signal.signal(signal.SIGTERM, _leave)
        engine = started_engine(settings, section, names.shown)
        try:
            # FastAPI and uvicorn are imported while the engine process imports torch.
            from server.web_server import WebServer

            servers = WebServer(engine.generation, section, keys, names, listener)
            address = listener.getsockname()[:2]
            return await FrontProcess(engine, section, servers, address, names.shown, keys.terms is not None, sink, lag).run()
        finally:
            await engine.close()
