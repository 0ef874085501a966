"""Random sequences over paged keys, to be attended to by one device's kernels and by the reference.

Invariant: a case's numbers depend on its arguments other than the device and the kernels, so that
every device computes the same.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec import structs

from cache.layout import CacheLayout, Columns
from cache.pages import PageAllocator
from cache.pool import KVPool, in_float8
from cache.table import PageTable
from model.batch import build_batch
from model.decode import NO_LINE, NO_SAMPLE, DecodeTable, table_widths
from model.devices import create_backend
from model.devices.gpu.attention.configurations import Configuration, Splits
from model.devices.gpu.device import GpuDevice
from model.draw_words import aligned
from model.layers import RotaryTable, Rotation
from model.spec import Rotary
from model.step import PENDING, Row, StepPlan

SMALL = Configuration(16, 16, 4, 1)
SHORT = Splits(32, 6)
"""So that short sequences have several, and some of them as many as there may be."""


class Case:
    """Sequences of random lengths, each with some tokens to compute. Slots that were never written
    hold NaN; pages before a window are released.

    With a window there are three layers: the first sees all, the others, stacked on pages of their
    own, see the window.
    """

    def __init__(
        self,
        seed: int,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        page_size: int = 16,
        window: int | None = None,
        most: int = 150,
        dtype: torch.dtype = torch.float32,
        configuration: Configuration | None = SMALL,
        in_float8: bool = False,
        device: str = "cpu",
        kernels: str = "triton",
    ) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.num_heads, self.key_dim, self.value_dim = num_heads, key_dim, value_dim or key_dim
        self.value_in_key = value_dim is not None
        windows = (None, window, window) if window else (None,)
        columns = [Columns(key_dim, self.value_dim, self.value_in_key)] * len(windows)
        self.layout = CacheLayout.of(len(windows), windows, page_size, columns)
        self.configuration, self.dtype, self.in_float8 = configuration, dtype, in_float8
        self.splits = SHORT
        self.capacity: int | None = None
        self.device, self.kernels = GpuDevice(device), kernels
        self.rotary: Rotary | None = None
        allocator = PageAllocator(200)
        shape = self.layout.groups[0].layers_per_page, allocator.num_pages, page_size
        self.keys = torch.full((*shape, key_dim), torch.nan, dtype=dtype)
        self.values = (
            self.keys[..., : self.value_dim]
            if self.value_in_key
            else torch.full_like(self.keys, torch.nan)
        )
        self.rows: list[Row] = []
        self.inputs: list[tuple[torch.Tensor, ...]] = []
        for id in range(self.rng.randint(2, 5)):
            start = self.rng.choice([0, self.rng.randrange(most)])
            count = self.rng.choice([1, 1, 4, self.rng.randint(1, 40)])
            table = PageTable(allocator, self.layout)
            allocator._free = self.rng.sample(allocator._free, len(allocator._free))
            table.grow(start + count, start + count)
            self._fill(table, start)
            table.drop(start)
            self.rows.append(Row(id, [0] * count, start, table.pages, None))
            k_nd = torch.randn(count, key_dim, dtype=dtype)
            v_nv = k_nd[:, : self.value_dim] if self.value_in_key else torch.randn_like(k_nd)
            self.inputs.append(
                (torch.randn(count, num_heads, key_dim, dtype=dtype) * 3, k_nd, v_nv)
            )

    def _fill(self, table: PageTable, num_tokens: int) -> None:
        """Keys and values of the tokens that were computed before."""
        size = self.layout.page_size
        for group, pages in zip(self.layout.groups, table.pages, strict=True):
            for stack in range(group.num_stacks):
                for number, page in enumerate(pages[stack :: group.num_stacks]):
                    end = min(size, max(0, num_tokens - number * size))
                    self.keys[:, page, :end] = torch.randn(end, self.key_dim, dtype=self.keys.dtype)
                    if not self.value_in_key:
                        self.values[:, page, :end] = torch.randn(
                            end, self.value_dim, dtype=self.keys.dtype
                        )

    def pool(self) -> KVPool:
        held = (self.keys,) if self.value_in_key else (self.keys, self.values)
        layers = zip(*held, strict=True)
        numbers_PN = torch.cat([x.flatten(1) for layer in layers for x in layer], dim=1)
        stored_PN = in_float8(numbers_PN) if self.in_float8 else numbers_PN
        return KVPool(self.layout, stored_PN.to(self.device.torch_device), self.dtype)

    def backend(self, name: str, pool: KVPool) -> Any:
        scale = self.key_dim**-0.5
        if name == "reference" or self.configuration is None:
            return create_backend(name, pool, scale, self.num_heads)
        backend: Any = create_backend(name, pool, scale, self.num_heads)
        backend.chunks = self.configuration
        backend.decoding = lambda num_rows: (self.configuration, self.splits)
        backend.capacity = self.capacity or backend.capacity
        return backend

    def run(
        self,
        chosen: list[int],
        layer: int = 0,
        name: str | None = None,
        pool: KVPool | None = None,
        num_decoding: int = 0,
    ) -> list[torch.Tensor]:
        """The outputs of these rows, computed together; keys and values are written to `pool`."""
        backend = self.backend(name or self.kernels, pool or self.pool())
        batch = build_batch(self.step(chosen, num_decoding), self.layout, self.device.upload)
        q_THd, k_Td, v_Tv = (
            torch.cat([self.inputs[i][part] for i in chosen]).to(self.device.torch_device)
            for part in range(3)
        )
        o_THv = backend.run(
            backend.plan(batch), layer, q_THd, k_Td, v_Tv, self.rotation(batch.position_ids_T)
        )
        return list(o_THv.split([len(self.rows[i].tokens) for i in chosen]))

    def rotate(self, interleaved: bool) -> None:
        """From now on queries and keys get a rotary embedding, with a scale of 1.25."""
        self.rotary = Rotary(
            tuple(100.0 ** (-2 * i / self.key_dim) for i in range(self.key_dim // 2)),
            1.25,
            interleaved,
        )

    def rotation(self, position_ids_T: torch.Tensor) -> Rotation | None:
        return (
            None
            if self.rotary is None
            else RotaryTable(self.rotary)(position_ids_T, self.inputs[0][0].dtype)
        )

    def everyone(self) -> list[int]:
        return list(range(len(self.rows)))

    def cut(self, i: int, pieces: list[int], layer: int = 0) -> torch.Tensor:
        """The output of row i, so many tokens at a time."""
        row, inputs = self.rows[i], self.inputs[i]
        pool, outputs, first = self.pool(), [], 0
        for count in pieces:
            self.rows[i] = Row(
                row.sequence, row.tokens[first : first + count], row.start + first, row.pages, None
            )
            self.inputs[i] = tuple(x[first : first + count] for x in inputs)
            outputs += self.run([i], layer, pool=pool)
            first += count
        assert first == len(row.tokens)
        self.rows[i], self.inputs[i] = row, inputs
        return torch.cat(outputs)

    def step(self, chosen: Sequence[int], num_decoding: int = 0) -> StepPlan:
        """A step of these rows, of which the first `num_decoding`, which are single tokens, come as
        columns.
        """
        rows = [self.rows[i] for i in chosen]
        columns = (
            DecodeTable.of(self.layout, rows[:num_decoding], [PENDING] * num_decoding).advance()
            if num_decoding
            else None
        )
        return StepPlan(tuple(rows[num_decoding:]), decode=columns)

    def check(
        self, relative: float, layer: int = 0, num_decoding: int = 0, draws: bool = True
    ) -> None:
        """Attention and the keys and values that it stored are those of the reference. `draws`:
        about half of the rows draw a token, as backends may order rows by whether they do.
        """
        if draws:
            rng = random.Random(sum(row.start for row in self.rows))
            self.rows = [
                structs.replace(row, sample=rng.choice([None, NO_SAMPLE])) for row in self.rows
            ]
        pools = self.pool(), self.pool()
        outputs = [
            self.run(self.everyone(), layer, name, pool, num_decoding)
            for name, pool in zip(("reference", self.kernels), pools, strict=True)
        ]
        for expected, actual in zip(*outputs, strict=True):
            assert actual.dtype is expected.dtype and actual.isfinite().all()
            assert (
                (actual.float() - expected.float()).abs() <= relative * (1 + expected.float().abs())
            ).all()
        theirs_PN, ours_PN = (pool.numbers_PN.float() for pool in pools)
        assert torch.equal(ours_PN.isnan(), theirs_PN.isnan())
        assert torch.equal(ours_PN.nan_to_num(), theirs_PN.nan_to_num())


def captured_plan(backend: Any, rows: Sequence[Row], num_rows: int, num_keys: int = 0) -> Any:
    """A captured step's plan of the tokens of these rows, padded to `num_rows`, with launches for
    contexts of `num_keys`.
    """
    layout = backend.pool.layout
    step = DecodeTable.of(layout, rows, [PENDING] * len(rows)).advance()
    widths = table_widths(layout, step.num_keys)
    positions_B = np.full(num_rows, NO_LINE, np.int32)
    offsets_GB = np.zeros((len(widths), aligned(num_rows)), np.int32)
    pages_P = np.zeros(len(step) * sum(widths), np.int32)
    positions_B[: len(step)] = step.positions_R
    step.list_pages(widths, offsets_GB, pages_P)
    numbers = (torch.from_numpy(each) for each in (positions_B, offsets_GB, pages_P))
    return backend.listed(*numbers, num_keys or step.num_keys)
