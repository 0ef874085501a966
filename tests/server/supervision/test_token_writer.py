"""TokenWriter: what its thread writes equals what Python would write, in order and once, and all else reaches Python as it came."""

import asyncio
import json
import random
import select
import socket
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest

from server import protocol
from server.supervision.engine import PlainStream
from server.supervision.token_writer import COUNT, LOGPROB, TEXT, TOKEN_ID, ClientSocket, TokenTexts, TokenWriter, library

pytestmark = pytest.mark.skipif(library() is None, reason="the token writer was not compiled")

WORDS = ["zero", 'quote " and \\', "line\nbreak", "\u00e9\u4e2d\U0001f600", "\x01\x7f", " space", "stop!"]
GAUGES = protocol.Gauges(1, 0, 1, 0, 0.01)
TEMPLATE = b"data: " + msgspec.json.encode({"n": COUNT, "id": TOKEN_ID, "text": TEXT, "logprob": LOGPROB}) + b"\n\n"


class Scene:
    """A writer between an engine's pipe and one client, both in the test's hands."""

    def __init__(self) -> None:
        engine, ours = socket.socketpair()
        self.pipe = Connection(engine.detach())
        self.texts = TokenTexts(len(WORDS))
        for id, word in enumerate(WORDS):
            self.texts.set(id, word)
        self.writer = TokenWriter(ours, self.texts)
        ours.close()
        self.server, self.reader = socket.socketpair()
        self.rest = b""
        self.client = ClientSocket(self.server.fileno(), self._write)
        self.reader.setblocking(False)

    def _write(self, data: bytes) -> None:
        self.rest += data

    def add(self, id: int = 1, next_index: int = 0, stop_bytes: bytes = b"", num_tokens: int = 0) -> None:
        self.sequence = self.writer.add(id, next_index, PlainStream(self.client, num_tokens, time.monotonic(), TEMPLATE, stop_bytes))

    def say(self, *tokens: protocol.Token) -> None:
        self.pipe.send_bytes(protocol.encode(protocol.Tokens(list(tokens), GAUGES)))

    def taken(self, count: int = 1) -> list[protocol.FromEngine]:
        """So many messages that Python gets."""
        found: list[protocol.FromEngine] = []
        while len(found) < count:
            assert select.select([self.writer.event], [], [], 10.0)[0], "Python gets nothing"
            found += map(protocol.decode_from_engine, self.writer.take() or ())
        return found

    def settle(self) -> list[protocol.FromEngine]:
        """All messages that Python gets of what was said so far."""
        self.pipe.send_bytes(protocol.encode(protocol.Heartbeat(77)))
        found = self.taken()
        while found[-1] != protocol.Heartbeat(77):
            found += self.taken()
        return found[:-1]

    def received(self) -> bytes:
        """What the client has received."""
        data = b""
        while select.select([self.reader], [], [], 0.05)[0]:
            data += self.reader.recv(2**20)
        return data

    def received_now(self) -> bytes:
        """What the client has received, without waiting."""
        data = b""
        while select.select([self.reader], [], [], 0)[0]:
            data += self.reader.recv(2**20)
        return data

    def close(self) -> None:
        self.pipe.close()
        while self.writer.take() is not None:
            time.sleep(0.001)
        self.client.close()
        self.server.close()
        self.reader.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def token(index: int, id: int, sequence: int = 1, logprob: float = -0.5, **fields: Any) -> protocol.Token:
    return protocol.Token(sequence, index, id, logprob, **fields)


