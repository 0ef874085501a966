"""OpenStreams: the sequences of one submitted request, as one asynchronous iterator over pieces of
their text.

It detokenizes, looks for stop strings and applies the request's time limit. What has arrived is
taken at once with `take`, either by the task that iterates or by the function that `listen` is
given. Invariant: every sequence ends in exactly one piece with `finish`, or the whole request in
one RequestError; `close` cancels unfinished sequences and is idempotent. It knows nothing of HTTP,
the fields of bodies or server-sent events.
"""

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from server import protocol
from server.errors import GenerationFailed, InvalidRequest, QueueTimeout, RequestError, Unavailable
from server.generation.admission import RETRY_SECONDS, Reservation
from server.generation.arrivals import Wake, Write
from server.generation.engine_client import EngineClient
from server.generation.request import Choice, Request
from server.supervision.journal import SequenceEvent
from server.text.calls.parser import CallDelta, Parsed
from server.text.codec import Detokenizer, StopStrings, TextCodec

log = logging.getLogger("onehead.api")

Top = Sequence[tuple[int, float]]


class Piece(msgspec.Struct, frozen=True, gc=False):
    """One token and the text that became final with it. The last piece of a sequence has `finish`:
    length, eos_token, stop_sequence or timeout; and in `stop` the stop string or stop token id that
    ended the sequence, if one did.

    A special token, or a token that ends the sequence, adds no text: `text` holds only text that
    was held back before it. `token` is None where the time limit passed between two tokens.
    """

    choice: int
    token: int | None
    text: str
    token_text: str = ""
    """The token's own text, of which stop strings, thoughts and calls have taken nothing: those of
    all tokens, joined, are the text of the sequence. A special token has its name here.
    """
    logprob: float | None = None
    top: Top = ()
    special: bool = False
    finish: str | None = None
    stop: str | int | None = None
    thought: str = ""
    """What it adds to a thought, and `calls` to calls of tools, where the model's format for them
    is known (Request.parser)."""
    calls: tuple[CallDelta, ...] = ()
    vector: bytes = b""
    """What a model that draws no tokens makes of the prompt, as native float32."""


class ChoiceDetokenizer:
    """Converts the tokens of one sequence to pieces."""

    def __init__(self, codec: TextCodec, choice: Choice) -> None:
        self._codec = codec
        self._choice = choice
        self._request = request = choice.request
        self._detokenizer = Detokenizer(codec, request.prompt, request.skip_special_tokens)
        self._stops = StopStrings(request.stop_strings, request.keep_stop)
        self._healed = request.healed
        """The part of the removed end of the prompt (token healing) that is still to be generated
        again; it is not part of the output."""
        self._parser = request.parser and request.parser()

    def piece(self, token: protocol.Token) -> Piece:
        """The piece of a token. A stop string may set `finish` before the engine does."""
        request, index = self._request, self._choice.index
        if token.vector:
            return Piece(index, None, "", finish="length", vector=token.vector)
        # Only the prompt was asked for; the engine samples one token after it anyway.
        if request.max_new_tokens == 0:
            return Piece(index, None, "", finish="length")
        ends = token.finish == "eos_token"
        # A token that ends the sequence adds no text, whether it is a special token or one of the
        # request's stop tokens.
        silent = ends and not request.keep_stop_token
        special = silent or token.token in self._codec.special_ids
        skipped = silent or (special and request.skip_special_tokens)
        text = "" if skipped else self._detokenizer.push(token.token)
        if token.finish is not None:
            text += self._detokenizer.flush()
        text = self._strip_healed(text)
        own = self._codec.decode([token.token]) if special else text
        parsed = (
            Parsed(text)
            if self._parser is None
            else self._parser.push(token.token, text, special, token.finish is not None)
        )
        text, stop = self._stops.push(parsed.text, search=token.index + 1 >= request.min_new_tokens)
        finish = "stop_sequence" if stop is not None else token.finish
        if stop is None and (finish is not None or parsed.calls):
            text += self._stops.flush()  # No stop string goes on in a call.
        reason: str | int | None = stop
        if finish == "eos_token" and token.token in request.stop_token_ids:
            reason = token.token
        if ends and stop is None and own in request.stop_strings:
            # A special token, which adds no text to find it in.
            finish = "stop_sequence"
            reason = own
        return Piece(
            index,
            token.token,
            text,
            own,
            token.logprob,
            token.top,
            special,
            finish,
            reason,
            parsed.thought,
            parsed.calls,
        )

    def _strip_healed(self, text: str) -> str:
        if self._healed:
            common = min(len(self._healed), len(text))
            self._healed, text = self._healed[common:], text[common:]
        return text

    def timeout_piece(self) -> Piece:
        """The last piece of a sequence whose time limit has passed."""
        text = self._strip_healed(self._detokenizer.flush())
        parsed = (
            Parsed(text)
            if self._parser is None
            else self._parser.push(None, text, special=False, is_last=True)
        )
        text, _ = self._stops.push(parsed.text)
        text += self._stops.flush()
        return Piece(
            self._choice.index,
            None,
            text,
            finish="timeout",
            thought=parsed.thought,
            calls=parsed.calls,
        )


def _error(failed: protocol.Failed) -> RequestError:
    """The error for the client of a failed sequence."""
    if failed.refused:
        return InvalidRequest(f"the request cannot be satisfied: {failed.reason}")
    if failed.code in ("engine_unavailable", "server_shutting_down"):
        return Unavailable(failed.reason, retry_after=RETRY_SECONDS, code=failed.code)
    return GenerationFailed(
        f"Request failed during generation: {failed.reason}", code=failed.code or None
    )


