"""KV events on real sockets: what is missed is asked for and sent again, a slow subscriber costs
bounded memory, and no time.
"""

import os
import random
import sys
import time
from collections.abc import Iterator

import pytest
import zmq

from cache.prefix import Link, add_link
from model.spec import OptionError
from server.engine.cache_view import CacheViews
from server.engine.kv_event_log import KEPT
from server.engine.kv_events import KvPublisher
from server.protocol import KvEvents, Look
from tests.server.engine.test_core import OverlappedHistory
from tests.server.engine.test_scheduler import History
from tests.support.kv_subscriber import END, Subscriber
from tests.support.report import usage
from tests.trials.recorded_corpus import free_port

TOPIC = "kv@10.0.0.1@model"
PAGE = 16
MOMENTS = 120
FEW = MOMENTS // 20
SMALL_POOL = 98
"""A history of 12 pages and up to 6 sequences that run."""


def addresses() -> KvEvents:
    return KvEvents(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}", TOPIC)


@pytest.fixture
def options() -> KvEvents:
    return addresses()


@pytest.fixture
def publisher(options: KvEvents) -> Iterator[KvPublisher]:
    publisher = KvPublisher(options, -1)
    publisher.publish()
    yield publisher
    publisher._public.close()


class Blocks:
    """Blocks that come and go: `per_message` come with each message, as much of one sequence, and
    all but the latest 50 go.
    """

    def __init__(self, publisher: KvPublisher, per_message: int = 1) -> None:
        self.publisher, self.per_message = publisher, per_message
        self.names: list[bytes] = []
        self.number = 0

    def publish(self, count: int) -> float:
        """Publishes so many messages. Returns the longest time that one took."""
        longest = 0.0
        for _ in range(count):
            self.number += 1
            links = list[Link]()
            add_link(links, ":", [self.number] * PAGE * self.per_message)
            self.names.extend(link.name for link in links)
            gone, self.names = self.names[:-50], self.names[-50:]
            self.publisher.log.changes.extend([*links, *gone])
            began = time.perf_counter()
            self.publisher.publish()
            longest = max(longest, time.perf_counter() - began)
        return longest

    @property
    def dump(self) -> dict[str, object]:
        return {
            "blocks": [int.from_bytes(name[-8:]) for name in self.names],
            "kv_event": self.publisher.log.number,
        }


@pytest.mark.parametrize("loses", [0.0, 0.3, 0.999])
def test_a_subscriber_knows_the_blocks_whatever_it_loses(
    publisher: KvPublisher, options: KvEvents, loses: float
) -> None:
    """With 0.999 it loses more than is kept, and is sent the state."""
    blocks = Blocks(publisher)
    with Subscriber(options.address, options.replay, TOPIC, loses) as subscriber:
        for _ in range(3):
            blocks.publish(2 * KEPT)
            assert subscriber.problems(blocks.dump) == []
        # One that loses nothing itself may still be too slow for what ZeroMQ holds for it.
        assert subscriber.seen["gaps"] or loses != 0.3
        assert (
            subscriber.seen["replays"] >= 1 + (loses > 0)
            and subscriber.seen["replays without an answer"] == 0
        )
        assert loses < 0.9 or subscriber.seen["replays of the whole"], subscriber.seen


def test_a_late_subscriber_gets_the_state(publisher: KvPublisher, options: KvEvents) -> None:
    """Of messages that are all kept, and of more."""
    blocks = Blocks(publisher)
    for count in (10, 2 * KEPT):
        blocks.publish(count)
        with Subscriber(options.address, options.replay, TOPIC) as subscriber:
            assert subscriber.problems(blocks.dump) == []


