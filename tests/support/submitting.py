"""Gives a scheduler a sequence, by the fields of protocol.Submit that matter to a test."""

from collections.abc import Iterable
from typing import Any

from server.engine.scheduler import Scheduler
from server.engine.sequence import Constraint
from server.protocol import Sampling, Submit


def submit(
    scheduler: Scheduler,
    id: int,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    output: Iterable[int] = (),
    min_new_tokens: int = 0,
    stop_token_ids: Iterable[int] = (),
    *,
    constraint: Constraint | None = None,
    **more: Any,
) -> None:
    """Adds a sequence to the queue; `more`: further fields. Raises NeverFits and ValueError."""
    stops = [*stop_token_ids]
    message = Submit(id, prompt, [*output], max_new_tokens, min_new_tokens, stops, sampling, **more)
    scheduler.submit(message, constraint)
