"""Bytes of the engine's pipe to messages, however they are cut."""

import os
import random
from multiprocessing import Pipe

import msgspec
import pytest

from server import protocol
from server.transport import Frames


def messages(rng: random.Random) -> list[protocol.FromEngine]:
    gauges = protocol.Gauges(1, 2, 3, 4, 0.5)
    kinds = [
        lambda: protocol.Beat(rng.randrange(2**40)),
        lambda: protocol.Tokens([protocol.Token(i, 0, i, -0.5) for i in range(rng.randrange(3000))], gauges),
        lambda: protocol.Failed(1, "x" * rng.randrange(5)),
    ]
    return [rng.choice(kinds)() for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("seed", range(200))
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    sent = messages(rng)
    ours, theirs = Pipe()
    frames, got, data = Frames(), [], b""
    for message in sent:  # By the very pipe that an engine writes to, which takes 64 KiB and more at once.
        theirs.send_bytes(protocol.encode(message))
        data += os.read(ours.fileno(), 2**20)
    while data:
        size = rng.choice((1, 2, 3, 5, 100, len(data)))
        got += list(frames.push(data[:size]))
        data = data[size:]
    assert got == sent


def test_what_is_no_message_is_an_error_and_those_before_it_are_heard() -> None:
    beat = protocol.encode(protocol.Beat(7))
    whole = len(beat).to_bytes(4, "big") + beat
    heard = []
    with pytest.raises(msgspec.MsgspecError):
        for message in Frames().push(whole + (3).to_bytes(4, "big") + b"???"):
            heard.append(message)
    assert heard == [protocol.Beat(7)]


@pytest.mark.parametrize("length", [-1, -(2**31), protocol.MAX_FRAME_BYTES + 1])
def test_a_message_is_refused_by_its_length_before_it_comes(length: int) -> None:
    with pytest.raises(ValueError, match="a message of"):
        list(Frames().push(length.to_bytes(4, "big", signed=True)))
