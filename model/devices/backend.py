"""Backend: attention over the paged one-head KV cache, as every device implements it.

Shape letters: T tokens of the step, H query heads, d columns of a head.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from model.batch import Batch
from model.layers import Rotation


class Plans(NamedTuple):
    """What `Backend.plan` says of a step."""

    all_tokens: Any
    tail: Any = None
    """Of the tokens of Batch.tail, if there are any."""

    @classmethod
    def of(cls, backend: "Backend", batch: Batch) -> "Plans":
        of_all, tail = backend.plan(batch), batch.tail
        return cls(of_all, backend.plan(tail.batch) if tail and len(tail.rows_K) else None)


class Backend(Protocol):
    """One step is `plan(batch)` once, and once for its tail if it has one, then `run` once for
    every layer in order.
    """

    @property
    def name(self) -> str:
        """The kernels: one name for all that give the same bits."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's output depends on its own sequence alone, bit for bit."""
        ...

    @property
    def are_whole(self) -> Callable[[Sequence[int]], list[bool]] | None:
        """Tells of each of these pages whether it holds the numbers that were written to it. None
        where that is not known.
        """
        ...

    def plan(self, batch: Batch) -> Any:
        """What all layers of the step share (masks, page lists), to be passed to `run`."""
        ...

    def run(
        self,
        plan: Any,
        layer: int,
        q_THd: Tensor,
        k_Td: Tensor | None,
        v_Td: Tensor | None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Stores K and V of the step's tokens in their slots, then attends: a token at position p
        attends to positions 0 .. p of its sequence, or to those of them within the layer's window;
        in a bidirectional batch to the positions after p too, within as many.
        With a rotation, Q and K are rotated first. Without K and V nothing is stored: the layer
        reads what another one did. -> o_THd.
        """
        ...
