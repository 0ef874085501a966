"""Engine: the states of an engine process, and the interface by which the supervisor uses it."""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from server import protocol


class State(Enum):
    """State of the engine. STARTING holds while one is loading, also after a crash; the last three
    are final.
    """

    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"
    REFUSED = "refused"
    GAVE_UP = "gave up"


LIVE = (State.STARTING, State.READY)
"""The states that are not final: an engine runs, or is being loaded."""


class Engine(Protocol):
    """A running engine process; transport.EngineProcess implements it."""

    def send(self, message: protocol.ToEngine) -> None: ...

    def kill(self) -> None:
        """Kills the process at once; `on_exit` is called when it has ended."""


EngineEvent = protocol.Tokens | protocol.Started | protocol.Heartbeat | protocol.CacheView
Spawn = Callable[[Callable[[protocol.FromEngine], None], Callable[[int], None]], Engine]
"""(on_message, on_exit) -> a new engine, which has been sent its Start message. Raises OSError."""
