"""The GPU's kernels under Triton's interpreter: the reference's numbers on ragged batches, and
their own bits in any company.
"""

import random
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from msgspec import structs

from model.decode import NO_LINE, NO_SAMPLE
from model.devices.gpu.attention.configurations import Configuration, Splits
from model.layers import Rotation
from tests.support.attention_cases import SHORT, Case, captured_plan
from tests.support.kernel_launches import watched

pytestmark = pytest.mark.usefixtures("interpreter")

EXACT = 1e-5
# The interpreter cuts bfloat16 off instead of rounding it: two units of the last place.
NEAR = {torch.float32: EXACT, torch.float16: 2e-3, torch.bfloat16: 2.0**-6}

FAMILIES = [
    ("starcoderbase-1b", 16, 128, None),
    ("starcoder", 48, 128, None),
    ("falcon-7b", 71, 64, None),
    ("gemma-2b", 8, 256, None),
    ("gemma-3-1b", 4, 256, None),
    ("phi-like", 32, 96, None),
    ("odd", 5, 80, None),
    ("narrow", 3, 6, None),
    ("deepseek-v2-lite", 16, 576, 512),
    ("deepseek-v3", 128, 576, 512),
    ("minicpm3", 40, 288, 256),
    ("tiny latent", 7, 40, 24),
]
"""(name, query heads, columns of a key, of the value that is its beginning)"""


@pytest.mark.parametrize("dtype", NEAR, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    ("num_heads", "key_dim", "value_dim"),
    [family[1:] for family in FAMILIES],
    ids=[name for name, *_ in FAMILIES],
)
@torch.inference_mode()
def test_every_head_count_and_width_of_the_families(
    num_heads: int, key_dim: int, value_dim: int | None, dtype: torch.dtype
) -> None:
    """As they are shipped."""
    Case(
        num_heads, num_heads, key_dim, value_dim, 64, most=90, dtype=dtype, configuration=None
    ).check(NEAR[dtype])


