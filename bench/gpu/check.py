"""Whether kernels and CUDA graphs are right on this device: for a first visit, before anything is
timed.

Attention is compared with the reference backend on ragged batches of every published shape of
heads, and with batch-invariant kernels each sequence alone with all of them together, bit by bit;
so are products, whose parts are summed apart for few rows. Decode steps replayed from CUDA graphs
are compared with the same steps launched kernel by kernel; the contexts change from step to step,
so that a replay over an earlier step's lists shows. A case that fails is recorded, and the others
run.
"""

import random
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from bench.gpu.attention import NEAR, backend_name
from bench.gpu.common import Part, at_once, engine, pages_of
from cache.layout import CacheLayout, Columns, pages_for
from cache.pool import KVPool
from model.checkpoint.families import read_spec
from model.decode import DecodeTable
from model.devices.blocks import FORMATS, BlockFormat
from model.kv_layout import layout_of
from model.layers import Linear
from model.runner.runner import ModelRunner
from model.step import PENDING, Row, Sample, SampledToken, Sampling, StepPlan
from tests.support.attention_cases import Case
from tests.support.paths import EMBEDDED
from tests.support.torch_blocks import dequantize

SHAPES = (
    (16, 128, None),
    (48, 128, None),
    (71, 64, None),
    (8, 256, None),
    (4, 256, None),
    (32, 96, None),
    (5, 80, None),
)
LATENT_SHAPES = ((16, 576, 512), (128, 576, 512))
SMALL_SHAPES = ((4, 32, None),)
"""Query heads, columns of a key, and columns of a value where these are the key's first."""
SEEDS = 8
PAGE_SIZE = 64
WINDOW, WINDOWED = 512, 800
"""Of every other pair of cases, and their longest context: they have three times the pages."""
BATCHES, SMALL_BATCHES = (1, 2, 3, 17, 64, 5), (1, 3)
LONGEST, SMALL_LONGEST = 2000, 90
NEAR_LOGPROB = 0.3
"""Largest distance of a log-probability where products are not batch-invariant: cuBLAS rounds
otherwise in a padded batch."""
SLABS = (64, 256)
HEAD = (49152, 2048)
PRODUCTS = ((2304, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (3072, 4544))
SMALL_PRODUCTS = ((40, 1100),)
"""Outputs and inputs: StarCoderBase-1B's, and inputs that are no power of two."""
NUM_ROWS, SMALL_NUM_ROWS = (1, 2, 16, 17, 32, 64, 65, 600), (1, 70)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "deterministic": {"deterministic": True},
    "fp8 cache": {"cache_dtype": "fp8"},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 deterministic": {"quantization": "int8", "deterministic": True},
}
NUM_SAMPLED = 9
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(top_k=20),
    Sampling(min_p=0.05),
    Sampling(repetition_penalty=1.2),
    Sampling(typical_p=0.9),
)


def kernels_of(part: Part, heads: int, key_dim: int, dtype: torch.dtype) -> str:
    """The backend that is checked."""
    layout = CacheLayout.of(1, (), PAGE_SIZE, [Columns(key_dim, key_dim)])
    pool = KVPool.allocate(layout, 1, dtype, torch.device(part.device))
    return backend_name(pool, heads)


@torch.inference_mode()
def attention(
    part: Part, heads: int, key_dim: int, value_dim: int | None, dtype: torch.dtype
) -> None:
    """A shape of heads in a dtype, with several seeds. With windows too, but for latents, which
    have none here; with rotations in float32, as the reference rounds oftener than the kernels.
    """
    name = f"attention/{heads}x{key_dim} {str(dtype).removeprefix('torch.')}"
    with part.guarded(name):
        kernels = kernels_of(part, heads, key_dim, dtype)
        for seed in range(2 if part.small else SEEDS):
            window = WINDOW if value_dim is None and seed // 2 % 2 else None
            longest = SMALL_LONGEST if part.small else LONGEST if window is None else WINDOWED
            case = Case(
                seed, heads, key_dim, value_dim, PAGE_SIZE, window, longest, dtype, None,
                device=part.device, kernels=kernels,
            )  # fmt: skip
            if value_dim is None and seed % 2 and dtype is torch.float32:
                case.rotate(interleaved=seed % 4 == 3)
            for layer in (0,) if window is None else (0, 1):
                check_case(case, kernels, NEAR[dtype], layer)
        part.note(name, {"kernels": kernels})


def check_case(case: Case, kernels: str, near: float, layer: int) -> None:
    """Both backends are near the reference, and in the batch-invariant one each row is the same
    alone.
    """
    case.kernels = kernels
    case.check(near, layer)
    if kernels == "triton-fast":
        # Not batch-invariant, and the kernels of engine.deterministic are checked beside it.
        case.kernels = "triton"
        case.check(near, layer)
    check_alone(case, layer)


def check_alone(case: Case, layer: int) -> None:
    """Raises AssertionError where a sequence's output depends on the others in the batch."""
    for number, together in enumerate(case.run(case.everyone(), layer)):
        assert torch.equal(case.run([number], layer)[0], together), (
            f"sequence {number} of {len(case.rows)} depends on the others"
        )


