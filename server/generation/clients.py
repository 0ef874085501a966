"""Clients: what each one may do, and what it has open, waiting and taken of its rates.

Invariant: what a client has open is counted once, by its reservations until their sequences are
submitted, by these from then on. It decides nothing: admission does. It knows no keys and no
addresses.
"""

from collections import deque

from pydantic import Field

from server.config import Section

RATE_WINDOW = 64
"""Number of a client's finished sequences whose running times give the estimate of its queue
wait."""


class Terms(Section):
    """The limits and rights of a client; the defaults are those of a client without an entry in
    the keys' file.
    """

    name: str = ""
    """Its label in metrics; empty for none."""
    weight: float = Field(1.0, ge=0.01, le=100)
    max_running: int | None = Field(None, ge=1)
    max_waiting: int | None = Field(None, ge=0)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    priority: bool | None = None
    """Whether `priority` orders its requests against those of all clients; None: against its own
    only. False: it may not be set."""


EVERYBODY = Terms()
"""The terms of clients without an entry in the keys' file."""


class Rate:
    """An allowance that fills evenly with so much a minute, up to that. The last that is taken may
    exceed it; that has to fill first.
    """

    def __init__(self) -> None:
        self.level, self._at = float("inf"), 0.0

    def seconds(self, per_minute: int | None, now: float) -> float:
        """Time until something may be taken; 0 without a limit."""
        if per_minute is None:
            return 0.0
        self.level = min(per_minute, self.level + (now - self._at) * per_minute / 60)
        self._at = now
        return max(0.0, (1 - self.level) * 60 / per_minute)


class Usage:
    """Counts of one client's work: open, waiting, and served so far."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.num_reserved = 0
        """Admitted requests without submitted sequences."""
        self.num_submitted = 0
        self.num_waiting = 0
        """Submitted sequences that the engine has not started."""
        self.waiting_tokens = 0
        """Prompt tokens of the waiting sequences."""
        self.num_tokens = 0
        """Prompt and output tokens that it was served."""
        self.run_seconds: deque[float] = deque(maxlen=RATE_WINDOW)
        self.requests, self.tokens = Rate(), Rate()

    @property
    def num_open(self) -> int:
        return self.num_reserved + self.num_submitted