@pytest.mark.parametrize("seed", range(8))
@torch.inference_mode()
def test_ragged_batches_pages_windows_and_splits(seed: int) -> None:
    rng = random.Random(seed)
    page_size, rows = rng.choice([16, 32, 64, 256]), rng.choice([16, 32])
    window = rng.choice([None, 1, 5, 33, 70])
    case = Case(
        seed,
        rng.choice([1, 2, 3, 7, 12]),
        32,
        None,
        page_size,
        window,
        configuration=Configuration(rows, 16, 4, 1),
        kernels=rng.choice(["triton", "triton-fast"]),
    )
    case.splits = Splits(rng.choice([16, 32, 64]), rng.choice([2, 5, 64]))
    for layer in (0, 2) if window else (0,):
        case.check(EXACT, layer)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "key_dim"), [family[1:3] for family in FAMILIES if family[3] is None]
)
@torch.inference_mode()
def test_what_positions_turn_is_turned_on_the_way(
    num_heads: int, key_dim: int, interleaved: bool
) -> None:
    """In float32 the keys that are stored are torch's, bit for bit."""
    case = Case(num_heads, num_heads, key_dim, window=(None, 33)[interleaved], most=90)
    case.rotate(interleaved)
    case.check(EXACT, 2 if interleaved else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@torch.inference_mode()
def test_what_is_turned_is_rounded_once(dtype: torch.dtype) -> None:
    """As if the reference were handed what torch turns in float32."""
    cases = [Case(1, 20, 64, dtype=dtype) for _ in range(2)]
    cases[0].rotate(interleaved=False)
    for i, (row, (q_nHd, k_nd, v_nv)) in enumerate(
        zip(cases[0].rows, cases[0].inputs, strict=True)
    ):
        rotation = cases[0].rotation(torch.arange(row.start, row.start + len(row.tokens)))
        assert rotation is not None and rotation.cosine_Tr.dtype is dtype
        exact = Rotation(rotation.cosine_Tr.float(), rotation.sine_Tr.float(), rotation.interleaved)
        cases[1].inputs[i] = *(x.to(dtype) for x in exact.both(q_nHd.float(), k_nd.float())), v_nv
    pools = [case.pool() for case in cases]
    outputs = [
        torch.cat(case.run(case.everyone(), pool=pool))
        for case, pool in zip(cases, pools, strict=True)
    ]
    turned, expected = (pool.layer(0)[0].float().nan_to_num() for pool in pools)
    if dtype is torch.float16:
        assert torch.equal(turned, expected) and torch.equal(*outputs)
    else:
        # The interpreter cuts off.
        assert ((turned - expected).abs() <= 2.0**-7 * expected.abs()).all() and not torch.equal(
            turned, torch.zeros_like(turned)
        )


def check_random_step(seed: int) -> None:
    """A step of columns, single tokens and chunks in random order, of which any kind may be absent,
    some rows drawing and some not.
    """
    rng = random.Random(seed)
    window = rng.choice([None, None, 20])
    kernels = rng.choice(["triton-fast", "triton-fast", "triton"])
    case = Case(
        seed, rng.choice([1, 3, 16]), 32, rng.choice([None, 16]), 16, window, 60, kernels=kernels
    )
    case.rows = [structs.replace(row, sample=rng.choice([None, NO_SAMPLE])) for row in case.rows]
    if rng.random() < 0.6:  # No chunks.
        case.rows = [structs.replace(row, tokens=row.tokens[:1]) for row in case.rows]
        case.inputs = [tuple(x[:1] for x in inputs) for inputs in case.inputs]
    if not case.value_in_key and rng.random() < 0.5:
        case.rotate(rng.random() < 0.5)
    order = rng.sample(case.everyone(), len(case.rows))
    columns = [
        i for i in order if len(case.rows[i].tokens) == 1 and case.rows[i].sample is not None
    ][: rng.randint(0, 2)]
    order = columns + [i for i in order if i not in columns]
    case.rows, case.inputs = [case.rows[i] for i in order], [case.inputs[i] for i in order]
    layer = rng.choice([0, 2]) if window else 0
    with patch("model.devices.gpu.attention.plan.FEW_TOKENS", rng.choice([1, 64])):
        case.check(EXACT, layer, num_decoding=len(columns), draws=False)


@pytest.mark.parametrize("seed", range(24))
@torch.inference_mode()
def test_random_steps_of_rows_that_draw_and_rows_that_do_not(seed: int) -> None:
    check_random_step(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
@torch.inference_mode()
def test_a_thousand_random_steps(hundred: int) -> None:
    for seed in range(hundred * 100, hundred * 100 + 100):
        check_random_step(seed)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@torch.inference_mode()
def test_blocks_that_are_pages(page_size: int) -> None:
    case = Case(
        page_size,
        4,
        32,
        None,
        page_size,
        configuration=Configuration(16, page_size, 4, 1),
    )
    case.check(EXACT)


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
@torch.inference_mode()
def test_the_same_bits_alone_in_company_and_in_pieces(seed: int) -> None:
    window = (None, 20)[seed % 2]
    case = Case(seed, (3, 16, 7)[seed % 3], 32, (None, 16)[seed // 2 % 2], window=window, most=200)
    if not case.value_in_key:
        case.rotate(interleaved=seed == 1)
    layer = 1 if window else 0
    everyone = case.everyone()
    together = case.run(everyone, layer)
    for i in everyone:
        assert torch.equal(case.run([i], layer)[0], together[i])
        count = len(case.rows[i].tokens)
        cut = case.rng.randint(1, count)
        for pieces in ([cut, count - cut], [1] * min(count, 6) + [count - 6] * (count > 6)):
            assert torch.equal(case.cut(i, [n for n in pieces if n], layer), together[i])


@pytest.mark.parametrize("most", [40, 200])
@torch.inference_mode()
def test_the_same_bits_when_the_scratch_is_short(most: int) -> None:
    """In as few launches as the splits that there are allow."""
    case = Case(3, 4, 32, most=most)
    whole = case.run(case.everyone())
    num_tokens = sum(len(row.tokens) for row in case.rows)
    num_keys = max(row.start + len(row.tokens) for row in case.rows)
    case.capacity, launched = 2 * SHORT.most, list[str]()
    with watched(lambda name, _: launched.append(name)):
        outputs = case.run(case.everyone())
    assert all(map(torch.equal, outputs, whole))
    num_splits = min(SHORT.most, -(-num_keys // SHORT.keys))
    num_launches = -(-num_tokens // (case.capacity // num_splits))
    assert launched.count("decode") == num_launches > 1


@pytest.mark.parametrize("part", range(3))
@torch.inference_mode()
def test_a_nan_stays_one_and_stays_where_it_is(part: int) -> None:
    case = Case(1, 4, 32)
    everyone = case.everyone()
    before = case.run(everyone)
    case.inputs[1][part][0] = torch.nan
    after = case.run(everyone)
    assert after[1][0].isnan().all()
    assert all(torch.equal(before[i], after[i]) for i in everyone if i != 1)


@pytest.mark.parametrize("rotated", [False, True])
@torch.inference_mode()
def test_padding_computes_and_writes_nothing(rotated: bool) -> None:
    case = Case(5, 4, 32)
    if rotated:
        case.rotate(interleaved=False)
    pool = case.pool()
    backend = case.backend("triton", pool)
    from model.batch import build_batch
    from model.devices.gpu.device import GpuDevice
    from model.step import StepPlan

    batch = build_batch(StepPlan(tuple(case.rows)), case.layout, GpuDevice("cpu").upload)
    plan = backend.plan(batch)
    plan.positions_T[:] = NO_LINE
    q_THd, k_Td, v_Tv = (torch.cat([inputs[part] for inputs in case.inputs]) for part in range(3))
    before = pool.numbers_PN.clone()
    backend.partial.fill_(7.0)
    backend.run(plan, 0, q_THd, k_Td, v_Tv, case.rotation(batch.position_ids_T))
    assert torch.equal(before.nan_to_num(9.0), pool.numbers_PN.nan_to_num(9.0))
    assert (backend.partial == 7.0).all()


@pytest.mark.parametrize("rotated", [False, True])
@torch.inference_mode()
def test_queries_keys_and_values_as_the_projection_lays_them_out(rotated: bool) -> None:
    """Columns of one matrix, read where they lie."""
    case = Case(2, 4, 32)
    if rotated:
        case.rotate(interleaved=False)
    apart = case.run(case.everyone())
    for i, (q_nHd, k_nd, v_nv) in enumerate(case.inputs):
        qkv_nE = torch.cat([q_nHd.flatten(1), k_nd, v_nv], dim=1)
        q_nE, k_nd, v_nv = qkv_nE.split([128, 32, 32], dim=1)
        case.inputs[i] = q_nE.view(-1, 4, 32), k_nd, v_nv
    for i, expected in enumerate(apart):
        assert torch.equal(case.run([i])[0], expected)


def test_short_splits_are_several() -> None:
    """What the tests above stand on."""
    assert any(
        row.start + len(row.tokens) > 2 * SHORT.keys for row in Case(0, 4, 32, most=300).rows
    )


@pytest.mark.parametrize(("seed", "window"), [(0, None), (1, 20), (2, 70), (4, None)])
@pytest.mark.parametrize(("num_rows", "rotated"), [(5, False), (8, False), (8, True)])
@torch.inference_mode()
def test_single_tokens_over_larger_lists_have_the_same_bits(
    seed: int, window: int | None, num_rows: int, rotated: bool
) -> None:
    """As a captured step has them: filled up with rows that are nobody's, and with room for longer
    contexts.
    """
    from model.batch import build_batch
    from model.devices.gpu.device import GpuDevice
    from model.step import StepPlan

    case = Case(seed, (3, 16, 20)[seed % 3], 32, window=window, most=200)
    case.rows = [structs.replace(row, tokens=row.tokens[:1]) for row in case.rows]
    case.inputs = [tuple(x[:1] for x in inputs) for inputs in case.inputs]
    batch = build_batch(StepPlan(tuple(case.rows)), case.layout, GpuDevice("cpu").upload)
    nobody = num_rows - len(case.rows)
    rotation = None
    if rotated:
        case.rotate(interleaved=False)
        rotation = case.rotation(F.pad(batch.position_ids_T, (0, nobody)))
    q_THd, k_Td, v_Tv = (
        torch.cat(
            [
                *(inputs[part] for inputs in case.inputs),
                torch.full_like(case.inputs[0][part], torch.nan).repeat_interleave(nobody, 0),
            ]
        )
        for part in range(3)
    )
    for layer in (0, 2) if window else (0,):
        pools = case.pool(), case.pool()
        expected = torch.cat(case.run(case.everyone(), layer, pool=pools[0]))
        backend = case.backend("triton", pools[1])
        plan = captured_plan(backend, case.rows, num_rows, num_keys=512)
        o_THv = backend.run(plan, layer, q_THd, k_Td, v_Tv, rotation)
        assert torch.equal(o_THv[: len(case.rows)], expected)
        assert torch.equal(*(pool.numbers_PN.nan_to_num() for pool in pools))