@torch.inference_mode()
def products(part: Part) -> None:
    """Our product of one row beside float64's."""
    from model.devices.gpu.one_row import multiply_row

    dtype = torch.float32 if part.small else torch.bfloat16
    for outputs, inputs in SMALL_PRODUCTS if part.small else PRODUCTS:
        name = f"products/{inputs} to {outputs}"
        with part.guarded(name):
            torch.manual_seed(0)
            x = torch.randn(1, inputs).to(part.device, dtype)
            weight = torch.randn(outputs, inputs).to(part.device, dtype) * inputs**-0.5
            bias = torch.randn(outputs).to(part.device, dtype)
            expected = x.double() @ weight.double().T + bias.double()
            distance = multiply_row(x, weight, bias).double() - expected
            worst = float((distance.abs() / (1 + expected.abs())).max())
            part.note(name, {"distance": worst})
            assert worst <= NEAR[dtype], f"off by {worst:.2g}"


@torch.inference_mode()
def block_products(part: Part, form: BlockFormat) -> None:
    """Products of matrices in blocks beside float64's over what the blocks stand for; with a fixed
    tile the same bits by any number of rows.
    """
    from model.devices.gpu.block_modules import GpuBlockLinear

    dtype, place = torch.float32 if part.small else torch.bfloat16, torch.device(part.device)
    for outputs, inputs in SMALL_PRODUCTS if part.small else PRODUCTS:
        name = f"{form.name} products/{inputs} to {outputs}"
        with part.guarded(name):
            torch.manual_seed(0)
            blocks = form.quantize(torch.randn(outputs, inputs) * inputs**-0.5)
            weight_OI = dequantize(form, blocks, inputs).to(place).double()
            x = torch.randn((SMALL_NUM_ROWS if part.small else NUM_ROWS)[-1], inputs)
            x = x.to(place, dtype)
            worst = {"as served": 0.0, "fixed tile": 0.0}
            for kind in worst:
                linear = Linear(inputs, outputs, dtype=dtype)
                fixed = kind == "fixed tile"
                layer = GpuBlockLinear(linear, form, dtype, fixed_tile=fixed)
                layer.requires_grad_(False).allocate(place)
                layer.bias = torch.nn.Parameter(torch.randn(outputs).to(place, dtype), False)
                layer.set_blocks(0, blocks)
                expected = x.double() @ weight_OI.T + layer.bias.double()
                together = layer(x)
                for count in SMALL_NUM_ROWS if part.small else NUM_ROWS:
                    y, right = layer(x[-count:]), expected[-count:]
                    assert not fixed or torch.equal(y, together[-count:]), (
                        f"{count} rows differ from the same among {len(x)}"
                    )
                    distance = (y.double() - right).abs() / (1 + right.abs())
                    worst[kind] = max(worst[kind], float(distance.max()))
            part.note(name, worst)
            assert max(worst.values()) <= 2 * NEAR[dtype], f"off by {worst}"


@torch.inference_mode()
def slabs(part: Part) -> None:
    """Whether torch's products of one number of rows give a row the same bits in every place and in
    any company: then padding to that number makes them batch-invariant.
    """
    dtype = torch.float32 if part.small else torch.bfloat16
    for outputs, inputs in SMALL_PRODUCTS if part.small else (*PRODUCTS, HEAD):
        weight = torch.randn(outputs, inputs).to(part.device, dtype) * inputs**-0.5
        bias = torch.randn(outputs).to(part.device, dtype)
        for num_rows in SLABS:
            x = torch.randn(num_rows, inputs).to(part.device, dtype)
            for kind in ("linear", "gelu"):
                name = f"slabs/{inputs} to {outputs}/{num_rows} rows, {kind}"
                with part.guarded(name):
                    part.note(name, {"differ": num_differing(kind, x, weight, bias)})


def num_differing(kind: str, x: Tensor, weight: Tensor, bias: Tensor) -> int:
    """Of 20 permutations of the rows, and of 20 companies of the first one, those that change a
    row's bits.
    """

    def product(x: Tensor) -> Tensor:
        if kind == "gelu":
            return torch._addmm_activation(bias, x, weight.T, use_gelu=True)
        return torch.nn.functional.linear(x, weight, bias)

    y, differ = product(x), 0
    for _ in range(20):
        order = torch.randperm(len(x), device=x.device)
        differ += not torch.equal(product(x[order]), y[order])
        others = torch.cat((x[:1], torch.randn_like(x[1:]) * 10))
        differ += not torch.equal(product(others)[0], y[0])
    return differ


def rows_of(contexts: list[int], sample: Sample, layout: CacheLayout) -> tuple[Row, ...]:
    """A decode step of sequences with these contexts, each over pages of its own."""
    longest = max(contexts)
    return tuple(
        Row(i, [i % 50 + 3], context - 1, pages_of(layout, context, i, longest), sample)
        for i, context in enumerate(contexts)
    )


