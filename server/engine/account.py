"""Account: what one client of the engine was served, in tokens by weight. Which client is served
next is decided by fair_shares.
"""

from dataclasses import dataclass

PROMPT_COST, OUTPUT_COST = 1, 2
"""Of a prompt token that is computed, and of an output token: many prompt tokens share a step, each
output token takes one of its own."""


@dataclass(slots=True, eq=False)
class Account:
    """A client of the engine. `served` is its counter: the cost of what it was served, divided by
    its weight.
    """

    client: str = ""
    weight: float = 1.0
    max_running: int = 0
    """Sequences that it may have running; 0 for no limit."""
    served: float = 0.0

    def charge(self, num_prompt: int, num_output: int = 0) -> None:
        """Adds prompt tokens that are computed, and output tokens."""
        self.served += (PROMPT_COST * num_prompt + OUTPUT_COST * num_output) / self.weight
