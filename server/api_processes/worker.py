"""An API process: serves HTTP on one listening socket, with the engine of the front process at the other end of a link.

Its arguments are the descriptors of the link, of the listening socket, and of the two channels on which it asks for worker processes.
Invariant: it ends when the link does. It decides nothing about admission, and keeps nothing that another API process could not make again.
"""

import asyncio
import contextlib
import gc
import os
import socket
import sys
from pathlib import Path

from model.spec import CheckpointError
from server import api_protocol, child_process, logs
from server.api_processes.link import Link
from server.api_processes.moved_streams import MovedStreams
from server.config import ServerSection
from server.errors import ConfigurationError, OneheadError
from server.generation.clients import Terms
from server.generation.generation import Generation
from server.generation.remote_client import RemoteEngineClient
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.loop_lag import LoopLag
from server.service import read_texts
from server.text.service import TextService
from server.text.workers import SharedWorkers
from server.web_server import WebServer

LOST_FRONT_PROCESS = 1
"""Exit status of an API process whose front process has ended."""


class Worker:
    """What an API process does with the messages of its front process."""

    def __init__(self, begin: api_protocol.Begin, sink: logs.Sink, lag: LoopLag) -> None:
        self._begin = begin
        self._sink = sink
        self._lag = lag
        self._link = Link(api_protocol.decode_to_api, self._on_message, self._on_lost)
        self._client = RemoteEngineClient(begin.max_open, begin.status, self._link.send)
        self._section = ServerSection.model_validate_json(begin.section)
        self._finish = asyncio.Event()
        self._is_finished = False
        self._keys = Keys((), None)
        self._web: WebServer | None = None

    async def run(self, link: socket.socket, listener: socket.socket, channels: list[socket.socket]) -> None:
        """Serves until the front process says that it is to finish. Raises OneheadError if it cannot serve."""
        begin, loop = self._begin, asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._link, sock=link)
        try:
            texts = read_texts(Path(begin.model), self._section)
            service = TextService(texts, self._section, SharedWorkers(*begin.places, *channels))
            self._set_keys(begin.keys)
            generation = Generation(self._client, service, self._section)
            names = ModelNames(tuple(begin.model_names), frozenset(begin.other_names))
            web = WebServer(generation, self._section, self._keys, names, listener)
        except (OneheadError, CheckpointError) as error:
            code = error.exit_code if isinstance(error, OneheadError) else ConfigurationError.exit_code
            self._link.send(api_protocol.CannotServe(str(error), code))
            return
        self._texts, self._web = service, web
        self._use(self._client.state)
        web.publisher.elsewhere = MovedStreams(self._client, web.publisher, web.door)
        gc.collect()
        gc.freeze()
        self._lag.start(loop)
        web.start()
        await web.started()
        self._link.send(api_protocol.Listening())
        while not self._finish.is_set():
            self._tell_stats(web)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._finish.wait(), 1.0)
            web.sweep()
        cut = await web.ended()
        self._tell_stats(web)
        self._link.send(api_protocol.Finished(cut))

    def _tell_stats(self, web: WebServer) -> None:
        """Sends what this process counts."""
        stats = web.stats()
        message = api_protocol.ApiStats(
            event_loop_lag=self._lag.longest(),
            streams_detached=stats.streams_detached,
            resume_bytes=stats.resume_bytes,
            log_lines_dropped=self._sink.num_dropped,
            refused=self._client.num_refused,
        )
        self._link.send(message)

    def _on_message(self, message: api_protocol.ToApi) -> None:
        match message:
            case api_protocol.Finish():
                if self._web is None:  # It has answered nothing yet.
                    os._exit(0)
                self._web.end(message.timeout)
                self._finish.set()
            case api_protocol.Reload():
                self._set_keys(message.keys)
                if self._web is not None:
                    self._web.reload()
            case api_protocol.DropStream():
                if self._web is not None and (writer := self._web.publisher.writers.get(message.stream)) is not None:
                    writer.drop()
            case api_protocol.EngineStatus():
                self._use(message)
            case api_protocol.Begin():
                raise AssertionError("it comes once")
            case _:
                self._client.on_message(message)

    def _use(self, status: api_protocol.EngineStatus) -> None:
        self._client.state = status
        if self._web is not None:
            self._texts.cheap_template = status.cheap_template

    def _set_keys(self, keys: dict[str, api_protocol.Terms] | None) -> None:
        self._keys.terms = None if keys is None else {digest: Terms.of_list(terms) for digest, terms in keys.items()}

    async def finished(self) -> None:
        """Sends what is left, and closes the link."""
        self._is_finished = True
        self._link.close()
        await self._link.closed.wait()

    def _on_lost(self) -> None:
        if not self._is_finished:
            os._exit(LOST_FRONT_PROCESS)


def _receive_begin(link: socket.socket) -> api_protocol.Begin:
    """The first message."""
    length = int.from_bytes(_receive(link, 4), "big")
    message = api_protocol.decode_to_api(_receive(link, length))
    assert isinstance(message, api_protocol.Begin)
    return message


def _receive(link: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, and none of the messages after them."""
    data = b""
    while len(data) < num_bytes:
        data += (part := link.recv(num_bytes - len(data)))
        if not part:
            raise SystemExit(LOST_FRONT_PROCESS)
    return data


async def _serve(begin: api_protocol.Begin, sink: logs.Sink, lag: LoopLag, *sockets: socket.socket) -> None:
    link, listener, *channels = sockets
    worker = Worker(begin, sink, lag)
    await worker.run(link, listener, channels)
    await worker.finished()


def main() -> None:
    """Runs the process."""
    child_process.ignore_signals()
    link, *others = [socket.socket(fileno=int(argument)) for argument in sys.argv[1:]]
    begin = _receive_begin(link)
    section = ServerSection.model_validate_json(begin.section)
    sink = logs.configure(section.log_level, section.log_format)
    lag = LoopLag()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(lag)) as runner:
        runner.run(_serve(begin, sink, lag, link, *others))


if __name__ == "__main__":
    main()