class OpenStreams:
    """Submits sequences, and is an asynchronous iterator over their pieces, in the order of
    arrival. Raises InvalidRequest, Overloaded or Unavailable.
    """

    def __init__(
        self,
        client: EngineClient,
        codec: TextCodec,
        requests: Sequence[Request],
        submits: Sequence[protocol.Submit],
        reservation: Reservation,
    ) -> None:
        pairs = enumerate(zip(requests, submits, strict=True))
        self.choices = [
            Choice(len(submit.prompt), submit.max_new_tokens, index=i, request=request)
            for i, (request, submit) in pairs
        ]
        self.submits = submits
        self.taken: list[tuple[int, protocol.Token]] = []
        """With `keeps_taken` the tokens that were taken, with the index of their sequence; whoever
        reads them empties it."""
        self.keeps_taken = False
        self.reservation = reservation
        self._client = client
        self._texts = [ChoiceDetokenizer(codec, choice) for choice in self.choices]
        self._inbox: deque[tuple[int, protocol.Token | protocol.Failed]] = deque()
        self._arrived = asyncio.Event()
        self._wake: Wake = self._arrived.set
        """Called when the inbox has an event, or the time limit has passed."""
        self._is_announced = False
        """Whether `wake` is going to be called for what is in the inbox."""
        self._num_open = len(self.choices)
        self._timeout_pieces: list[Piece] = []
        self._error: Callable[[], RequestError] | None = None
        """Makes the error that ends the request when it is raised: a raised error refers to its
        frames, and so to this object."""
        self._deadline_passed = False
        self._deadline: asyncio.TimerHandle | None = None
        self._client.submit(reservation, self.choices, submits, self._deliver)
        first = self.choices[0]
        if first.request.timeout_s is not None:
            left = first.arrival + first.request.timeout_s - time.monotonic()
            self._deadline = asyncio.get_running_loop().call_later(left, self._on_deadline)

    def _deliver(self, choice: Choice, event: SequenceEvent) -> None:
        if isinstance(event, protocol.PromptScores):
            choice.scores.append(protocol.encode(event.scores))
            return
        self._inbox.append((choice.index, event))
        if not self._is_announced:
            self._announce()

    def _announce(self) -> None:
        self._is_announced = True
        self._client.arrivals.add(self._tell)

    def _tell(self) -> Write | None:
        self._is_announced = False
        return self._wake()

    def listen(self, wake: Wake) -> None:
        """From now on `wake` is called, in this task's context, when there may be something to
        take; iteration must have ended.
        """
        self._wake = partial(contextvars.copy_context().run, wake)

    def __aiter__(self) -> "OpenStreams":
        return self

    async def __anext__(self) -> Piece:
        """The next piece. Raises the errors of `take`."""
        while (piece := self.take()) is None:
            if self.ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return piece

    @property
    def ended(self) -> bool:
        """Whether nothing more comes after `take` has returned None."""
        return self._num_open == 0

    def take(self) -> Piece | None:
        """The next piece if one has arrived, else None. Raises QueueTimeout if the time limit
        passed before the request was started, and the errors of `_error`.
        """
        while self._inbox and self._error is None:
            index, event = self._inbox.popleft()
            choice = self.choices[index]
            if choice.outcome is not None:
                continue
            if self.keeps_taken and isinstance(event, protocol.Token):
                self.taken.append((index, event))
            if isinstance(event, protocol.Failed):
                self._fail(choice, event)
            elif (piece := self._take(choice, event)) is not None:
                return piece
        if self._deadline_passed and self._num_open and self._error is None:
            self._time_out()
        if self._error is not None:
            raise self._error()
        return self._timeout_pieces.pop(0) if self._timeout_pieces else None

    def _take(self, choice: Choice, token: protocol.Token) -> Piece | None:
        try:
            piece = self._texts[choice.index].piece(token)
        except Exception:
            log.exception("detokenization failed")
            self._end(choice, "failed")
            self._error = partial(
                GenerationFailed,
                "Request failed during generation: an internal error",
                code="text_error",
            )
            return None
        if piece.finish is not None:
            self._end(choice, piece.finish)
        return piece

    def _fail(self, choice: Choice, failed: protocol.Failed) -> None:
        self._end(choice, "refused" if failed.refused else "failed")
        self._error = partial(_error, failed)

    def _on_deadline(self) -> None:
        self._deadline_passed = True
        self._announce()

    def _time_out(self) -> None:
        if not any(choice.started or choice.num_tokens for choice in self.choices):
            text = "the request's time limit passed before its generation started"
            self._error = partial(QueueTimeout, text, RETRY_SECONDS, code="queue_timeout")
        else:
            self._timeout_pieces = [
                self._texts[choice.index].timeout_piece()
                for choice in self.choices
                if choice.outcome is None
            ]
        for choice in self.choices:
            self._end(choice, "timeout")

    async def first_piece(self, timeout: float) -> Piece | None:
        """The first piece, or None after `timeout` seconds. A failure within them can still be
        answered with an HTTP error status.
        """
        try:
            async with asyncio.timeout(timeout):
                return await anext(self)
        except TimeoutError:
            return None

    def _end(self, choice: Choice, outcome: str) -> None:
        if choice.outcome is None:
            choice.outcome = outcome
            self._num_open -= 1
            if self._num_open == 0 and self._deadline is not None:
                self._deadline.cancel()
            self._client.end(choice, outcome)

    def finish(self, index: int) -> None:
        """Ends a sequence early, because its caller has all the text it needs."""
        self._end(self.choices[index], "stop_sequence")

    def close(self) -> None:
        """Cancels the sequences that have not ended. Idempotent."""
        for choice in self.choices:
            self._end(choice, "cancelled")
