"""Backend: attention over the paged one-head KV cache, as every device implements it.

Shape letters: T tokens of the step, H query heads, d columns of a head.
"""

from typing import Any, Protocol

from torch import Tensor

from model.batch import Batch
from model.layers import Rotation


class Backend(Protocol):
    """One step is `plan(batch)` once, then `run` once for every layer in order."""

    @property
    def name(self) -> str:
        """What an answer's last bits depend on."""
        ...

    def plan(self, batch: Batch) -> Any:
        """What all layers of the step share (masks, page lists), handed back to `run`."""
        ...

    def run(self, plan: Any, layer: int, q_THd: Tensor, k_Td: Tensor, v_Td: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Stores K and V of the step's tokens in their slots, then attends: a token at position p sees 0 .. p of its own row. Where there
        is a rotation, Q and K are turned by it first. -> o_THd.
        """
        ...
