"""Bounds on what one client may have open, waiting or use in a minute: others are admitted
meanwhile, and a refusal says when to return.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from server.config import ServerSection
from server.errors import InvalidRequest, Overloaded, RequestError
from server.generation.admission import Admission, Reservation
from server.generation.clients import Terms
from server.generation.request import Choice, Request
from server.metrics import Metrics
from server.protocol import Sampling
from server.supervision.supervisor import State


class Office:
    """An Admission over a supervisor that only counts, with a clock of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, max_running: int = 2, **options: Any
    ) -> None:
        self.now = 1000.0
        monkeypatch.setattr("server.generation.admission.time.monotonic", lambda: self.now)
        monkeypatch.setattr("server.generation.admission.random.uniform", lambda low, high: low)
        self.supervisor: Any = SimpleNamespace(state=State.READY, recovery_overdue=False, open={})
        supervisor: Any = self.supervisor
        self.admission = Admission(supervisor, Metrics(), ServerSection(**options), max_running)

    def enter(
        self, client: str, count: int = 1, num_prompt: int = 10, num_output: int = 20, **terms: Any
    ) -> list[Choice]:
        """One request. Raises as `reserve` and `check` do."""
        reservation = self.admission.reserve("", client, Terms(**terms))
        reservation.release()
        self.admission.check(reservation.usage, count, count * num_prompt)
        return [self.open(reservation, num_prompt, num_output) for _ in range(count)]

    def open(self, reservation: Reservation, num_prompt: int, num_output: int) -> Choice:
        choice = Choice(num_prompt, num_output, 0, Request([], Sampling()))
        choice.id = len(self.supervisor.open) + 1 + 1000 * len(self.admission.waiting)
        self.supervisor.open[choice.id] = choice
        self.admission.add(choice, reservation.usage)
        return choice

    def end(self, choice: Choice, num_tokens: int) -> None:
        choice.num_tokens = num_tokens
        self.supervisor.open.pop(choice.id)
        self.admission.remove(choice)

    def refusal(self, client: str, **named: Any) -> RequestError:
        with pytest.raises(RequestError) as error:
            self.enter(client, **named)
        return error.value

    def fill(self, client: str) -> int:
        """How many requests of a client are admitted until one is refused."""
        count = 0
        while True:
            try:
                self.enter(client)
            except Overloaded:
                return count
            count += 1


@pytest.mark.parametrize(("max_running", "max_waiting"), [(2, 22), (64, 1024), (1, 2), (8, 16)])
def test_one_client_cannot_hold_every_place_nor_can_several(
    max_running: int, max_waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Office(monkeypatch, max_running, max_waiting=max_waiting)
    held = office.fill("a")
    assert max_running < held < max_running + max_waiting
    assert office.fill("b") > 0 and office.admission.num_open <= max_running + max_waiting


def test_a_server_without_a_queue_is_for_whoever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch, 4, max_waiting=0)
    assert office.fill("a") == 4 and office.fill("b") == 0


def test_a_request_that_never_fits_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch, 2, max_waiting=22)
    assert isinstance(office.refusal("a", count=24), InvalidRequest)
    assert isinstance(office.refusal("a", count=5, max_waiting=2), InvalidRequest)
    assert len(office.enter("a", count=21)) == 21


def test_waiting_tokens_of_one_client_leave_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    office = Office(monkeypatch, 2)
    office.admission.max_waiting_tokens = 1000
    assert len([office.enter("a", num_prompt=100) for _ in range(8)]) == 8
    assert office.refusal("a", num_prompt=100).code == "too_many_waiting_tokens"
    office.enter("b", num_prompt=100)


def test_the_wait_is_estimated_for_the_client_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch, 2)
    office.admission.max_queue_seconds = 50
    for _ in range(9):
        office.enter("a")
        office.admission.clients["a"].run_seconds.append(10.0)
    office.enter("b")  # Half of the two places is its own, and nothing of it waits.
    refused = office.refusal("a")
    assert refused.code == "queue_too_long" and refused.retry_after == 60
    assert "80 s" in refused.message  # Nine open, one running at a time, ten seconds each.
    office.enter("b")


