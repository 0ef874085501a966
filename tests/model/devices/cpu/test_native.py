"""The CPU kernels against float64 on ragged batches, and bit for bit against themselves in any
company; at every width of vectors that this machine runs.
"""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cache.layout import CacheLayout, Columns
from cache.pages import PageAllocator
from cache.pool import KVPool
from cache.table import PageTable
from model.batch import build_batch
from model.devices import create_backend, find_device
from model.devices.cpu import native
from model.spec import OptionError
from model.step import Row, StepPlan
from tests.support.paths import ROOT

CPU = torch.device("cpu")
WIDTHS = list({native.library(width)._name: width for width in native.FEATURES}.values())


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels of one width, in place of this processor's widest."""
    chosen = native.library(request.param)
    monkeypatch.setattr("model.devices.cpu.attention.library", lambda: chosen)
    yield request.param


class Case:
    """Sequences of random lengths, each with some tokens to compute, over pages of random numbers
    in a random order.
    """

    def __init__(
        self,
        seed: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        page_size: int,
        window: int | None,
        most: int = 200,
        value_in_key: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        columns = [Columns(key_dim, value_dim, value_in_key)]
        self.layout = CacheLayout.of(1, (window,) if window else (), page_size, columns)
        self.num_heads, self.dims = num_heads, (key_dim, value_dim)
        self.allocator = PageAllocator(100)
        self.value_in_key = value_in_key
        self.keys = torch.randn(1, 100, page_size, key_dim)
        self.values = (
            self.keys[..., :value_dim]
            if value_in_key
            else torch.randn(1, 100, page_size, value_dim)
        )
        self.rows: list[Row] = []
        self.inputs: list[tuple[torch.Tensor, ...]] = []
        for id in range(self.rng.randint(1, 6)):
            start = self.rng.choice([0, self.rng.randrange(most)])
            count = self.rng.choice([1, 1, self.rng.randint(1, 40)])
            table = PageTable(self.allocator, self.layout)
            self.allocator._free = self.rng.sample(self.allocator._free, len(self.allocator._free))
            table.grow(start + count, start + count)
            self.rows.append(Row(id, [0] * count, start, table.pages, None))
            k_nd = torch.randn(count, key_dim)
            v_nv = k_nd[:, :value_dim] if value_in_key else torch.randn(count, value_dim)
            self.inputs.append((torch.randn(count, num_heads, key_dim) * 3, k_nd, v_nv))

    def run(self, chosen: list[int], pool: KVPool | None = None) -> list[torch.Tensor]:
        """The outputs of these rows, computed together."""
        pool = pool or self.pool()
        batch = build_batch(
            StepPlan(tuple(self.rows[i] for i in chosen)), self.layout, find_device("cpu").upload
        )
        q_THd, k_Td, v_Tv = (torch.cat([self.inputs[i][part] for i in chosen]) for part in range(3))
        backend = create_backend("native", pool, self.dims[0] ** -0.5, self.num_heads)
        o_THv = backend.run(backend.plan(batch), 0, q_THd, k_Td, v_Tv)
        return list(o_THv.split([len(self.rows[i].tokens) for i in chosen]))

    def pool(self, dtype: torch.dtype = torch.float32) -> KVPool:
        transposed = self.keys.transpose(2, 3).contiguous().view(self.keys.shape).to(dtype)
        held = (transposed,) if self.value_in_key else (transposed, self.values.to(dtype))
        numbers_PN = torch.cat([x[0].flatten(1) for x in held], dim=1)
        whole = {2: torch.int16, 4: torch.int32}[numbers_PN.itemsize]
        sums_P = numbers_PN.view(whole).sum(dim=1)
        return KVPool(self.layout, numbers_PN, torch.float32, sums_P)

    def exact(self, i: int) -> torch.Tensor:
        """softmax(q K^T * scale) V of row i in float64, by the formula."""
        row, (q_nHd, k_nd, v_nv) = self.rows[i], (x.double() for x in self.inputs[i])
        end, window = row.start + len(row.tokens), self.layout.groups[0].window or 10**9
        k_Kd, v_Kv = (
            x[0, list(row.pages[0])].flatten(0, 1)[:end].double() for x in (self.keys, self.values)
        )
        k_Kd[row.start :], v_Kv[row.start :] = k_nd, v_nv
        age_nK = torch.arange(row.start, end)[:, None] - torch.arange(end)
        logits_nHK = torch.einsum("nhd,kd->nhk", q_nHd, k_Kd) * self.dims[0] ** -0.5
        logits_nHK.masked_fill_(((age_nK < 0) | (age_nK >= window))[:, None], -torch.inf)
        return torch.einsum("nhk,kv->nhv", logits_nHK.softmax(dim=-1), v_Kv)

    def cut(self, i: int, at: int) -> torch.Tensor:
        """The output of row i, computed in two steps."""
        row, inputs = self.rows[i], self.inputs[i]
        pool, outputs = self.pool(), []
        for first, last in ((0, at), (at, len(row.tokens))):
            if first < last:
                self.rows[i] = Row(
                    row.sequence, row.tokens[first:last], row.start + first, row.pages, None
                )
                self.inputs[i] = tuple(x[first:last] for x in inputs)
                outputs += self.run([i], pool)
        self.rows[i], self.inputs[i] = row, inputs
        return torch.cat(outputs)


def cases(count: int) -> Iterator[Case]:
    for seed in range(count):
        rng = random.Random(seed)
        num_heads, page_size = rng.choice([1, 2, 7, 12, 16, 48]), rng.choice([16, 64, 128])
        yield Case(
            seed,
            num_heads,
            rng.choice([32, 64, 80]),
            rng.choice([16, 64, 96]),
            page_size,
            rng.choice([None, None, 5, 70]),
        )


def check_exact(case: Case, most: float = 2e-5) -> None:
    for i, actual in enumerate(case.run(list(range(len(case.rows))))):
        assert (actual - case.exact(i)).abs().max() < most


@torch.inference_mode()
def test_attention_is_float64s_on_ragged_batches(width: str) -> None:
    for case in cases(60):
        check_exact(case, 5e-6)


@pytest.mark.parametrize("num_heads", range(1, 72, 5))
@torch.inference_mode()
def test_every_number_of_heads_and_width_of_keys(width: str, num_heads: int) -> None:
    for key_dim in (32, 48, 128, 256, 576):
        check_exact(Case(num_heads, num_heads, key_dim, min(key_dim, 512), 64, None, most=100))


LATENT = [(7, 288, 256, 64), (1, 48, 32, 16), (16, 576, 512, 64), (5, 80, 80, 128)]
"""(heads, columns of a key, of the value that is its beginning, slots of a page)"""


@pytest.mark.parametrize(("num_heads", "key_dim", "value_dim", "page_size"), LATENT)
@torch.inference_mode()
def test_values_that_are_the_beginning_of_the_key(
    width: str, num_heads: int, key_dim: int, value_dim: int, page_size: int
) -> None:
    for seed in range(3):
        case = Case(
            seed, num_heads, key_dim, value_dim, page_size, None, most=100, value_in_key=True
        )
        check_exact(case)
        everyone = list(range(len(case.rows)))
        together = case.run(everyone)
        for i in everyone:
            assert torch.equal(case.run([i])[0], together[i])
            assert torch.equal(
                case.cut(i, case.rng.randint(0, len(case.rows[i].tokens))), together[i]
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_the_sums_of_pages_are_kept_as_they_are_written(width: str, dtype: torch.dtype) -> None:
    latent = (Case(seed, *LATENT[seed], None, most=100, value_in_key=True) for seed in range(2))
    for case in (*cases(10), *latent):
        pool, everywhere = case.pool(dtype), range(100)
        before = pool.numbers_PN.clone()
        case.run(list(range(len(case.rows))), pool)
        assert not torch.equal(before, pool.numbers_PN)
        are_whole = create_backend("native", pool, 1.0, case.num_heads).are_whole
        assert are_whole is not None and all(are_whole(everywhere))
        for _ in range(50):
            page = case.rng.choice(everywhere)
            held = pool.numbers_PN[page].view(torch.uint8)
            place = tuple(case.rng.randrange(size) for size in held.shape)
            held[place] ^= (flip := case.rng.randrange(1, 256))
            assert are_whole(everywhere) == [each != page for each in everywhere]
            held[place] ^= flip
        pool.clear(torch.tensor([2, 4]))
        assert all(are_whole(everywhere)) and not pool.numbers_PN[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_pages_of_16_bits_give_the_bits_of_the_same_numbers_in_float32(
    width: str, dtype: torch.dtype
) -> None:
    latent = (Case(seed, *LATENT[seed], None, most=100, value_in_key=True) for seed in range(2))
    for case in (*cases(10), *latent):
        everyone, half = list(range(len(case.rows))), case.pool(dtype)
        actual = case.run(everyone, half)
        case.keys, case.values = (x.to(dtype).float() for x in (case.keys, case.values))
        case.inputs = [
            (q_nHd, k_nd.to(dtype).float(), v_nv.to(dtype).float())
            for q_nHd, k_nd, v_nv in case.inputs
        ]
        whole = case.pool()
        for rounded, expected in zip(actual, case.run(everyone, whole), strict=True):
            assert torch.equal(rounded, expected)
        assert torch.equal(half.numbers_PN.float(), whole.numbers_PN)


KEY_DIMS = range(32, 577, 16)


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", range(1, 72))
@torch.inference_mode()
def test_every_number_of_heads_and_width_of_keys_at_length(width: str, num_heads: int) -> None:
    """Every number of heads, each with some of the widths; every width, with some of the numbers.
    Half of them with latents.
    """
    rng = random.Random(num_heads)
    widths = {KEY_DIMS[num_heads % len(KEY_DIMS)], *rng.sample(KEY_DIMS, 3)}
    for number, key_dim in enumerate(sorted(widths)):
        latent = (number + num_heads) % 2 == 0
        value_dim = rng.randrange(16, key_dim + 1, 16) if latent else rng.choice(KEY_DIMS)
        window = rng.choice([None, None, 5, 70])
        seed = 1000 * num_heads + key_dim
        check_exact(
            Case(
                seed,
                num_heads,
                key_dim,
                value_dim,
                rng.choice([16, 64, 128]),
                window,
                most=100,
                value_in_key=latent,
            )
        )


def test_a_cpu_without_kernels_is_told_how_to_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"none in .* is for this processor; .* C\+\+ compiler"):
        native.library.__wrapped__()


@pytest.mark.slow
def test_it_installs_without_a_compiler(tmp_path: Path) -> None:
    for name in ("commands", "server", "model", "cache", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source,
                tmp_path / "source" / name,
                ignore=shutil.ignore_patterns("*.so", "__pycache__"),
            )
        else:
            shutil.copy(source, tmp_path / "source" / name)
    installed = str(tmp_path / "installed")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        installed,
        str(tmp_path / "source"),
    ]
    subprocess.run(pip, check=True, env=os.environ | {"CC": "false", "CXX": "false"})
    program = "from model.devices.cpu import native; print(native.__file__); native.library()"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=installed, capture_output=True, text=True
    )
    assert found.stdout == f"{installed}/model/devices/cpu/native/__init__.py\n"
    assert "OptionError: a CPU needs onehead's kernels" in found.stderr


@torch.inference_mode()
def test_the_same_bits_alone_in_company_in_pieces_and_on_any_number_of_threads(width: str) -> None:
    threads = torch.get_num_threads()
    for case in cases(40):
        everyone = list(range(len(case.rows)))
        together = case.run(everyone)
        for i in everyone:
            assert torch.equal(case.run([i])[0], together[i])
            assert torch.equal(
                case.cut(i, case.rng.randint(0, len(case.rows[i].tokens))), together[i]
            )
        shuffled = case.rng.sample(everyone, len(everyone))
        try:
            torch.set_num_threads(1)
            for i, alone in zip(shuffled, case.run(shuffled), strict=True):
                assert torch.equal(alone, together[i])
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("part", range(3))
@torch.inference_mode()
def test_a_nan_stays_one_and_stays_where_it_is(width: str, part: int) -> None:
    case = next(case for case in cases(40) if len(case.rows) > 2)
    everyone = list(range(len(case.rows)))
    before = case.run(everyone)
    case.inputs[1][part][0] = torch.nan
    after = case.run(everyone)
    assert after[1][0].isnan().all()
    assert all(torch.equal(before[i], after[i]) for i in everyone if i != 1)
