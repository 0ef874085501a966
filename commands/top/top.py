"""`onehead top`: follows a server's GET /monitor and draws it in the terminal until `q`, or once for scripts.

A connection that is lost is made again, and the frame says so; a first one that fails ends the command. It knows the terminal, and leaves
the events to monitor.py and the picture to view.py.
"""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console
from rich.live import Live

from commands.bench.client import Endpoint, ReplyError, reachable, reason
from commands.top.monitor import Monitor, Refused, events
from commands.top.view import SORTS, Look, frame, printable
from server.config import PREFIX
from server.errors import UsageError

REFRESH_SECONDS = 0.25
SILENCE_SECONDS = 10.0
"""A server sends an event every second; after so many without one the connection is taken for lost."""
ONCE_SECONDS = 10.0
"""What --once waits for the state of the KV cache, which does not come while an engine is loaded."""
RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0)
"""Pauses before a lost connection is made again; the last one is repeated."""


class TopSettings(BaseSettings):
    """onehead top: a running server's requests, KV cache pages, rates and latencies, live in the terminal.

    Keys: q quits; i, s, o, t, p and x sort the requests by id, state, output, tokens a second, pages and preemptions; r reverses.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, cli_implicit_flags=True)
    by_position: ClassVar[str] = "url"

    url: Annotated[str, AfterValidator(reachable)] = Field("http://127.0.0.1:8000", description="address of the server")
    key: Annotated[str, Field(min_length=1, pattern="^[ -~]+$")] | None = Field(
        None, description="key of the API, where the server needs one; in the environment (ONEHEAD_KEY) other users cannot read it"
    )
    sort: Literal["id", "state", "output", "tokens", "pages", "preemptions"] = Field(
        "id", description="what the requests are sorted by at first; tokens: tokens a second"
    )
    once: bool = Field(False, description="print one frame and end; for scripts: without colours, and as wide as COLUMNS says, else 80")
    config: Path | None = Field(None, description="TOML file of these options")


@dataclass
class Screen:
    """What is shown, and what was typed."""

    look: Look
    monitor: Monitor = field(default_factory=Monitor)
    is_over: bool = False
    num_failures: int = 0
    """Connections in a row that had no event."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def typed(self, letter: str) -> None:
        """One key; others than those in the last line do nothing."""
        if letter == "q":
            self.is_over = True
        elif letter == "r":
            self.look = replace(self.look, is_reversed=not self.look.is_reversed)
        elif letter in SORTS:
            self.look = replace(self.look, sort=letter)
        self.changed.set()


async def top(settings: TopSettings) -> int:
    """Runs the command; its exit status, 1 where the server cannot be used. Raises UsageError where there is no terminal to draw on."""
    console = Console()
    if not settings.once and not (console.is_terminal and sys.stdin.isatty()):
        raise UsageError("standard input and output are no terminal to draw on; --once prints one frame")
    sort = next(letter for letter, (words, _) in SORTS.items() if words.startswith(settings.sort))
    screen = Screen(Look(settings.url, console.width, sort=sort, ascii_only=not console.encoding.startswith("utf")))
    try:
        await (_print_once(settings, screen, console) if settings.once else _live(settings, screen, console))
    except (OSError, ReplyError) as error:
        print(f"onehead top: the server at {settings.url} cannot be used: {printable(reason(error))}", file=sys.stderr)
        return 1
    return 0


async def _print_once(settings: TopSettings, screen: Screen, console: Console) -> None:
    """Prints a frame as soon as rates are known. Raises OSError and ReplyError, also where they are not known in time."""
    try:
        async with asyncio.timeout(ONCE_SECONDS):
            await _follow(settings, screen, lambda: screen.monitor.is_complete)
    except TimeoutError:
        text = f"the state of its KV cache has not come for {ONCE_SECONDS:g} s; its status is: {screen.monitor.status}"
        raise ReplyError(text) from None
    console.print(frame(screen.monitor, screen.look))


async def _follow(settings: TopSettings, screen: Screen, is_over: Callable[[], bool]) -> None:
    """Takes events of one connection until `is_over`. Raises OSError and ReplyError, also after SILENCE_SECONDS without an event."""
    try:
        async with asyncio.timeout(SILENCE_SECONDS) as limit:
            async for event in events(Endpoint.parse(settings.url), settings.key):
                screen.monitor.take(event)
                screen.look, screen.num_failures = replace(screen.look, notice=""), 0
                limit.reschedule(asyncio.get_running_loop().time() + SILENCE_SECONDS)
                if is_over():
                    return
    except TimeoutError:
        raise ReplyError(f"nothing has come for {SILENCE_SECONDS:g} s") from None


async def _watch(settings: TopSettings, screen: Screen) -> None:
    """Follows the server through lost connections. Raises OSError and ReplyError where it never had an event, and Refused."""
    while True:
        try:
            await _follow(settings, screen, lambda: False)
        except Refused:
            raise
        except (OSError, ReplyError) as error:
            if not screen.monitor.history:
                raise
            screen.look = replace(screen.look, notice=f"connection lost, trying again: {reason(error)}")
        await asyncio.sleep(RETRY_SECONDS[min(screen.num_failures, len(RETRY_SECONDS) - 1)])
        screen.num_failures += 1


async def _live(settings: TopSettings, screen: Screen, console: Console) -> None:
    """Draws until `q`. Raises what `_watch` raises."""
    watch = asyncio.create_task(_watch(settings, screen))
    try:
        with _keyboard(screen.typed), Live(console=console, screen=True, auto_refresh=False) as live:
            while not screen.is_over and not watch.done():
                look = replace(screen.look, width=console.width, height=console.height)
                live.update(frame(screen.monitor, look), refresh=True)
                screen.changed.clear()
                try:
                    async with asyncio.timeout(REFRESH_SECONDS):
                        await screen.changed.wait()
                except TimeoutError:
                    pass
    finally:
        if not watch.done():
            watch.cancel()
    if watch.done() and not screen.is_over:
        watch.result()


@contextmanager
def _keyboard(typed: Callable[[str], None]) -> Iterator[None]:
    """Calls `typed` for each key at once, and gives the terminal back as it was."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for letter in os.read(keyboard, 64).decode("latin-1"):
            typed(letter)

    try:
        tty.setcbreak(keyboard)
        loop.add_reader(keyboard, read)
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