def test_a_key_has_its_own_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch, 8)
    terms = {"max_running": 2, "max_waiting": 3}
    for _ in range(5):
        office.enter("a", **terms)
    assert office.refusal("a", **terms).code == "too_many_requests"
    assert len(office.enter("b", count=50)) == 50


def test_requests_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch)
    for _ in range(3):
        office.end(office.enter("a", requests_per_minute=3)[0], 5)
    refused = office.refusal("a", requests_per_minute=3)
    assert (
        refused.code == "rate_limit_exceeded"
        and refused.retry_after == 20
        and "3 requests a minute" in refused.message
    )
    office.now += 19.9
    assert office.refusal("a", requests_per_minute=3).retry_after == 1
    office.now += 0.2
    office.end(office.enter("a", requests_per_minute=3)[0], 5)
    assert office.refusal("a", requests_per_minute=3).retry_after == 20
    office.now += 10**6
    assert all(office.enter("a", requests_per_minute=3) for _ in range(3)) and office.refusal(
        "a", requests_per_minute=3
    )


def test_tokens_a_minute_count_those_that_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch)
    terms = {"tokens_per_minute": 60}
    (choice,) = office.enter("a", num_prompt=10, num_output=90, **terms)
    refused = office.refusal("a", **terms)
    assert refused.code == "rate_limit_exceeded" and refused.retry_after == 41
    office.end(choice, 30)
    (choice,) = office.enter("a", num_prompt=10, num_output=10, **terms)
    office.end(choice, 10)
    office.now += 5
    office.enter("a", num_prompt=10, num_output=90, **terms)
    office.now += 90
    assert office.refusal("a", **terms).retry_after == 6
    office.enter("b")


def test_tokens_a_minute_are_checked_again_when_their_number_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many requests of a key were admitted before the first of them was read."""
    office = Office(monkeypatch, max_running=10)
    terms = Terms(tokens_per_minute=100, requests_per_minute=7)
    reserved = [office.admission.reserve("", "a", terms) for _ in range(7)]
    assert (
        office.refusal("a", tokens_per_minute=100, requests_per_minute=7).code
        == "rate_limit_exceeded"
    )
    admitted = 0
    for reservation in reserved:
        reservation.release()
        try:
            office.admission.check(reservation.usage, 1, 10)
        except Overloaded as error:
            assert error.code == "rate_limit_exceeded" and "100 tokens a minute" in error.message
        else:
            office.open(reservation, 10, 50)
            admitted += 1
    assert admitted == 2, "the second one may exceed the rest"


def test_requests_that_start_no_sequence_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    office, terms = Office(monkeypatch), Terms(tokens_per_minute=100)
    for _ in range(2):
        office.admission.charge("a", terms, 60)
    with pytest.raises(Overloaded, match="100 tokens a minute"):
        office.admission.charge("a", terms, 60)
    office.refusal("a", tokens_per_minute=100)
    office.admission.charge("b", terms, 60)
    office.now += 60.0
    office.admission.charge("a", terms, 60)
    office.admission.charge("c", Terms(requests_per_minute=1), 10**6)
    with pytest.raises(Overloaded, match="1 requests a minute"):
        office.admission.charge("c", Terms(requests_per_minute=1), 0)
    for _ in range(100):
        office.admission.charge("d", Terms(), 10**6)


def test_clients_that_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch)
    for number in range(5000):
        office.end(office.enter(f"client {number}")[0], 3)
    assert len(office.admission.clients) < 1200
    office.enter("named", name="named")
    for number in range(5000):
        office.end(office.enter(f"client {number}")[0], 3)
    assert "named" in office.admission.clients


def test_named_keys_have_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(monkeypatch)
    first, _ = office.enter("editor", count=2, name="editor")
    office.enter("10.0.0.1")
    office.admission.remove_waiting(first.id)
    office.end(first, 7)
    text = office.admission.metrics.exposition().decode()
    assert 'onehead_client_tokens_total{key="editor"} 27.0' in text
    assert (
        'onehead_client_running{key="editor"} 0.0' in text
        and 'onehead_client_waiting{key="editor"} 1.0' in text
    )
    assert "10.0.0.1" not in text
    assert office.admission.clients["editor"].num_open == 1
