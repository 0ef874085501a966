"""What is kept of every open sequence, so that any engine can go on with it: its submission and every token so far.

The supervisor writes it, before anyone sees the token. It knows nothing of engines.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from server import protocol

SequenceEvent = protocol.Token | protocol.PromptScores | protocol.Failed


@dataclass(slots=True, eq=False)
class OpenSequence:
    """A submission that has not ended."""

    submit: protocol.Submit
    deliver: Callable[[SequenceEvent], None]
    output: list[int] = field(default_factory=list)
    num_scored: int = 1
    """Prompt tokens whose scores have been delivered, and the first, which has none."""
    sent: bool = False
    """Whether the engine of the moment has it."""
    started: bool = False
    """Whether that engine has it in its running set."""
    stale: bool = False
    """Whether that engine was told to forget it, and what it says of it may still be of the run before that."""
    crashes: int = 0
    """Engines that died while they ran it, since its last token."""
    crashes_alone: int = 0
    """Those among them that had nothing else."""

    def resubmission(self) -> protocol.Submit:
        scored = self.num_scored >= len(self.submit.prompt)
        return msgspec.structs.replace(self.submit, output=self.output, score_prompt=self.submit.score_prompt and not scored)
