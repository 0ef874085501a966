"""LongTexts: tokenizes long texts in threads, a bounded number at once and each within a time limit.

Invariant: a text over the time limit fails only its own request; its thread runs on to its end, and the number of such threads is bounded.
It knows no tokenizers.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from server.errors import InvalidRequest, Overloaded

Value = TypeVar("Value")
MAX_TOKENIZING, MAX_ABANDONED = 4, 16
"""Bounds on the long texts tokenized at once, and on those over their time limit whose threads still run."""


async def in_thread(ended: Callable[[], None], work: Callable[[], Value]) -> Value:
    """Runs `work` in a daemon thread, which does not delay the exit of the process. `ended` is called in the event loop when `work` has
    ended, also if the caller has been cancelled before.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Value] = loop.create_future()

    def settle(value: Value | None, error: Exception | None) -> None:
        ended()
        if not result.done():
            result.set_exception(error) if error is not None else result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The event loop is closed.
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True, name="tokenizer").start()
    return await result


class LongTexts:
    """The threads of one server. `seconds`: time limit of a text."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._slots = asyncio.Semaphore(MAX_TOKENIZING)
        self._num_abandoned = 0

    async def tokenized(self, work: Callable[[], Value]) -> Value:
        """The result of `work`. Raises Overloaded if it cannot be started in time, and InvalidRequest if it takes too long."""
        try:
            if self._num_abandoned >= MAX_ABANDONED:
                raise TimeoutError
            async with asyncio.timeout(self._seconds * MAX_TOKENIZING):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded("too many long texts are being tokenized; try again later", max(1, round(self._seconds))) from None
        return await self._in_time(work)

    async def _in_time(self, work: Callable[[], Value]) -> Value:
        """The result of `work`, for which a slot has been acquired. A thread over the time limit is abandoned and its slot released; up
        to MAX_ABANDONED threads may be abandoned.
        """
        state = "working"

        def ended() -> None:
            nonlocal state
            self._num_abandoned -= state == "abandoned"
            if state == "working":
                self._slots.release()
            state = "ended"

        try:
            async with asyncio.timeout(self._seconds):
                return await in_thread(ended, work)
        except TimeoutError:
            if state == "working":
                state = "abandoned"
                self._num_abandoned += 1
                self._slots.release()
            text = f"this text is not tokenized after {self._seconds:g} s (server.tokenize_timeout); send less of it"
            raise InvalidRequest(text, code="tokenization_timeout") from None
