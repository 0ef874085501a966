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
from array import array
from importlib.util import find_spec
from typing import Any

import torch
from msgspec.structs import replace

from bench.gpu.attention import NEAR, backend_name
from bench.gpu.common import Part, engine
from cache.layout import CacheLayout, pages_for
from cache.pool import KVPool
from model.decode import DecodeTable
from model.runner.runner import ModelRunner
from model.step import PENDING, Row, Sample, SampledToken, Sampling, StepPlan
from tests.support.attention_cases import Case
from tests.support.paths import EMBEDDED

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
SEEDS = 4
PAGE_SIZE = 64
BATCHES, SMALL_BATCHES = (1, 2, 3, 17, 64, 5), (1, 3)
LONGEST, SMALL_LONGEST = 2000, 90
NEAR_LOGPROB = 0.3
"""Largest distance of a log-probability where products are not batch-invariant: cuBLAS rounds
otherwise in a padded batch."""
PRODUCTS = ((2304, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (3072, 4544))
SMALL_PRODUCTS = ((40, 1100),)
"""Outputs and inputs: StarCoderBase-1B's, and inputs that are no power of two."""
NUM_ROWS, SMALL_NUM_ROWS = (1, 2, 16, 17, 32, 64, 65, 600), (1, 70)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "deterministic": {"deterministic": True},
    "fp8 cache": {"cache_dtype": "fp8"},
    "float32": {"dtype": "float32"},
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
    pool = KVPool.allocate(
        CacheLayout.of(1, (), PAGE_SIZE), 1, key_dim, key_dim, dtype, torch.device(part.device)
    )
    return backend_name(pool, heads)


@torch.inference_mode()
def attention(part: Part) -> None:
    """Every shape of heads in each dtype, with several seeds."""
    shapes, dtypes = (
        (SMALL_SHAPES, (torch.float32,)) if part.small else ((*SHAPES, *LATENT_SHAPES), tuple(NEAR))
    )
    for dtype in dtypes:
        for heads, key_dim, value_dim in shapes:
            name = f"attention/{heads}x{key_dim} {str(dtype).removeprefix('torch.')}"
            with part.guarded(name):
                kernels = kernels_of(part, heads, key_dim, dtype)
                for seed in range(1 if part.small else SEEDS):
                    case = Case(
                        seed, heads, key_dim, value_dim, PAGE_SIZE, None,
                        SMALL_LONGEST if part.small else LONGEST, dtype, None,
                        device=part.device, kernels=kernels,
                    )  # fmt: skip
                    case.check(NEAR[dtype])
                    if kernels == "triton-fast":
                        # Not batch-invariant, and the kernels of engine.deterministic are checked
                        # beside it.
                        case.kernels = "triton"
                        case.check(NEAR[dtype])
                    check_alone(case)
                part.note(name, {"kernels": kernels})


def check_alone(case: Case) -> None:
    """Raises AssertionError where a sequence's output depends on the others in the batch."""
    for number, together in enumerate(case.run(case.everyone())):
        assert torch.equal(case.run([number])[0], together), (
            f"sequence {number} of {len(case.rows)} depends on the others"
        )


@torch.inference_mode()
def products(part: Part) -> None:
    """Our products beside float64's; batch-invariant ones by any number of rows, also where their
    parts are summed apart.
    """
    from model.devices.gpu.launches import multiply
    from model.devices.gpu.one_row import multiply_row

    dtype = torch.float32 if part.small else torch.bfloat16
    for outputs, inputs in SMALL_PRODUCTS if part.small else PRODUCTS:
        name = f"products/{inputs} to {outputs}"
        with part.guarded(name):
            torch.manual_seed(0)
            x = torch.randn((SMALL_NUM_ROWS if part.small else NUM_ROWS)[-1], inputs).to(
                part.device, dtype
            )
            weight = torch.randn(outputs, inputs).to(part.device, dtype) * inputs**-0.5
            bias = torch.randn(outputs).to(part.device, dtype)
            expected = x.double() @ weight.double().T + bias.double()
            together = multiply(x[:, None], weight[None], bias)[:, 0]
            worst = 0.0
            for count in SMALL_NUM_ROWS if part.small else NUM_ROWS:
                alone = multiply(x[-count:, None], weight[None], bias)[:, 0]
                assert torch.equal(alone, together[-count:]), (
                    f"{count} rows differ from the same among {len(x)}"
                )
                for y in (alone, multiply_row(x[-1:], weight, bias)) if count == 1 else (alone,):
                    worst = max(
                        worst,
                        float(
                            (
                                (y.double() - expected[-count:]).abs()
                                / (1 + expected[-count:].abs())
                            ).max()
                        ),
                    )
            assert worst <= NEAR[dtype], f"off by {worst:.2g}"
            part.note(name, {"distance": worst})


def rows_of(contexts: list[int], sample: Sample) -> tuple[Row, ...]:
    """A decode step of sequences with these contexts, each over pages of its own."""
    most = pages_for(max(contexts), PAGE_SIZE)
    pages = [
        array("q", range(number * most, number * most + pages_for(context, PAGE_SIZE)))
        for number, context in enumerate(contexts)
    ]
    return tuple(
        Row(i, [i % 50 + 3], context - 1, [pages[i]], sample) for i, context in enumerate(contexts)
    )


def decode_plan(runner: ModelRunner, contexts: list[int], sample: Sample) -> StepPlan:
    """The plan of such a step, in columns as the scheduler makes it."""
    rows = rows_of(contexts, sample)
    return StepPlan(
        (), decode=DecodeTable.of(runner.pool.layout, rows, [PENDING] * len(rows)).advance()
    )


def replays(part: Part, options: dict[str, Any]) -> dict[str, Any]:
    """How far steps replayed from CUDA graphs are from the same steps launched kernel by kernel.
    Raises AssertionError for too far.
    """
    batches, longest = (SMALL_BATCHES, SMALL_LONGEST) if part.small else (BATCHES, LONGEST)
    most = max(*batches, NUM_SAMPLED)
    pages = max(*batches, NUM_SAMPLED) * pages_for(longest, PAGE_SIZE)
    core, ready = engine(
        part, EMBEDDED, max_running=most, pages=pages, page_size=PAGE_SIZE, **options
    )
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
        rows = rows_of([longest] * len(counts), sample)
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
    for x in (pool.keys_LPSd, pool.values_LPSv):
        if x.dtype is torch.float8_e4m3fn:
            x.view(torch.uint8).random_(0x28, 0x40)
        else:
            x.normal_()


def measure(part: Part) -> None:
    attention(part)
    if find_spec("triton") is not None:
        products(part)
    for name, options in OPTIONS.items():
        if part.small and options:
            continue
        with part.guarded(f"replays/{name}"):
            part.note(f"replays/{name}", replays(part, options))