def decode_plan(runner: ModelRunner, contexts: list[int], sample: Sample) -> StepPlan:
    """The plan of such a step, in columns as the scheduler makes it."""
    rows = rows_of(contexts, sample, runner.pool.layout)
    return StepPlan(
        (), decode=DecodeTable.of(runner.pool.layout, rows, [PENDING] * len(rows)).advance()
    )


def replays(part: Part, options: dict[str, Any], model: Path = EMBEDDED) -> dict[str, Any]:
    """How far steps replayed from CUDA graphs are from the same steps launched kernel by kernel.
    Raises AssertionError for too far.
    """
    batches, longest = (SMALL_BATCHES, SMALL_LONGEST) if part.small else (BATCHES, LONGEST)
    most = max(*batches, NUM_SAMPLED)
    spec = read_spec(model)
    longest = min(longest, spec.max_positions)
    layout = layout_of(spec, PAGE_SIZE)
    pages = most * layout.pages_per_block * pages_for(longest, PAGE_SIZE)
    core, ready = engine(part, model, max_running=most, pages=pages, page_size=PAGE_SIZE, **options)
    runner: Any = core.runner
    fill(runner.pool)
    plain = ModelRunner(runner.decoder, runner.pool, runner.backend, runner.device)
    rng, worst, same = random.Random(0), 0.0, True
    for count in batches:
        contexts = [rng.randint(1, longest) for _ in range(count)]
        plan = decode_plan(runner, contexts, Sample(Sampling(temperature=0.0), [1], []))
        if part.device == "cuda":
            assert runner._graphs.find(plan.decode) is not None, (
                f"no CUDA graph for {count} sequences"
            )
        replayed, launched = tokens_of(runner, plan), tokens_of(plain, plan)
        worst = max(
            worst, *(abs(a.logprob - b.logprob) for a, b in zip(replayed, launched, strict=True))
        )
        same &= replayed == launched
    assert worst < NEAR_LOGPROB and (same or not ready.deterministic), (worst, same)
    worst = max(worst, mixed_steps(runner, plain, longest))
    assert worst < NEAR_LOGPROB, worst
    for sampling in SAMPLINGS:
        tokens_of(runner, decode_plan(runner, [70] * NUM_SAMPLED, Sample(sampling, [1], [2, 3])))
    return {"kernels": ready.kernels, "logprob_distance": worst, "same_bits": same}


def mixed_steps(runner: Any, plain: ModelRunner, longest: int) -> float:
    """The largest distance of a log-probability between steps of few chunks and single tokens that
    are replayed, where each token is a row of a graph, and the same launched in tiles.
    """
    worst, sample, graphs = 0.0, Sample(Sampling(temperature=0.0), [1], []), runner._graphs
    for counts in ((3, 1), (1, 1, 7), (20, 1, 1, 9)):
        if graphs is not None and sum(counts) > graphs.sizes[-1]:
            continue
        rows = rows_of([longest] * len(counts), sample, runner.pool.layout)
        rows = tuple(
            replace(row, tokens=[*range(3, 3 + n)], start=row.start // (i + 1) // 2)
            for i, (row, n) in enumerate(zip(rows, counts, strict=True))
        )
        plan, before = StepPlan(rows), runner.decoder.num_parts_run
        replayed = tokens_of(runner, plan)
        # A replay counts as one part.
        assert graphs is None or runner.decoder.num_parts_run - before == 1, (
            f"no CUDA graph for chunks of {counts}"
        )
        worst = max(
            worst,
            *(
                abs(a.logprob - b.logprob)
                for a, b in zip(replayed, tokens_of(plain, plan), strict=True)
            ),
        )
    return worst


def tokens_of(runner: ModelRunner, plan: StepPlan) -> list[SampledToken]:
    """What a step draws. Raises AssertionError where a row draws nothing."""
    drawn = runner.run(plan).drawn
    tokens = [each for each in drawn if isinstance(each, SampledToken)]
    assert len(tokens) == len(drawn), drawn
    return tokens


def fill(pool: KVPool) -> None:
    """Random keys and values in every page, so that a wrong page gives a wrong answer."""
    if pool.dtype is torch.float8_e4m3fn:
        pool.numbers_PN.view(torch.uint8).random_(0x28, 0x40)
    else:
        pool.numbers_PN.normal_()


def check_replays(part: Part, name: str, options: dict[str, Any]) -> None:
    """Notes what `replays` finds of the embedded model with these options."""
    with part.guarded(f"replays/{name}"):
        part.note(f"replays/{name}", replays(part, options))


def checks(small: bool) -> list[Callable[[Part], object]]:
    shapes = SMALL_SHAPES if small else (*SHAPES, *LATENT_SHAPES)
    dtypes = (torch.float32,) if small else tuple(NEAR)
    found: list[Callable[[Part], object]] = [
        partial(check_replays, name=name, options=options)
        for name, options in OPTIONS.items()
        if not (small and options)
    ]
    for heads, key_dim, value_dim in shapes:
        for dtype in dtypes:
            found.append(
                partial(attention, heads=heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
            )
    if find_spec("triton") is not None:
        found += [products, *(partial(block_products, form=form) for form in FORMATS.values())]
    return [*found, slabs]


def measure(part: Part) -> None:
    at_once(part, checks(part.small))
