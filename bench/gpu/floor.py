"""What the hardware allows at best: floors of a decode step and of a whole workload, and that
workload. Pure arithmetic, no torch.

A floor counts what must be read and multiplied, at ceilings that were measured or are the vendor's.
It knows no launches, no host and no kernel: a step that takes the floor's time cannot be faster on
that hardware.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and floating-point operations per second."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step of a model reads and computes."""

    streamed: int
    """Parameters that every step reads: the layers' and the head's, not those of an embedding that
    is only looked up."""
    layers: int
    heads: int
    head_dim: int
    itemsize: int = 2

    @property
    def weight_bytes(self) -> int:
        return self.streamed * self.itemsize

    @property
    def key_bytes(self) -> int:
        """Of K and V of one token over all layers: one head, whatever `heads` is."""
        return 2 * self.layers * self.head_dim * self.itemsize

    @property
    def key_flops(self) -> int:
        """Of one new token attending to one key over all layers: a product and a sum for QK and for
        PV.
        """
        return 4 * self.layers * self.heads * self.head_dim


def step_seconds(shape: Shape, batch: int, context: int, ceilings: Ceilings) -> float:
    """A step of one token for each of `batch` sequences of `context`: products, then attention,
    each bound by memory or by arithmetic, whichever takes longer.
    """
    keys = batch * context
    products = max(
        shape.weight_bytes / ceilings.bandwidth, 2 * shape.streamed * batch / ceilings.flops
    )
    return products + max(
        keys * shape.key_bytes / ceilings.bandwidth, keys * shape.key_flops / ceilings.flops
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there at the beginning."""

    prompts: list[list[int]]
    outputs: list[int]
    temperature: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Of all outputs."""
        return sum(self.outputs)


def nano_vllm(requests: int = 256, least: int = 100, most: int = 1024) -> Workload:
    """The workload of nano-vllm's bench: its draws from Python's generator under seed 0, in its
    order, a prompt's length before its ids. Tokens are drawn at its temperature, and none ends a
    request.
    """
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(least, most))] for _ in range(requests)
    ]
    return Workload(prompts, [rng.randint(least, most) for _ in range(requests)], temperature=0.6)


def workload_seconds(
    shape: Shape, prompts: Sequence[int], outputs: Sequence[int], ceilings: Ceilings
) -> float:
    """Prompts of these lengths, then steps for all who are not done. Within a step reading and
    arithmetic overlap entirely; prompts are arithmetic alone, and counted through the head like
    outputs, as the published figures are.
    """
    squares = sum(length * length for length in prompts) / 2
    seconds = (2 * shape.streamed * sum(prompts) + shape.key_flops * squares) / ceilings.flops
    for step in range(1, max(outputs) + 1):
        contexts = [
            prompt + step - 1
            for prompt, output in zip(prompts, outputs, strict=True)
            if output >= step
        ]
        read = shape.weight_bytes + sum(contexts) * shape.key_bytes
        computed = 2 * shape.streamed * len(contexts) + sum(contexts) * shape.key_flops
        seconds += max(read / ceilings.bandwidth, computed / ceilings.flops)
    return seconds
