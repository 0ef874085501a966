"""Reservation: an admitted request of one caller, from before its body is read until its answer has ended.

Plain state; where a request is admitted decides how the methods count it. It knows nothing of HTTP, bodies or engines.
"""

import time
import uuid
from collections.abc import Sequence

from server.api_protocol import Origin
from server.generation.clients import Terms
from server.generation.request import Choice
from server.protocol import Sampling


class Reservation:
    """Counts as an open request until its sequences are submitted or it is released.

    `caller` decides which requests may share cached prefixes: the digest of an API key, or a constant where there are no keys.
    `client` is who shares the server with others: a key, or an address where there are no keys.
    """

    wants_origin = False
    """Whether a resumable request must set `origin`, because another process may have to make its events again."""

    def __init__(self, caller: str, client: str, terms: Terms) -> None:
        self.caller = caller
        self.client = client
        self.terms = terms
        self.choices: list[Choice] = []
        """Sequences submitted for the request."""
        self.reply_id, self.created = uuid.uuid4().hex, int(time.time())
        """What a reply of OpenAI's dialect shows as its id and its time."""
        self.origin: Origin | None = None
        self.samplings: Sequence[Sampling] = ()
        """The parameters of the sequences where these run already, with the seeds that were drawn for them."""

    async def confirmed(self) -> None:
        """Waits until the request has been admitted by the process that counts requests. Raises Unavailable, Overloaded or Conflict."""

    def release(self) -> None:
        """Stops counting the request as open until its sequences are submitted. Idempotent."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the request: releases it, and its Idempotency-Key. Idempotent."""
        raise NotImplementedError
