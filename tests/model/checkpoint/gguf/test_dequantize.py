"""Dequantization, compared bit for bit with the `gguf` package's on random bytes and on every
float16 scale there is.
"""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from model.checkpoint.gguf.dequantize import QUANTIZED, dequantize
from model.checkpoint.gguf.repack import REPACKED, repack
from model.checkpoint.gguf.types import BLOCK_TYPES
from model.spec import CheckpointError
from tests.support.gguf_models import SCALES

TYPES = sorted(QUANTIZED)


def test_types_are_those_of_gguf() -> None:
    for number, kind in BLOCK_TYPES.items():
        assert GGMLQuantizationType(number).name == kind.name
        assert GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (
            kind.block_elements,
            kind.block_bytes,
        )


def random_blocks(kind: str) -> torch.Tensor:
    """Random bytes, with the finite float16 numbers as scales, each of them at least once."""
    rng = np.random.default_rng(TYPES.index(kind))
    patterns = np.arange(2**16, dtype=np.uint16)
    finite = patterns[np.isfinite(patterns.view(np.float16))]
    size = next(found.block_bytes for found in BLOCK_TYPES.values() if found.name == kind)
    data = rng.integers(0, 256, (len(finite), size), dtype=np.uint8)
    for begin in SCALES[kind]:
        data[:, begin : begin + 2] = rng.permutation(finite)[:, None].view(np.uint8)
    return torch.from_numpy(data)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_equals_gguf_bit_for_bit(kind: str) -> None:
    data = random_blocks(kind)
    expected = quants.dequantize(data.numpy(), GGMLQuantizationType[kind])
    found = torch.empty(expected.shape)
    dequantize(kind, data, found)
    assert np.array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("pattern", [0x7C00, 0xFC00, 0x7E00, 0xFFFF])
def test_a_scale_that_is_no_number_gives_none_and_is_not_repacked(kind: str, pattern: int) -> None:
    for begin in SCALES[kind]:
        data = random_blocks(kind)[:10].clone()
        data[7, begin], data[7, begin + 1] = pattern & 255, pattern >> 8
        found = torch.empty(len(data), 256 if kind.endswith("_K") else 32)
        dequantize(kind, data, found)
        finite = found.isfinite()
        assert not finite[7].any() and finite[:7].all() and finite[8:].all()
        for form in {form for repacked, form in REPACKED if repacked == kind}:
            with pytest.raises(CheckpointError, match="scale or minimum is NaN, infinity or"):
                repack(kind, form, data)
