"""Engine: the states of an engine process, and what the supervisor calls of it and of the native code that writes tokens. It does nothing
itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from server import protocol


class State(Enum):
    """State of the engine. STARTING holds while one is loading, also after a crash; the last three are final."""

    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"
    REFUSED = "refused"
    GAVE_UP = "gave up"


LIVE = (State.STARTING, State.READY)
"""The states that are not final: an engine runs, or is being loaded."""


class NativeClient(Protocol):
    """A client's socket; token_writer.ClientSocket implements it."""

    def number_at(self, writer: Any, /) -> int:
        """Its number at a TokenWriter."""


@dataclass(frozen=True, slots=True)
class PlainStream:
    """How native code writes the next tokens of a sequence. `num_tokens`: those it has; `last`: monotonic time of the last one."""

    client: NativeClient
    num_tokens: int
    last: float
    template: bytes
    """An event as it is sent, with token_writer's TOKEN_ID, TEXT, ... in place of what differs from token to token."""
    stop_bytes: bytes
    """Tokens with any of these bytes in their text are not written natively: a stop string may begin with them."""


class NativeTokens(Protocol):
    """A sequence whose tokens native code writes; token_writer.WrittenSequence implements it."""

    def collect(self) -> tuple[list[int], float]:
        """The tokens that were written since the last call, and the time of the last one."""

    def remove(self) -> None:
        """No more tokens are written."""


class Engine(Protocol):
    """A running engine process; transport.EngineProcess implements it."""

    def send(self, message: protocol.ToEngine) -> None: ...

    def kill(self) -> None:
        """Kills the process at once; `on_exit` is called when it has ended."""

    def write_natively(self, id: int, next_index: int, plain: PlainStream) -> NativeTokens | None:
        """Has native code write the tokens of a sequence from `next_index` on; None where it cannot."""


EngineEvent = protocol.Tokens | protocol.Started | protocol.Heartbeat | protocol.CacheView
Spawn = Callable[[Callable[[protocol.FromEngine], None], Callable[[int], None]], Engine]
"""(on_message, on_exit) -> a new engine, which has been sent its Start message. Raises OSError."""
