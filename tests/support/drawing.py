"""Samples tokens on the CPU and waits for the result."""

from collections.abc import Sequence

from torch import Tensor

from model.devices import find_device
from model.sampling import begin_draw
from model.step import Sample, SampledToken, SampleError


def draw(logits_SV: Tensor, samples: Sequence[Sample]) -> list[SampledToken | SampleError]:
    """One outcome for each row."""
    return begin_draw(find_device("cpu"), logits_SV, samples).read()
