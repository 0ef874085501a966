"""API processes without processes: the production application of each, over one fake engine, with links that are calls of the event loop.

Every message is encoded and decoded as on a socket. It knows no HTTP server.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from server import api_protocol, protocol
from server.api_processes.moved_streams import MovedStreams
from server.api_processes.open_requests import RemoteSequence
from server.api_processes.process_requests import ProcessRequests
from server.api_processes.stream_records import StreamRecords
from server.config import ServerSection
from server.generation.generation import Generation
from server.generation.remote_client import RemoteEngineClient
from server.http.app import create_app
from server.http.keys import Keys
from server.http.stream_buffer import Retention, StreamStore
from server.http.streams import StreamPublisher
from server.supervision.transport import Frames
from server.text.codec import TextCodec
from tests.support.fake_engine import NAMES, FakeEngine, Served, serve
from tests.support.inline_workers import inline_texts


class FakeProcess:
    """One API process. After `die` nothing passes between it and the front process."""

    def __init__(self, front: "FakeFleet", folder: Path, section: ServerSection) -> None:
        self.alive = True
        self.requests = ProcessRequests(front.served.client, front.records, self._to_api, self._frames_to_api)
        status = front.status()
        self.client = RemoteEngineClient(front.served.client.max_open, status, self._to_front)
        generation = Generation(self.client, inline_texts(TextCodec(folder), section), section)
        self.publisher = StreamPublisher(StreamStore(Retention(seconds=0.0)), section.keep_alive)
        self.app = create_app(generation, section, Keys(section.api_keys, None), NAMES, "0", self.publisher)
        self.publisher.elsewhere = MovedStreams(self.client, self.publisher, self.app)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")
        self.sent: list[Any] = []
        """What the front process sent."""

    def _to_front(self, message: api_protocol.FromApi) -> None:
        data = protocol.encode(message)
        asyncio.get_running_loop().call_soon(lambda: self.alive and self._handle(api_protocol.decode_from_api(data)))

    def _handle(self, message: Any) -> None:
        """As processes.ApiProcess does."""
        if isinstance(message, api_protocol.Watch):
            self.requests.watch(message.is_watching)
        else:
            self.requests.on_message(message)

    def _to_api(self, message: api_protocol.ToApi) -> None:
        data = protocol.encode(message)
        asyncio.get_running_loop().call_soon(lambda: self.alive and self._receive(api_protocol.decode_to_api(data)))

    def _frames_to_api(self, frames: bytearray) -> None:
        for message in Frames(api_protocol.decode_to_api).push(bytes(frames)):
            self._to_api(message)

    def _receive(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, api_protocol.DropStream):
            if (writer := self.publisher.writers.get(message.stream)) is not None:
                writer.drop()
        else:
            self.client.on_message(message)

    def die(self) -> None:
        """As the front process sees it."""
        self.alive = False
        self.requests.close()


class FakeFleet:
    """A front process with a fake engine, and its API processes."""

    def __init__(self, folder: Path, engine: FakeEngine | None = None, max_open: int = 64, **options: Any) -> None:
        section = ServerSection(**options)
        self.served: Served = serve(folder, engine, section, max_open)
        self.records = StreamRecords(self.served.client, Retention(section.resume_retention, detach_seconds=section.detach_grace))
        self.served.client.on_started = _tell_started
        self.processes = [FakeProcess(self, folder, section) for _ in range(2)]

    def status(self) -> api_protocol.EngineStatus:
        client = self.served.client
        return api_protocol.EngineStatus(client.ready, client.status, client.accepting, client.healthy, client.draining, True)

    async def ready(self) -> "FakeFleet":
        """Waits for the engine, and tells all processes."""
        while not self.served.client.accepting:
            await asyncio.sleep(0)
        for process in self.processes:
            process.client.state = self.status()
        return self


def _tell_started(sequence: Any) -> None:
    assert isinstance(sequence, RemoteSequence)
    sequence.request.deliver(sequence, protocol.Started([sequence.id], [sequence.num_cached]))
