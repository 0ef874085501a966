"""Memory for weights: every tensor zeroed, aligned and its own."""

import errno
import mmap
import random

import pytest
import torch

from model.devices.cpu.huge_pages import CHUNK, LINE, HugePages


@pytest.mark.parametrize("seed", range(30))
def test_tensors_are_zeroed_aligned_and_share_nothing(seed: int) -> None:
    rng, memory = random.Random(seed), HugePages()
    kept: list[tuple[torch.Tensor, float]] = []
    for value in range(1, 30):
        shape = torch.Size(rng.choice((0, 1, 3, 17, 300)) for _ in range(rng.randint(1, 3)))
        tensor = memory.zeros(shape, rng.choice((torch.float32, torch.int8, torch.int32)))
        assert tensor.shape == shape and tensor.is_contiguous() and not tensor.any()
        assert tensor.numel() == 0 or tensor.data_ptr() % LINE == 0
        kept.append((tensor.fill_(value), value))
        if rng.random() < 0.2:
            del kept[rng.randrange(len(kept))]
    assert all((tensor == value).all() for tensor, value in kept)


def test_what_is_larger_than_a_chunk_has_one_of_its_own_and_outlives_the_rest() -> None:
    memory = HugePages()
    small, large = (memory.zeros(torch.Size([size]), torch.int8) for size in (1, CHUNK + 1))
    del memory
    large[-1], small[0] = 7, 5
    assert int(large[-1]) == 7 and int(large[0]) == 0 and int(small[0]) == 5


def test_what_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="cannot be had"):
        HugePages().zeros(torch.Size([2**55]), torch.int8)


def test_a_kernel_that_knows_no_huge_pages_gives_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("model.devices.cpu.huge_pages.mmap.mmap", Refusing)
    assert HugePages().zeros(torch.Size([3]), torch.int8).tolist() == [0, 0, 0]