def test_a_subscriber_that_does_not_read_costs_no_time_and_bounded_memory(
    publisher: KvPublisher, options: KvEvents
) -> None:
    context = zmq.Context()
    with context, context.socket(zmq.SUB) as stuck:
        stuck.set_hwm(10)
        stuck.linger = 0
        stuck.connect(options.address)
        stuck.subscribe(TOPIC)
        # Together more bytes than the kernel buffers of a connection, of up to 10 MiB.
        blocks = Blocks(publisher, per_message=20)
        while not stuck.poll(10):
            blocks.publish(1)
        blocks.publish(5 * KEPT)
        before = usage(os.getpid())
        longest = blocks.publish(40 * KEPT)
        after = usage(os.getpid())
        assert before is not None and after is not None and after.rss - before.rss < 20 * 2**20
        assert longest < 0.5, "publishing waits for no subscriber, only for the processor"
        numbers = []
        while stuck.poll(200):
            numbers.append(int.from_bytes(stuck.recv_multipart()[1]))
        blocks.publish(1)
        assert stuck.poll(5000)
        numbers.append(int.from_bytes(stuck.recv_multipart()[1]))
        assert numbers == sorted(numbers) and numbers[-1] == publisher.log.number
        assert len(numbers) < numbers[-1] - numbers[0], "it sees that messages are missing"


@pytest.mark.parametrize(
    "request_",
    [[b"", b""], [b"x"], [b"", b"not a number of eight bytes"], [b""], [b"", b"x" * 2000]],
    ids=str,
)
def test_strange_requests_harm_nobody(
    publisher: KvPublisher, options: KvEvents, request_: list[bytes]
) -> None:
    context = zmq.Context()
    with context:
        for frames in (request_, [b"", (0).to_bytes(8)]):
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = 0
                dealer.connect(options.replay)
                dealer.send_multipart(frames)
                last = -1
                while last != END and dealer.poll(5000 if frames is not request_ else 300):
                    last = int.from_bytes(dealer.recv_multipart()[-2])
        assert last == END


def test_the_library_is_asked_for_by_its_extra(
    options: KvEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(OptionError, match=r"pip install 'onehead\[events\]'"):
        KvPublisher(options, -1)


@pytest.mark.filterwarnings(
    "ignore:Unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_an_address_in_use_is_refused(publisher: KvPublisher, options: KvEvents) -> None:
    for again in (
        KvEvents(options.address),
        KvEvents(addresses().address, options.replay),
        KvEvents("tcp://nonsense"),
    ):
        with pytest.raises(
            OptionError,
            match=f"server.kv_events: cannot listen on {again.address} {again.replay}: ",
        ):
            KvPublisher(again, -1)


@pytest.mark.parametrize("kind", [History, OverlappedHistory])
@pytest.mark.parametrize("loses", [0.0, 0.3])
def test_a_subscriber_knows_the_blocks_at_random_moments_of_a_long_history(
    kind: type[History], loses: float, options: KvEvents
) -> None:
    """With cancellations and preemptions. The engine's own lists are those that /monitor/cache
    shows.
    """
    history = kind(SMALL_POOL)
    scheduler, rng, publisher = history.scheduler, random.Random(1), KvPublisher(options, -1)
    views = CacheViews(scheduler, publisher.log)
    scheduler.prefixes.on_change = publisher.log.changes.append
    publisher.publish()
    with Subscriber(options.address, options.replay, TOPIC, loses, caller="") as subscriber:
        moments, blocks, num_changed = 0, set[int](), 0
        while moments < MOMENTS:
            if len(scheduler.waiting) < 4:
                history.submit()
            if scheduler.has_work and rng.random() < 0.02:
                history.cancel()
            history.step()
            publisher.publish()
            if rng.random() < 0.2:
                dump = views.answer(Look(dump=True)).dump
                assert dump is not None and subscriber.problems(dump) == []
                moments = moments + 1
                num_changed = num_changed + (blocks != set(dump["blocks"]))
                blocks = set(dump["blocks"])
    publisher._public.close()
    assert (
        num_changed > MOMENTS / 2
        and scheduler.num_preemptions > FEW
        and len(history.cancelled) > FEW
    )
    assert min(subscriber.seen[kind] for kind in ("BlockStored", "BlockRemoved")) > MOMENTS
    assert (subscriber.seen["gaps"] > FEW) is (loses > 0) and not subscriber.seen[
        "replays without an answer"
    ]
