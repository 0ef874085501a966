"""Keys and values that are stored in float8, under Triton's interpreter."""

import pytest
import torch

from cache.pool import in_float8
from model.devices.gpu.attention.configurations import Configuration
from tests.support.attention_cases import Case
from tests.triton.test_kernels import NEAR

pytestmark = pytest.mark.usefixtures("interpreter")

FAMILIES = [
    ("starcoderbase-1b", 16, 128, None),
    ("falcon-7b", 71, 64, None),
    ("deepseek-v2-lite", 16, 576, 512),
    ("tiny latent", 7, 40, 24),
]


@pytest.mark.parametrize("dtype", NEAR, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(
    ("num_heads", "key_dim", "value_dim"),
    [family[1:] for family in FAMILIES],
    ids=[name for name, *_ in FAMILIES],
)
@torch.inference_mode()
def test_attention_is_the_references(
    num_heads: int, key_dim: int, value_dim: int | None, dtype: torch.dtype
) -> None:
    """As they are shipped. What nobody wrote is NaN, in float8 too."""
    case = Case(
        num_heads,
        num_heads,
        key_dim,
        value_dim,
        64,
        most=90,
        dtype=dtype,
        configuration=None,
        in_float8=True,
    )
    assert case.pool().dtype is torch.float8_e4m3fn
    case.check(NEAR[dtype])


@pytest.mark.parametrize("seed", [1, 2])
@torch.inference_mode()
def test_the_same_bits_alone_in_company_and_in_pieces(seed: int) -> None:
    window = (None, 20)[seed % 2]
    case = Case(
        seed,
        (3, 16, 7)[seed % 3],
        32,
        (None, 16)[seed // 2 % 2],
        window=window,
        most=200,
        in_float8=True,
    )
    layer = 1 if window else 0
    case.check(NEAR[torch.float32], layer)
    everyone = case.everyone()
    together = case.run(everyone, layer)
    for i in everyone:
        assert torch.equal(case.run([i], layer)[0], together[i])
        count = len(case.rows[i].tokens)
        cut = case.rng.randint(1, count)
        assert torch.equal(case.cut(i, [n for n in (cut, count - cut) if n], layer), together[i])


@pytest.mark.parametrize(("number", "stored"), [(500.0, 448.0), (-1e6, -448.0), (3e38, 448.0)])
@torch.inference_mode()
def test_what_is_beyond_the_range_is_its_largest_number(number: float, stored: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(1, 4, 32, dtype=dtype, in_float8=True)
        for part in (1, 2):
            case.inputs[1][part][0] = number
        pool = case.pool()
        case.run([1], pool=pool)
        row = case.rows[1]
        slot = row.pages[0][row.start // 16], row.start % 16
        for x in pool.layer(0):
            assert (x[slot].float() == stored).all()
        case.check(NEAR[dtype])


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", [1, 2])
@torch.inference_mode()
def test_what_is_not_finite_is_seen_by_its_own_sequence_alone(part: int, number: float) -> None:
    case = Case(1, 4, 32, in_float8=True)
    everyone = case.everyone()
    before = case.run(everyone)
    case.inputs[1][part][0] = number
    after = case.run(everyone)
    assert after[1][0].isnan().all()
    assert all(torch.equal(before[i], after[i]) for i in everyone if i != 1)


@pytest.mark.parametrize(
    "configuration",
    [Configuration(16, 64, 4, 1), Configuration(32, 16, 4, 1)],
)
@torch.inference_mode()
def test_every_number_of_float8_comes_back(configuration: Configuration) -> None:
    """One token that sees itself alone is answered with its value."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    case = Case(1, 4, 256, configuration=configuration, page_size=64, in_float8=True)
    row = case.rows[0]
    case.rows[0] = type(row)(row.sequence, [0], 0, row.pages, None)
    case.inputs[0] = torch.zeros(1, 4, 256), torch.zeros(1, 256), numbers[None]
    assert torch.equal(case.run([0])[0], numbers.expand(1, 4, 256))


def test_a_conversion_is_torchs_number_by_number() -> None:
    """What the tests above stand on: Triton's own interpreter would fail this."""
    from model.devices.gpu.attention.write import scatter

    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-14, 10, (4, 1024), generator=generator).float())
    x_Td = torch.randn(4, 1024, generator=generator) * sizes
    keys = torch.zeros(1, 4, 1024, dtype=torch.float8_e4m3fn)
    # Each is the first token of a page of its own.
    nought_T, pages_T = torch.zeros(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    scatter[(4, 1)](
        x_Td, x_Td, x_Td, None, None, x_Td, keys, keys, nought_T, pages_T, pages_T,
        1024, 1024, 1024, 0, 1, PAGE=1, NUMBERS=1024,
        HEADS=1, BLOCK_HEADS=1, KEY_DIM=1024, VALUE_DIM=1024, BLOCK_KEY=1024, BLOCK_VALUE=1024,
        VALUE_IN_KEY=True, INTERLEAVED=False,
    )  # fmt: skip
    assert torch.equal(keys[0].view(torch.uint8), in_float8(x_Td).view(torch.uint8))
