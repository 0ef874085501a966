"""The journal of open sequences: each one's submission and every token generated so far, enough to
replay it on a new engine.

Invariant: the supervisor records a token before delivering it. The journal knows nothing of engine
processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from server import protocol

SequenceEvent = protocol.Token | protocol.PromptScores | protocol.Failed


@dataclass(frozen=True, slots=True)
class Restored:
    """What an earlier server was asked for in one request, and the tokens that it generated, each
    with the index of its sequence, in the order in which they came.
    """

    submits: Sequence[protocol.Submit] = ()
    tokens: Sequence[tuple[int, protocol.Token]] = ()


@dataclass(slots=True, eq=False)
class OpenSequence:
    """A submitted sequence that has not finished, failed or been cancelled."""

    submit: protocol.Submit
    deliver: Callable[[SequenceEvent], None]
    output: list[int] = field(default_factory=list)
    num_scored: int = 1
    """Prompt tokens whose scores have been delivered, counting the first, which has no score."""
    sent: bool = False
    """Whether the current engine has been sent it."""
    started: bool = False
    """Whether the current engine has ever admitted it from its queue; a preemption changes
    nothing."""
    stale: bool = False
    """Whether the current engine was told to cancel it: until it is started again, events may
    belong to the cancelled run."""
    crashes: int = 0
    """Engine crashes while it was running, since its last token."""
    crashes_alone: int = 0
    """Engine crashes while it was the only sequence in the engine, since its last token."""

    def resubmission(self) -> protocol.Submit:
        """The submission that continues after the tokens and scores delivered so far."""
        scored = self.num_scored >= len(self.submit.prompt)
        return msgspec.structs.replace(
            self.submit, output=self.output, score_prompt=self.submit.score_prompt and not scored
        )
