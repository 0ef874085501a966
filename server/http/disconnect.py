"""Waiting for an answer and for the client to leave, whichever comes first. Starlette watches streams; this is for whole answers."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

Answer = TypeVar("Answer")


async def unless_disconnected(http: Request, work: Awaitable[Answer]) -> Answer:
    """The result of `work`; cancels it and raises ClientDisconnect where the client goes away first."""
    answer = asyncio.ensure_future(work)
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
