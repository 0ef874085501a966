"""The decode kernel and the tiles of chunks under Triton's interpreter: softmax attention in
float64, over outputs and scratch memory that hold NaN before every launch.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec import structs

from model.devices.gpu.attention import configurations
from model.devices.gpu.attention.configurations import choose_splits
from model.layers import Rotation
from tests.support.attention_cases import Case, captured_plan
from tests.triton.test_kernels import NEAR

pytestmark = pytest.mark.usefixtures("interpreter", "poisoned")

SHAPES = [
    (16, 128, None),
    (48, 128, None),
    (71, 64, None),
    (8, 256, None),
    (4, 256, None),
    (16, 576, 512),
    (128, 576, 512),
]
"""(query heads, columns of a key, of the value that is its beginning)"""
DTYPES = [torch.float32, torch.bfloat16]


def single(case: Case) -> Case:
    """Of every row only its first token is computed."""
    case.rows = [structs.replace(row, tokens=row.tokens[:1]) for row in case.rows]
    case.inputs = [tuple(x[:1] for x in inputs) for inputs in case.inputs]
    return case


def made(
    num_heads: int, key_dim: int, value_dim: int | None, dtype: torch.dtype, **options: Any
) -> Case:
    """Single tokens after long contexts: several splits of 256 keys."""
    options = {
        "page_size": 64,
        "most": 900,
        "configuration": None,
        "kernels": "triton-fast",
    } | options
    return single(Case(num_heads, num_heads, key_dim, value_dim, dtype=dtype, **options))


def launch(
    case: Case,
    chosen: list[int],
    num_rows: int,
    layer: int = 0,
    backend: Any = None,
    pool: Any = None,
) -> torch.Tensor:
    """The outputs of these rows as a captured step computes them, padded to `num_rows` rows whose
    inputs are NaN.
    """
    backend = backend or case.backend("triton-fast", pool or case.pool())
    plan = captured_plan(backend, [case.rows[i] for i in chosen], num_rows)
    num_tokens = sum(len(case.rows[i].tokens) for i in chosen)
    padding = num_rows - num_tokens
    parts = ([case.inputs[i][part] for i in chosen] for part in range(3))
    q_THd, k_Td, v_Tv = (
        torch.cat([*part, torch.full_like(part[0][:1], torch.nan).repeat_interleave(padding, 0)])
        for part in parts
    )
    positions = [
        case.rows[i].start + place for i in chosen for place in range(len(case.rows[i].tokens))
    ]
    position_T = torch.tensor(positions + [0] * padding)
    for scratch in (backend.partial, backend.peaks, backend.sums):
        # A signalling NaN: an operation on it is an error here, even if its result goes nowhere.
        scratch.view(torch.int32).fill_(0x7FA00000)
    o_THv = backend.run(plan, layer, q_THd, k_Td, v_Tv, case.rotation(position_T))
    assert not backend.counters.any()
    assert o_THv[num_tokens:].isnan().all()
    return o_THv[:num_tokens]


def turned(rotation: Rotation | None, x_nhd: torch.Tensor) -> torch.Tensor:
    """x, rotated in float32 and rounded once."""
    if rotation is None:
        return x_nhd
    exact_nhd = Rotation(
        rotation.cosine_Tr.float(), rotation.sine_Tr.float(), rotation.interleaved
    )(x_nhd.float())
    return exact_nhd.to(x_nhd.dtype)


def expected(case: Case, pool: Any, layer: int = 0) -> Iterator[torch.Tensor]:
    """Attention of every row's tokens in float64, over the numbers that the pool holds after the
    launch.
    """
    place = case.layout.places[layer]
    group, (keys_PSd, values_PSv) = case.layout.groups[place.group], pool.layer(layer)
    for row, (q_nHd, _, _) in zip(case.rows, case.inputs, strict=True):
        position_n = row.start + torch.arange(len(row.tokens))
        q_nHd = turned(case.rotation(position_n), q_nHd)
        pages = list(row.pages[place.group][place.stack :: group.num_stacks])
        for position, q_Hd in zip(position_n.tolist(), q_nHd, strict=True):
            seen = slice(group.first_seen(position), position + 1)
            k_Kd, v_Kv = (x[pages].flatten(0, 1)[seen].double() for x in (keys_PSd, values_PSv))
            yield (q_Hd.double() @ k_Kd.T * case.key_dim**-0.5).softmax(-1) @ v_Kv


def check(case: Case, pool: Any, outputs: torch.Tensor, layer: int = 0) -> None:
    exact_THv = torch.stack(list(expected(case, pool, layer)))
    assert outputs.isfinite().all() and outputs.dtype is case.dtype
    assert ((outputs.double() - exact_THv).abs() <= NEAR[case.dtype] * (1 + exact_THv.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "key_dim", "value_dim"), SHAPES)
@torch.inference_mode()
def test_every_shape_is_attention_in_float64(
    num_heads: int, key_dim: int, value_dim: int | None, dtype: torch.dtype
) -> None:
    case = made(num_heads, key_dim, value_dim, dtype)
    if value_dim is None:
        case.rotate(interleaved=dtype is torch.float32)
    pool = case.pool()
    check(case, pool, launch(case, case.everyone(), 5, pool=pool))
    assert max(row.start for row in case.rows) > 256


@pytest.mark.parametrize(("rows", "many"), [(1, 192), (24, 192), (256, 2)])
@pytest.mark.parametrize(("window", "layer"), [(None, 0), (100, 0), (100, 2), (300, 1)])
@torch.inference_mode()
def test_every_class_of_rows_with_and_without_windows(
    rows: int, many: int, window: int | None, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = choose_splits(128, rows)
    chosen = "model.devices.gpu.attention.backend.choose_splits"
    monkeypatch.setattr(chosen, lambda *_: splits)
    monkeypatch.setattr(configurations, "MANY_ROWS", many)
    case = made(16, 128, None, torch.bfloat16, window=window, most=1500)
    case.rotate(interleaved=False)
    pool = case.pool()
    check(case, pool, launch(case, case.everyone(), 5, layer, pool=pool), layer)


def chunks(
    num_heads: int,
    key_dim: int,
    value_dim: int | None,
    dtype: torch.dtype,
    window: int | None = None,
) -> Case:
    """Chunks of prompts and single tokens, some of them at the beginning of a context."""
    return Case(
        23, num_heads, key_dim, value_dim, 64, window, 300, dtype, None, kernels="triton-fast"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "key_dim", "value_dim", "window"),
    [(16, 128, None, None), (16, 128, None, 20), (8, 256, None, None), (16, 576, 512, None)],
)
@torch.inference_mode()
def test_tokens_of_chunks_as_single_tokens_are_attention_in_float64(
    num_heads: int, key_dim: int, value_dim: int | None, window: int | None, dtype: torch.dtype
) -> None:
    """Each sees those before it that the same step stores; the same bits alone and in company."""
    case, layer = chunks(num_heads, key_dim, value_dim, dtype, window), 1 if window else 0
    if value_dim is None:
        case.rotate(interleaved=dtype is torch.float32)
    num_tokens = sum(len(row.tokens) for row in case.rows)
    assert num_tokens > len(case.rows) + 3
    pool = case.pool()
    together = launch(case, case.everyone(), num_tokens + 5, layer, pool=pool)
    check(case, pool, together, layer)
    shortest = min(case.everyone(), key=lambda i: len(case.rows[i].tokens))
    first = sum(len(row.tokens) for row in case.rows[:shortest])
    count = len(case.rows[shortest].tokens)
    assert torch.equal(launch(case, [shortest], count + 1, layer), together[first : first + count])


@pytest.mark.parametrize("page_size", [16, 32, 128])
@torch.inference_mode()
def test_pages_of_other_sizes(page_size: int) -> None:
    case = made(16, 128, None, torch.bfloat16, page_size=page_size, most=500)
    pool = case.pool()
    check(case, pool, launch(case, case.everyone(), 5, pool=pool))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "key_dim", "value_dim"), [SHAPES[0], SHAPES[2], SHAPES[5]])
@torch.inference_mode()
def test_a_cache_in_float8(
    num_heads: int, key_dim: int, value_dim: int | None, dtype: torch.dtype
) -> None:
    case = made(num_heads, key_dim, value_dim, dtype, in_float8=True)
    pool = case.pool()
    check(case, pool, launch(case, case.everyone(), 5, pool=pool))


@pytest.mark.parametrize(
    ("num_heads", "key_dim", "value_dim", "window"),
    [(16, 128, None, None), (16, 128, None, 300), (20, 80, 64, None)],
)
@torch.inference_mode()
def test_the_same_bits_alone_and_in_company(
    num_heads: int, key_dim: int, value_dim: int | None, window: int | None
) -> None:
    case = made(num_heads, key_dim, value_dim, torch.bfloat16, window=window)
    layer = 1 if window else 0
    together = launch(case, case.everyone(), len(case.rows), layer)
    for i in case.everyone():
        assert torch.equal(launch(case, [i], 1, layer)[0], together[i])
        assert torch.equal(launch(case, [i], 3, layer)[0], together[i])


@pytest.mark.parametrize(("value_dim", "window"), [(None, None), (None, 20), (24, None)])
@torch.inference_mode()
def test_it_writes_the_new_key_and_value_and_nothing_else(
    value_dim: int | None, window: int | None
) -> None:
    """Bit for bit what the reference stores; padding stores nothing."""
    case = made(5, 32, value_dim, torch.float32, window=window, page_size=16, most=200)
    if value_dim is None:
        case.rotate(interleaved=False)
    for layer in (0, 2) if window else (0,):
        pools = case.pool(), case.pool()
        launch(case, case.everyone(), 8, layer, pool=pools[0])
        case.run(case.everyone(), layer, "reference", pools[1])
        numbers = [pool.numbers_PN for pool in (*pools, case.pool())]
        held = zip(*(pool.layer(layer) for pool in (*pools, case.pool())), strict=True)
        for ours, theirs, before in [*held]:
            assert torch.equal(*(x.nan_to_num(9.0) for x in numbers[:2]))
            assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(
                ours.nan_to_num(), theirs.nan_to_num()
            )
            assert int((ours.nan_to_num(9.0) != before.nan_to_num(9.0)).any(-1).sum()) == len(
                case.rows
            )


@torch.inference_mode()
def test_a_step_of_padding_touches_nothing() -> None:
    case = made(16, 128, None, torch.bfloat16, most=100)
    pool = case.pool()
    backend = case.backend("triton-fast", pool)
    plan = captured_plan(backend, case.rows, 4)
    plan.positions_T[:] = -1
    plan.pages_P[:] = 10**6
    before = pool.numbers_PN.clone()
    q_THd = torch.full((4, 16, 128), torch.nan, dtype=case.dtype)
    k_Td = torch.full((4, 128), torch.nan, dtype=case.dtype)
    assert backend.run(plan, 0, q_THd, k_Td, k_Td).isnan().all()
    assert torch.equal(before.nan_to_num(9.0), pool.numbers_PN.nan_to_num(9.0))
    assert not backend.counters.any()


@pytest.mark.parametrize("capacity", [8, 20, 40])
@torch.inference_mode()
def test_splits_are_longer_where_the_scratch_is_short(capacity: int) -> None:
    case = made(16, 128, None, torch.bfloat16, most=1500)
    assert max(row.start for row in case.rows) > 1024
    pool = case.pool()
    backend = case.backend("triton-fast", pool)
    backend.capacity = capacity
    check(case, pool, launch(case, case.everyone(), 5, backend=backend))
    assert not backend.partial[capacity * 16 * 128 :].isfinite().any()


@pytest.mark.parametrize("part", range(3))
@torch.inference_mode()
def test_a_nan_stays_one_and_stays_where_it_is(part: int) -> None:
    case = made(16, 128, None, torch.bfloat16, most=600)
    before = launch(case, case.everyone(), len(case.rows))
    case.inputs[1][part][0] = torch.nan
    after = launch(case, case.everyone(), len(case.rows))
    assert after[1].isnan().all()
    assert all(torch.equal(before[i], after[i]) for i in case.everyone() if i != 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("few", [1, 1000])
@pytest.mark.parametrize(("num_heads", "key_dim", "value_dim"), SHAPES)
@torch.inference_mode()
def test_steps_of_chunks_and_single_tokens(
    num_heads: int,
    key_dim: int,
    value_dim: int | None,
    few: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With chunks in tiles, and as single tokens."""
    monkeypatch.setattr("model.devices.gpu.attention.plan.FEW_TOKENS", few)
    options: dict[str, Any] = {
        "page_size": 64,
        "most": 200,
        "dtype": dtype,
        "configuration": None,
        "kernels": "triton-fast",
    }
    cases = (Case(seed, num_heads, key_dim, value_dim, **options) for seed in range(20))
    case = next(
        case for case in cases if {len(row.tokens) == 1 for row in case.rows} == {True, False}
    )
    if value_dim is None:
        case.rotate(interleaved=False)
    pool = case.pool()
    check(case, pool, torch.cat(case.run(case.everyone(), pool=pool)))


@pytest.mark.parametrize("few", [1, 1000])
@pytest.mark.parametrize(("seed", "window"), [(0, 5), (1, 40), (4, 70)])
@torch.inference_mode()
def test_chunks_with_windows(
    seed: int, window: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.devices.gpu.attention.plan.FEW_TOKENS", few)
    case = Case(seed, 7, 32, None, 16, window, kernels="triton-fast")
    for layer in (0, 1):
        pool = case.pool()
        check(case, pool, torch.cat(case.run(case.everyone(), layer, pool=pool)), layer)
