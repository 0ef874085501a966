"""LongTexts: what takes long to tokenize, in threads, a few at a time and each within its time.

Invariant: a text that takes too long costs its own request, and a thread until it is done; of such threads there is a bound. It knows no
tokenizers.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from server.errors import InvalidRequest, Overloaded

Value = TypeVar("Value")
MAX_TOKENIZING, MAX_ABANDONED = 4, 16
"""Long texts that are tokenized at once, and those besides that took too long and may still be at it."""


async def in_thread(ended: Callable[[], None], work: Callable[[], Value]) -> Value:
    """The result of `work` in a thread that nobody has to wait for, not even the process's end. `ended` is called when the thread ends,
    which may be long after the caller has gone.
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
        with contextlib.suppress(RuntimeError):  # The loop has closed.
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True, name="tokenizer").start()
    return await result


class LongTexts:
    """The threads of one server. `seconds` is what a text may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._slots = asyncio.Semaphore(MAX_TOKENIZING)
        self._num_abandoned = 0

    async def tokenized(self, work: Callable[[], Value]) -> Value:
        """The result of `work`. Raises Overloaded where it cannot be begun for long, and InvalidRequest where it takes too long."""
        try:
            if self._num_abandoned >= MAX_ABANDONED:
                raise TimeoutError
            async with asyncio.timeout(self._seconds * MAX_TOKENIZING):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded("too many long texts are being tokenized; try again later", max(1, round(self._seconds))) from None
        return await self._in_time(work)

    async def _in_time(self, work: Callable[[], Value]) -> Value:
        """The result of `work`, for which a place has been taken. A thread that takes longer is left alone, and its place given to another:
        of those there may be MAX_ABANDONED.
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
