"""Cancels work whose client disconnects, for responses that are not streamed; Starlette does the
same for streamed ones.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

Answer = TypeVar("Answer")


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of `work`. Cancels it and raises ClientDisconnect if the client disconnects
    first.
    """
    answer = asyncio.create_task(work)
    disconnected = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({answer, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        for task in (answer, disconnected):
            task.cancel()
        await asyncio.gather(answer, disconnected, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
