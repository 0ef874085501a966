"""Load for the tests of the page map, and what a browser's state has to be by the engine's own
lists.

Invariant: `Load` ends all its requests before it returns. It knows nothing of the browser.
"""

import json
import random
import socket
import threading
from contextlib import closing, suppress
from typing import Any, Self

from server.protocol import OWNED, SHARED
from tests.support.processes import DEADLINE, ServerProcess, Stream, wait_until
from tests.support.wire import Wire, http_request

SHARED_PREFIX = "# one prefix for all of them\n" * 30
WORDS = [
    "def",
    "return",
    "import",
    "class",
    "self",
    "value",
    "for",
    "in",
    "range",
    "print",
    "with",
    "open",
    "list",
    "dict",
]


class Load:
    """Clients that send one request after the other: half of them with a common prefix, a third
    left by its client. Outputs are longer than prompts, so that a small cache has to preempt.
    """

    def __init__(self, server: ServerProcess, clients: int) -> None:
        self._port = server.port
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed),))
            for seed in range(clients)
        ]
        self.cancelled = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, rng: random.Random) -> None:
        while not self._stopping.is_set():
            prompt = rng.choice(["", SHARED_PREFIX]) + " ".join(
                rng.choices(WORDS, k=rng.randint(1, 100))
            )
            parameters = {
                "max_new_tokens": rng.randint(1, 800),
                "do_sample": True,
                "ignore_eos": True,
            }
            leaves_after = rng.randint(0, 100) if rng.random() < 0.3 else None
            # The engine or the connection may be taken away, which is another test's matter.
            with suppress(OSError, EOFError, AssertionError):
                self._read(
                    Stream(
                        self._port, "/generate_stream", {"inputs": prompt, "parameters": parameters}
                    ),
                    leaves_after,
                )

    def _read(self, stream: Stream, leaves_after: int | None) -> None:
        for number, _ in enumerate(stream.events()):
            if number == leaves_after:
                self.cancelled += 1
            if number == leaves_after or self._stopping.is_set():
                stream.close()
                return


class Viewer:
    """A bare reader of /monitor, in a thread, which counts the events that it gets."""

    def __init__(self, server: ServerProcess) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)
        self.num_events = 0
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self.socket.sendall(http_request("GET", "/monitor"))
        self._response = Wire(self.socket).response()
        self.status = self._response.status
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # A refused one's connection has ended.
            self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.socket.close()

    def wait_for(self, num_events: int) -> None:
        """Waits until it has got so many events."""
        wait_until(lambda: self.num_events >= num_events, f"{num_events} events for a viewer")

    def _read(self) -> None:
        with suppress(OSError, EOFError, ValueError):  # A refusal is no event.
            for _ in self._response.events():
                self.num_events += 1


def stats_of(server: ServerProcess) -> dict[str, Any]:
    """The first counts that a viewer is sent."""
    with closing(
        socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE)
    ) as connection:
        connection.sendall(http_request("GET", "/monitor"))
        return next(
            dict(json.loads(event.data or ""))
            for event in Wire(connection).response().events()
            if event.kind == "stats"
        )


def dump_of(server: ServerProcess) -> dict[str, Any]:
    """The state of the cache by the allocator's and the sequences' own lists."""
    status, body = server.get("/monitor/cache")
    assert status == 200, body
    return dict(json.loads(body))


def state_of(dump: dict[str, Any]) -> dict[str, Any]:
    """What the browser has to hold: for each page [kind, owner, position], and the sequences that
    it shows pages or tokens of.
    """
    cached = set(dump["cached"])
    pages = [[int(page in cached), -1, 0] for page in range(dump["num_pages"])]
    for id, sequence in sorted(dump["sequences"].items(), key=lambda item: -int(item[0])):
        for group in sequence["pages"]:
            for index, page in enumerate(group):
                if page >= 0:
                    kind = OWNED if dump["owners"][page] == 1 else SHARED
                    pages[page] = [kind, int(id), index * dump["page_size"]]
    sequences = {
        id: [
            one["running"],
            one["num_computed"],
            one["num_output"],
            sum(page >= 0 for group in one["pages"] for page in group),
        ]
        for id, one in dump["sequences"].items()
    }
    return {"pages": pages, "sequences": sequences}
