"""KVPool: what is written to a slot is read from it, in both layouts of values and in float8; room
that cannot be had is a MemoryError.
"""

import pytest
import torch

from cache.layout import CacheLayout, Columns
from cache.pool import FLOAT8, KVPool

CPU = torch.device("cpu")


def layout(key: int, value: int, value_in_key: bool = False) -> CacheLayout:
    return CacheLayout.of(2, (), 16, [Columns(key, value, value_in_key)] * 2)


@pytest.mark.parametrize("stored_as", [torch.float32, FLOAT8])
@pytest.mark.parametrize("value_in_key", [False, True])
def test_a_slot_has_what_was_written_to_it_until_its_page_is_cleared(
    stored_as: torch.dtype, value_in_key: bool
) -> None:
    shape = layout(32, 16, value_in_key)
    pool = KVPool.allocate(shape, 4, torch.float32, CPU, stored_as=stored_as)
    assert (pool.num_pages, pool.page_size) == (4, 16)
    assert pool.num_bytes == 2 * 4 * 16 * (32 if value_in_key else 48) * stored_as.itemsize
    slots_T = torch.tensor([16, 50])  # The first of page 1, the third of page 3.
    k_Td = torch.arange(64, dtype=torch.float32).view(2, 32) / 64
    v_Tv = k_Td[:, :16] if value_in_key else -k_Td[:, :16]
    pool.write(1, slots_T, k_Td, v_Tv)
    keys_PSd, values_PSv = pool.layer(1)
    assert torch.equal(keys_PSd.flatten(0, 1)[slots_T].float(), k_Td.to(stored_as).float())
    assert torch.equal(values_PSv.flatten(0, 1)[slots_T].float(), v_Tv.to(stored_as).float())
    assert not pool.layer(0)[0].float().any()
    pool.clear(torch.tensor([1]))
    assert not keys_PSd[1].float().any() and keys_PSd[3].float().any()


def test_float8_keeps_its_range_and_shows_what_is_not_finite() -> None:
    pool = KVPool.allocate(layout(16, 16), 1, torch.float32, CPU, stored_as=FLOAT8)
    k_Td = torch.full((1, 16), 1e9)
    k_Td[0, 0] = float("inf")
    pool.write(0, torch.tensor([0]), k_Td, k_Td)
    row_d = pool.layer(0)[0][0, 0].float()
    assert row_d[0].isnan() and (row_d[1:] == torch.finfo(FLOAT8).max).all()


def test_more_memory_than_there_can_be_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes cannot be had"):
        KVPool.allocate(layout(1024, 1024), 2**40, torch.float32, CPU)


def test_another_device_has_its_zeros_at_once() -> None:
    pool = KVPool.allocate(layout(16, 16), 3, torch.float32, torch.device("meta"))
    assert pool.numbers_PN.is_meta and pool.num_pages == 3
