"""KvPublisher: KV events on ZeroMQ, as vLLM publishes them, for routers that send a request to the
replica which has its prefix.

A PUB socket sends each message as topic, number and content; a ROUTER socket, answered by a thread,
sends again what a subscriber has missed. Invariant: neither waits for a subscriber, and what ZeroMQ
holds for one is bounded; a slow one misses messages, sees that by their numbers, and asks for them.
It knows nothing of sequences and steps.
"""

import threading
import time

from model.spec import OptionError
from server.engine.kv_event_log import KvEventLog, frames
from server.protocol import KvEvents


class KvPublisher:
    """Listens from the start; `number` is that before the first message. Raises OptionError where
    pyzmq is missing or an address cannot be had.
    """

    def __init__(self, options: KvEvents, number: int) -> None:
        try:
            import zmq
        except ImportError:
            raise OptionError(
                "server.kv_events needs pyzmq: pip install 'onehead[events]'"
            ) from None
        self.log = KvEventLog(number)
        self._lock = threading.Lock()
        self._topic = options.topic.encode()
        context = zmq.Context()
        context.maxmsgsize = 1024  # Of requests.
        self._public = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        try:
            self._public.bind(options.address)
            if options.replay:
                self._router.bind(options.replay)
                threading.Thread(target=self._replay, daemon=True).start()
        except zmq.ZMQError as error:
            raise OptionError(
                f"server.kv_events: cannot listen on {options.address} {options.replay}: {error}"
            ) from None

    def publish(self) -> None:
        """Publishes the changes since the last call, if there are any."""
        with self._lock:
            message = self.log.take(time.time())
        if message is not None:
            self._public.send_multipart((self._topic, *frames(*message)))

    def _replay(self) -> None:
        """Answers requests, each the number of the first message that is missing."""
        while True:
            client, *_, number = self._router.recv_multipart()
            with self._lock:
                messages = self.log.since(int.from_bytes(number), time.time())
            for message in messages:
                self._router.send_multipart((client, b"", self._topic, *frames(*message)))
            # The end, with number -1.
            self._router.send_multipart((client, b"", b"", b"\xff" * 8, b""))
