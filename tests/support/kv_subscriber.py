"""A subscriber of KV events, as a process of its own: it asks for messages that it misses, and says
which blocks it knows.

    python -m tests.support.kv_subscriber ADDRESS REPLAY_ADDRESS TOPIC LOSES CALLER

Invariant: it never stops receiving. A line of standard input is the number of a message, and is
answered with a line of JSON: the blocks after that message, which may have come long before. It
loses a share LOSES of what comes. CALLER is what stands before a client's salt where the server
computes hashes. It imports nothing of the server.
"""

import json
import random
import subprocess
import sys
import time
from collections import Counter, deque
from types import TracebackType
from typing import Any, Self

import zmq

from tests.support.block_index import BlockIndex
from tests.support.paths import ROOT

END = 2**64 - 1
REPLAY_SECONDS = 10.0
NO_KEY = ":"
"""What stands before the salts of clients without a key."""


class Receiver:
    """The sockets, and the messages that no question has passed yet."""

    def __init__(self, address: str, replay: str, topic: str, loses: float) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.set_hwm(0)
        self.socket.connect(address)
        self.socket.subscribe(topic)
        self._replay, self._topic, self._loses = replay, topic.encode(), loses
        self._rng = random.Random(1)
        self.last = -1
        self.waiting: deque[tuple[int, bytes]] = deque()
        self.seen: Counter[str] = Counter()

    def receive(self) -> None:
        """Takes one message."""
        topic, number, content = self.socket.recv_multipart()
        assert topic == self._topic and len(number) == 8
        if self._rng.random() < self._loses:
            self.seen["lost"] += 1
        else:
            self.add(int.from_bytes(number), content)

    def add(self, number: int, content: bytes) -> None:
        if number > self.last + 1:
            self.seen["gaps"] += 1
            self.ask()
        if number > self.last:
            self._append(number, content)

    def _append(self, number: int, content: bytes) -> None:
        self.last = number
        self.waiting.append((number, content))

    def ask(self) -> None:
        """Asks for all messages after the last one."""
        first, num_replayed, end = self.last + 1, 0, time.monotonic() + REPLAY_SECONDS
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.set_hwm(0)
            socket.connect(self._replay)
            socket.send_multipart((b"", first.to_bytes(8)))
            while time.monotonic() < end:
                if not socket.poll(100):
                    continue
                _, topic, head, content = socket.recv_multipart()
                number = int.from_bytes(head)
                if number == END:
                    assert (topic, content) == (b"", b"")
                    self.seen["replays"] += 1
                    return
                assert topic == self._topic
                self.seen["replays of the whole"] += not num_replayed and number != first
                num_replayed += 1
                if number > self.last:
                    self._append(number, content)
        self.seen["replays without an answer"] += 1


def answer(receiver: Receiver, index: BlockIndex, number: int) -> dict[str, Any]:
    """The blocks after a message, once it has come."""
    quiet, end = 0, time.monotonic() + REPLAY_SECONDS
    while receiver.last < number and time.monotonic() < end:
        if receiver.socket.poll(100):
            receiver.receive()
        else:  # The last ones may be lost, without a gap that shows it.
            quiet += 1
            if quiet > 1:
                receiver.ask()
    problem = ""
    try:
        while receiver.waiting and receiver.waiting[0][0] <= number:
            index.take(*receiver.waiting.popleft())
    except ValueError as error:
        problem = str(error)
    seen = receiver.seen + index.seen
    return {
        "number": index.number,
        "last": receiver.last,
        "blocks": sorted(index.blocks),
        "seen": seen,
        "problem": problem,
    }


def main() -> None:
    address, replay, topic, loses, caller = sys.argv[1:]
    receiver, index = Receiver(address, replay, topic, float(loses)), BlockIndex(caller)
    receiver.ask()
    poller = zmq.Poller()
    poller.register(receiver.socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    print("subscribed", flush=True)
    while True:
        ready = dict(poller.poll())
        if receiver.socket in ready:
            receiver.receive()
        if sys.stdin.fileno() in ready:
            line = sys.stdin.readline()
            if not line:
                return
            print(json.dumps(answer(receiver, index, int(line))), flush=True)


class Subscriber:
    """The process, while it is entered."""

    def __init__(
        self, address: str, replay: str, topic: str = "", loses: float = 0.0, caller: str = NO_KEY
    ) -> None:
        self.seen: Counter[str] = Counter()
        self._command = [
            sys.executable,
            "-m",
            "tests.support.kv_subscriber",
            address,
            replay,
            topic,
            str(loses),
            caller,
        ]

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "subscribed\n"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert status == 0 or error is not None

    def after(self, number: int) -> dict[str, Any]:
        """What it knows after the message of this number."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        return dict(found)

    def problems(self, dump: dict[str, Any]) -> list[str]:
        """How what it knows differs from the state that /monitor/cache has shown."""
        found = self.after(dump["kv_event"])
        right = set(dump["blocks"])
        problems = [found["problem"]] if found["problem"] else []
        if found["number"] != dump["kv_event"]:
            problems.append(
                f"message {dump['kv_event']} has not come, {found['number']} has; the last is "
                f"{found['last']}"
            )
        if set(found["blocks"]) != right:
            problems.append(
                f"{len(found['blocks'])} blocks are known after message {found['number']}, not "
                f"the {len(right)} that are there"
            )
        self.seen = Counter(found["seen"])
        return problems


if __name__ == "__main__":
    main()
