"""JobQueue: decides which of the waiting jobs of all clients runs next in a worker process.

A job begins in the quick lane. One that has used up QUANTUM seconds there moves to the slow lane,
so that expensive jobs delay only one another. Within a lane clients take turns. Invariant: no more
jobs run in a lane than it has places, and what waits is bounded in number and in characters, for
each client and in all. It knows neither what jobs do nor what time it is.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from server.errors import Overloaded

QUANTUM = 0.1
"""Seconds of processor time that a job has in the quick lane."""
MAX_JOBS, MAX_CLIENT_JOBS = 1024, 256
"""Jobs that may wait or run: of all clients, and of one."""
MAX_CHARS, MAX_CLIENT_CHARS = 2**25, 2**23
"""Characters of the jobs that wait or run: of all clients, and of one, whose only job may have
more."""
RETRY_SECONDS = 2
"""Value of Retry-After for a job that is not accepted."""


@dataclass(eq=False, slots=True)
class Ticket:
    """A job's place in the queue."""

    client: str
    num_chars: int
    lane: "Lane"
    running: bool = False


@dataclass(slots=True)
class Lane:
    """The jobs that share `places` worker processes."""

    places: int
    running: Counter[str] = field(default_factory=Counter)
    """Client -> number of its running jobs, where there are any."""
    waiting: dict[str, deque[Ticket]] = field(default_factory=dict)
    """Client -> its waiting jobs, where there are any; the client whose turn is next comes
    first."""

    def may_run(self, client: str) -> bool:
        """Whether a job of this client may run now. One client leaves a place to others, where
        there is more than one.
        """
        return self.running.total() < self.places and self.running[client] < max(1, self.places - 1)

    def add(self, ticket: Ticket) -> None:
        ticket.lane, ticket.running = self, False
        self.waiting.setdefault(ticket.client, deque()).append(ticket)

    def enter(self, ticket: Ticket) -> None:
        ticket.lane, ticket.running = self, True
        self.running[ticket.client] += 1

    def next(self) -> Ticket | None:
        """The next job to run, which counts as running from then on; None if none may run."""
        client = next(filter(self.may_run, self.waiting), None)
        if client is None:
            return None
        tickets = self.waiting.pop(client)
        ticket = tickets.popleft()
        if tickets:
            self.waiting[client] = tickets  # After the other clients.
        self.enter(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Removes a waiting or running job."""
        if ticket.running:
            self.running -= Counter([ticket.client])  # Which leaves no client with none.
        else:
            self.waiting[ticket.client].remove(ticket)
            if not self.waiting[ticket.client]:
                del self.waiting[ticket.client]


class JobQueue:
    """Two lanes with so many places each. The caller runs the jobs that `start` yields, and removes
    each when it has ended.
    """

    def __init__(self, quick: int, slow: int) -> None:
        self._quick, self._slow = Lane(quick), Lane(slow)
        self._jobs: set[Ticket] = set()
        """Those that wait or run."""

    def add(self, client: str, num_chars: int) -> Ticket:
        """Adds a job to the quick lane. Raises Overloaded where too much waits."""
        every = [ticket.num_chars for ticket in self._jobs]
        own = [ticket.num_chars for ticket in self._jobs if ticket.client == client]
        for number, most, what in (
            (len(own) + 1, MAX_CLIENT_JOBS, "texts and grammars of this client"),
            (len(every) + 1, MAX_JOBS, "texts and grammars"),
            (len(own) and sum(own) + num_chars, MAX_CLIENT_CHARS, "characters of this client"),
            (len(every) and sum(every) + num_chars, MAX_CHARS, "characters"),
        ):
            if number > most:
                text = (
                    f"{number} {what} would wait to be processed, and at most {most} may; try "
                    "again later"
                )
                raise Overloaded(text, RETRY_SECONDS, code="too_many_jobs")
        ticket = Ticket(client, num_chars, self._quick)
        self._jobs.add(ticket)
        self._quick.add(ticket)
        return ticket

    def start(self) -> Iterator[Ticket]:
        """The jobs that run from now on."""
        for lane in (self._quick, self._slow):
            while (ticket := lane.next()) is not None:
                yield ticket

    def is_slow(self, ticket: Ticket) -> bool:
        """Whether the job is in the slow lane, and so may run to its own time limit."""
        return ticket.lane is self._slow

    def slow_down(self, ticket: Ticket) -> None:
        """Moves a running job to the slow lane. If that has no place, the job is no longer
        `running`: it is to be ended, and begins again when `start` yields it.
        """
        self._quick.remove(ticket)
        if self._slow.may_run(ticket.client):
            self._slow.enter(ticket)
        else:
            self._slow.add(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Removes a job that has ended, or is given up."""
        ticket.lane.remove(ticket)
        self._jobs.remove(ticket)