def chunks(data: bytes) -> list[bytes]:
    """The chunks of a body of HTTP/1.1."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n")
        length = int(head, 16)
        assert rest[length : length + 2] == b"\r\n"
        found.append(rest[:length])
        data = rest[length + 2 :]
    return found


def event(number: int, id: int, logprob: float = -0.5) -> bytes:
    """What Python would write."""
    return b"data: " + msgspec.json.encode({"n": number, "id": id, "text": WORDS[id], "logprob": logprob}) + b"\n\n"


def test_plain_tokens_are_written_as_python_writes_them(scene: Scene) -> None:
    scene.add(num_tokens=3)
    scene.client.release()
    for index, id in enumerate(range(len(WORDS))):
        scene.say(token(index, id))
    assert scene.settle() == []
    assert b"".join(chunks(scene.received())) == b"".join(event(4 + id, id) for id in range(len(WORDS)))
    assert scene.sequence.collect()[0] == list(range(len(WORDS))) and scene.sequence.collect()[0] == []
    counts = scene.writer.take_counts()
    assert counts.num_tokens == sum(counts.between_tokens) == sum(counts.steps) == len(WORDS) and counts.gauges == GAUGES
    assert scene.client.last_write > time.monotonic() - 5.0


def test_numbers_are_written_as_msgspec_writes_them(scene: Scene) -> None:
    rng = random.Random(0)
    values = [0.0, -0.0, -1e-5, -9.9999e-6, 1e15, 1e16, -1e22, 123456.0, 5e-324, 1.7976931348623157e308, float("-inf"), float("nan")]
    values += [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(3000)]
    values += [struct.unpack("<f", struct.pack("<f", -rng.expovariate(0.3)))[0] for _ in range(3000)]
    scene.add()
    scene.client.release()
    received = b""
    for begin in range(0, len(values), 100):
        for index in range(begin, min(begin + 100, len(values))):
            scene.say(token(index, 0, logprob=values[index]))
        assert scene.settle() == []
        received += scene.received()
    expected = [event(index + 1, 0, value) for index, value in enumerate(values)]
    assert b"".join(chunks(received)).split(b"\n\n")[:-1] == [each.removesuffix(b"\n\n") for each in expected]


def test_python_gets_what_is_not_plain_and_all_that_follows_it(scene: Scene) -> None:
    last, top = token(9, 0, finish="length"), token(9, 0, top=((1, -1.0),))
    for special in (token(9, 99), token(9, 6), last, top, token(8, 0), token(10, 0)):
        scene.add(next_index=9, stop_bytes=b"!", num_tokens=9)
        scene.client.release()
        scene.say(special)
        scene.say(token(10, 0))
        (first, second) = scene.settle()
        assert first.tokens == [special] and second.tokens == [token(10, 0)] and first.gauges == GAUGES
        assert scene.received() == b"" and scene.sequence.collect()[0] == []
        scene.writer.remove(1)


def test_tokens_of_other_sequences_and_other_messages_reach_python(scene: Scene) -> None:
    scene.add()
    scene.client.release()
    scene.say(token(0, 0), token(5, 3, sequence=2), token(7, 1, sequence=3))
    scene.pipe.send_bytes(protocol.encode(protocol.Started([4], [0])))
    rest, started = scene.settle()
    assert rest.tokens == [token(5, 3, sequence=2), token(7, 1, sequence=3)] and started == protocol.Started([4], [0])
    assert b"".join(chunks(scene.received())) == event(1, 0)


def test_a_held_client_gets_nothing_and_what_python_has_not_taken_is_written_at_its_release(scene: Scene) -> None:
    scene.add()
    scene.client.release()
    scene.say(token(0, 0))
    assert scene.settle() == []
    scene.client.hold()
    scene.say(token(1, 1))
    scene.say(token(2, 2))
    scene.say(token(3, 99))
    scene.say(token(4, 4))
    time.sleep(0.05)
    assert b"".join(chunks(scene.received())) == event(1, 0)
    # Python took none of them and says so.
    assert scene.sequence.collect()[0] == [0]
    scene.add(next_index=1, num_tokens=1)
    scene.client.release()
    assert b"".join(chunks(scene.received())) == event(2, 1) + event(3, 2) and scene.sequence.collect()[0] == [1, 2]
    # It ignores those then, and handles the token whose text is not known, after which the next one waits for it.
    assert [message.tokens[0].index for message in scene.settle()] == [1, 2, 3, 4]
    scene.add(next_index=4, num_tokens=4)
    scene.client.release()
    assert b"".join(chunks(scene.received())) == event(5, 4)


def test_what_a_socket_does_not_take_is_left_to_python(scene: Scene) -> None:
    scene.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    scene.add()
    scene.client.release()
    count = 2000
    for index in range(count):
        scene.say(token(index, 3))
    left = [each for message in scene.settle() for each in message.tokens]
    # The rest of the write came to Python, before any token after it.
    written = scene.sequence.collect()[0]
    received = b""
    while data := scene.received():
        received += data
    assert (
        left and scene.rest and written == [3] * (count - len(left)) and [each.index for each in left] == list(range(len(written), count))
    )
    assert b"".join(chunks(received + scene.rest)) == b"".join(event(index + 1, 3) for index in range(len(written)))


def test_a_client_is_not_released_while_bytes_of_it_are_unsent(scene: Scene) -> None:
    scene.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    scene.add()
    scene.client.release()
    for index in range(300):
        scene.say(token(index, 3))
    time.sleep(0.1)
    written = scene.sequence.collect()[0]
    assert len(written) < 300
    received = scene.received()  # There is room again, and Python has not taken what was queued.
    scene.add(next_index=len(written), num_tokens=len(written))
    scene.client.release()
    assert scene.received() == b""
    scene.client.hold()
    assert b"".join(chunks(received + scene.rest)).startswith(b"".join(event(index + 1, 3) for index in range(len(written))))


def test_a_closed_socket_is_written_to_no_more(scene: Scene) -> None:
    scene.add()
    scene.client.release()
    scene.client.close()
    scene.say(token(0, 0))
    assert [message.tokens for message in scene.settle()] == [[token(0, 0)]]
    assert scene.writer.add(2, 0, PlainStream(scene.client, 0, 0.0, TEMPLATE, b"")) is None
    scene.client.hold()
    scene.client.release()
    assert scene.client.last_write == 0.0 and scene.received() == b""


def test_a_client_that_is_gone_ends_nothing(scene: Scene) -> None:
    scene.add()
    scene.client.release()
    scene.reader.close()
    scene.say(token(0, 0))
    assert scene.settle() == []
    scene.say(token(1, 0))
    # What could not be sent is Python's to write, which finds that the connection is lost, and so are the tokens after it.
    assert chunks(scene.rest) == [event(1, 0)] and [message.tokens for message in scene.settle()] == [[token(1, 0)]]
    scene.client.release()
    scene.say(token(2, 0))
    assert [message.tokens for message in scene.settle()] == [[token(2, 0)]]
    scene.reader = socket.socket()


def test_the_thread_waits_for_python_once_a_megabyte_is_queued(scene: Scene) -> None:
    sender = socket.socket(fileno=scene.pipe.fileno())
    sender.setblocking(False)
    data = protocol.encode(protocol.Tokens([token(0, 0, sequence=9)] * 1000, GAUGES))
    framed, sent = struct.pack("!i", len(data)) + data, 0
    end = time.monotonic() + 2.0
    while time.monotonic() < end and sent < 2**25:
        try:
            assert sender.send(framed) == len(framed)
            sent += len(framed)
        except BlockingIOError:
            time.sleep(0.01)
        except AssertionError:
            break  # A part of a message was taken: the pipe is full.
    sender.detach()
    assert 2**20 <= sent < 2**22


@pytest.mark.parametrize("part", range(4))
def test_messages_that_no_engine_sends_reach_python_as_they_came(scene: Scene, part: int) -> None:
    scene.add()
    scene.client.release()
    rng = random.Random(part)
    whole = protocol.encode(protocol.Tokens([token(0, 0), token(0, 1, sequence=2, top=((1, -1.0),))], GAUGES))
    sent = []
    for _ in range(500):
        broken = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(9, len(broken))] = rng.randrange(256)
        broken = broken[: rng.randint(8, len(broken))] if rng.random() < 0.5 else broken
        scene.pipe.send_bytes(broken)
        sent.append(bytes(broken))
    scene.pipe.send_bytes(protocol.encode(protocol.Heartbeat(77)))
    got: list[bytes] = []
    while not got or got[-1] != protocol.encode(protocol.Heartbeat(77)):
        select.select([scene.writer.event], [], [], 10.0)
        got += scene.writer.take() or ()
    assert len(got) > 100 and {*got} & {*sent}
    for data in chunks(scene.received()):
        assert json.loads(data.removeprefix(b"data: "))["text"] in WORDS


def test_a_message_that_is_too_long_is_an_empty_one_and_the_last(scene: Scene) -> None:
    raw = socket.socket(fileno=scene.pipe.fileno())
    raw.send(struct.pack("!i", protocol.MAX_FRAME_BYTES + 1) + b"x" * 100)
    raw.detach()
    assert select.select([scene.writer.event], [], [], 10.0)[0]
    assert list(scene.writer.take() or ()) == [b""]


def test_the_end_of_the_pipe_is_told_after_what_came_before_it(scene: Scene) -> None:
    scene.pipe.send_bytes(protocol.encode(protocol.Heartbeat(1)))
    scene.pipe.close()
    time.sleep(0.1)
    assert scene.taken() == [protocol.Heartbeat(1)]
    assert select.select([scene.writer.event], [], [], 10.0)[0] and scene.writer.take() is None


def test_nothing_is_written_after_discard(scene: Scene) -> None:
    scene.add()
    scene.client.release()
    scene.writer.discard()
    scene.say(token(0, 0))
    time.sleep(0.05)
    assert scene.received() == b"" and list(scene.writer.take() or ()) == [] and scene.sequence.collect()[0] == []


async def test_any_order_of_holds_releases_and_takes_gives_every_token_once() -> None:
    """Python and the thread write in turns, as a response does, while an engine sends as fast as it can."""
    for seed in range(20):
        rng, scene = random.Random(seed), Scene()
        loop, output, written = asyncio.get_running_loop(), list[int](), b""
        expected = [rng.choice((0, 1, 2, 3, 4, 5, 99)) for _ in range(rng.randint(1, 400))]

        def speak(scene: Scene = scene, expected: list[int] = expected) -> None:
            for index, id in enumerate(expected):
                scene.say(token(index, id))

        speaking = loop.run_in_executor(None, speak)
        scene.add()
        scene.client.release()
        while len(output) < len(expected):
            scene.client.hold()
            output += scene.sequence.collect()[0]
            for data in scene.writer.take() or ():
                for each in protocol.decode_from_engine(data).tokens:  # type: ignore[union-attr]
                    if each.index == len(output):
                        output.append(each.token)
                        line = b"data: " + str(each.token).encode() + b"\n\n"
                        written += scene.received_now()
                        scene.server.sendall(b"%x\r\n%b\r\n" % (len(line), line))
            if rng.random() < 0.8:
                scene.add(next_index=len(output), num_tokens=len(output))
                scene.client.release()
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
            written += scene.received_now()
            scene.client.hold()
            output += scene.sequence.collect()[0]
        await speaking
        written += scene.received()
        ids = [json.loads(each[6:]) for each in b"".join(chunks(written)).split(b"\n\n")[:-1]]
        assert output == expected and [each if isinstance(each, int) else each["id"] for each in ids] == expected
        scene.close()
