"""The decoder and its backends against `transformers`, for every way of cutting a sequence into
steps.
"""

import random
from array import array
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from cache.pool import KVPool
from model.batch import build_batch
from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.decoder import Decoder
from model.devices import create_backend, find_device
from model.devices.cpu.products import PackedEmbedding
from model.kv_layout import layout_of
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.step import Row, Sample, SampledToken, SampleError, Sampling, StepPlan
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from server.protocol import Token
from tests.support.checkpoints import SHAPES, TinyCheckpoint, make_checkpoint
from tests.support.integrity import integrity
from tests.support.submitting import submit

TOLERANCE = 1e-4
CPU = torch.device("cpu")


def load(folder: Path) -> Decoder:
    return load_decoder(folder, read_spec(folder), torch.float32, CPU)


def make_pool(decoder: Decoder, num_pages: int, page_size: int) -> KVPool:
    layout = layout_of(decoder.spec, page_size)
    return KVPool.allocate(layout, num_pages * layout.pages_per_block, torch.float32, CPU)


def random_ids(checkpoint: TinyCheckpoint, count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, checkpoint.shape.vocab_size) for _ in range(count)]


def logits_by_chunks(
    decoder: Decoder, backend_name: str, ids: list[int], chunks: list[int], page_size: int
) -> torch.Tensor:
    """Logits of every position, computed `chunks` tokens at a time over pages in a scrambled
    order.
    """
    num_pages = len(ids) // page_size + 5
    pool = make_pool(decoder, num_pages, page_size)
    # Our own kernels take pages and heads of whole vectors only; the server falls back in the same
    # way.
    heads = decoder.spec.num_query_heads
    name = find_device("cpu").backend_for(pool, heads) if backend_name == "native" else backend_name
    backend = create_backend(name, pool, decoder.spec.attention_scale, heads)
    scrambled = random.Random(1).sample(range(pool.num_pages), pool.num_pages)
    ends = list(
        accumulate((num_pages * group.num_stacks for group in pool.layout.groups), initial=0)
    )
    pages = [array("q", scrambled[a:b]) for a, b in pairwise(ends)]
    logits, start = [], 0
    for count in chunks:
        batch = build_batch(
            StepPlan((Row(0, ids[start : start + count], start, pages, None),)),
            pool.layout,
            find_device("cpu").upload,
        )
        plan = backend.plan(batch)
        x_TD = decoder(
            batch.token_ids_T, batch.position_ids_T, lambda *qkv, plan=plan: backend.run(plan, *qkv)
        )
        logits.append(decoder.logits(x_TD))
        start += count
    assert start == len(ids)
    return torch.cat(logits)


@pytest.mark.parametrize("backend", ["reference", "native"])
@torch.inference_mode()
def test_logits_equal_transformers_for_every_chunking(
    any_checkpoint: TinyCheckpoint, backend: str
) -> None:
    decoder = load(any_checkpoint.folder)
    ids = random_ids(any_checkpoint, 150)
    expected = any_checkpoint.oracle(torch.tensor([ids])).logits[0]
    rng = random.Random(0)
    cuts = [sorted(rng.sample(range(1, 150), rng.randint(1, 20))) for _ in range(4)]
    chunkings = [
        [150],
        [1] * 150,
        [149, 1],
        [1, 149],
        *([b - a for a, b in zip([0, *c], [*c, 150], strict=True)] for c in cuts),
    ]
    for chunks in chunkings:
        for page_size in (1, 16, 64):
            actual = logits_by_chunks(decoder, backend, ids, chunks, page_size)
            assert (actual - expected).abs().max() < TOLERANCE, (chunks, page_size)


@torch.inference_mode()
def test_logits_equal_transformers_for_each_of_the_128_chunkings_of_8_tokens(
    any_checkpoint: TinyCheckpoint,
) -> None:
    decoder = load(any_checkpoint.folder)
    ids = random_ids(any_checkpoint, 8, seed=1)
    expected = any_checkpoint.oracle(torch.tensor([ids])).logits[0]
    for number in range(128):
        cuts = [0, *(i for i in range(1, 8) if number >> (i - 1) & 1), 8]
        chunks = [b - a for a, b in pairwise(cuts)]
        assert (
            logits_by_chunks(decoder, "reference", ids, chunks, page_size=3) - expected
        ).abs().max() < TOLERANCE, chunks


def make_runner(
    checkpoint: TinyCheckpoint, num_pages: int = 200, page_size: int = 16, dtype: str = "float32"
) -> ModelRunner:
    options = EngineOptions("cpu", dtype, 1, page_size, num_pages, None, 512, 32, 64)
    return ModelRunner.load(checkpoint.folder, read_spec(checkpoint.folder), options)


def make_core(
    checkpoint: TinyCheckpoint,
    num_pages: int = 200,
    max_running: int = 32,
    step_tokens: int = 64,
    page_size: int = 16,
) -> EngineCore:
    runner = make_runner(checkpoint, num_pages, page_size)
    return EngineCore(
        Scheduler(Limits(num_pages, runner.pool.layout, 512, max_running, step_tokens)), runner
    )


def finish(core: EngineCore) -> dict[int, list[int]]:
    """Steps until nothing is left; the tokens of each sequence."""
    outputs: dict[int, list[int]] = {}
    while core.scheduler.has_work:
        for advance in core.step():
            assert isinstance(advance, Token)
            outputs.setdefault(advance.id, []).append(advance.token)
        assert integrity(core.scheduler) == []
    return outputs


GREEDY = Sampling(temperature=0.0)


def test_200_greedy_tokens_equal_transformers(any_checkpoint: TinyCheckpoint) -> None:
    prompt = random_ids(any_checkpoint, 37)
    core = make_core(any_checkpoint)
    submit(core.scheduler, 0, prompt, 200, GREEDY)
    expected = any_checkpoint.oracle.generate(
        torch.tensor([prompt]),
        max_new_tokens=200,
        min_new_tokens=200,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert finish(core)[0] == expected[0, 37:].tolist()


def test_32_requests_together_equal_each_alone(any_checkpoint: TinyCheckpoint) -> None:
    rng = random.Random(5)
    requests = [
        (random_ids(any_checkpoint, rng.randint(1, 120), seed), rng.randint(1, 60))
        for seed in range(32)
    ]
    together = make_core(any_checkpoint)
    for id, (prompt, count) in enumerate(requests):
        submit(
            together.scheduler,
            id,
            prompt,
            count,
            GREEDY if id % 2 else Sampling(seed=id, top_p=0.9),
        )
    outputs = finish(together)
    for id, (prompt, count) in enumerate(requests):
        alone = make_core(any_checkpoint, step_tokens=512)
        submit(
            alone.scheduler, id, prompt, count, GREEDY if id % 2 else Sampling(seed=id, top_p=0.9)
        )
        assert finish(alone)[id] == outputs[id], id


def test_constant_preemption_does_not_change_what_seeded_sampling_gives(
    tiny_checkpoint: TinyCheckpoint,
) -> None:
    def run(num_pages: int) -> tuple[dict[int, list[int]], int]:
        core = make_core(tiny_checkpoint, num_pages, max_running=12, page_size=2)
        for id in range(40):
            sampling = Sampling(
                temperature=1.1,
                top_k=40,
                top_p=0.95,
                repetition_penalty=1.2,
                frequency_penalty=0.3,
                presence_penalty=0.2,
                seed=id,
            )
            submit(
                core.scheduler,
                id,
                random_ids(tiny_checkpoint, 10 + id, id),
                70,
                sampling,
                min_new_tokens=5,
                stop_token_ids=frozenset({0}),
            )
        return finish(core), core.scheduler.num_preemptions

    large, none = run(4000)
    small, many = run(62)
    assert none == 0 and many >= 40
    assert small == large
    assert all(5 <= len(output) <= 70 for output in large.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.inference_mode()
def test_half_precision_stays_near_float32(tiny_checkpoint: TinyCheckpoint, dtype: str) -> None:
    row = Row(
        0, random_ids(tiny_checkpoint, 50), 0, [array("q", range(4))], Sample(GREEDY, [1], [])
    )
    exact, rounded = (
        make_runner(tiny_checkpoint, dtype=name).run(StepPlan((row,))).drawn[0]
        for name in ("float32", dtype)
    )
    assert isinstance(exact, SampledToken) and isinstance(rounded, SampledToken)
    assert abs(exact.logprob - rounded.logprob) < 0.5
    runner = make_runner(tiny_checkpoint, dtype=dtype)
    assert runner.pool.dtype is getattr(torch, dtype)
    assert runner.pool.num_bytes == runner.decoder.spec.kv_bytes_per_token(2) * 200 * 16


def test_cache_sizes(tiny_checkpoint: TinyCheckpoint) -> None:
    spec = read_spec(tiny_checkpoint.folder)
    assert spec.kv_bytes_per_token(4) == 2 * 3 * 16 * 4
    page_bytes = spec.kv_bytes_per_token(4) * 16
    in_bytes = EngineOptions("cpu", "float32", 1, 16, None, 10.5 * page_bytes, 512, 64, 64)
    assert ModelRunner.load(tiny_checkpoint.folder, spec, in_bytes).pool.num_pages == 10
    capped = EngineOptions("cpu", "float32", 1, 16, None, None, 84, 1, 64)
    assert ModelRunner.load(tiny_checkpoint.folder, spec, capped).pool.num_pages == 7
    with pytest.raises(MemoryError, match=r"cache\.memory"):
        ModelRunner.load(
            tiny_checkpoint.folder,
            spec,
            EngineOptions("cpu", "float32", 1, 16, None, 5.0, 512, 64, 64),
        )
    # What requests could use is far less and would fit: more than there is cannot be meant.
    with pytest.raises(
        MemoryError,
        match=r"^cache\.memory is 921600\.00 GiB, and cpu has [0-9.]+ GiB in all; lower it$",
    ):
        ModelRunner.load(
            tiny_checkpoint.folder,
            spec,
            EngineOptions("cpu", "float32", 1, 16, None, 900.0 * 2**40, 512, 64, 64),
        )


@torch.inference_mode()
def test_a_row_with_a_numerical_error_fails_alone_and_leaves_clean_pages(tmp_path: Path) -> None:
    # Its head is its own, so a broken embedding breaks one token alone.
    untied = make_checkpoint(SHAPES[3], tmp_path)
    runner = make_runner(untied, num_pages=6)
    table = runner.decoder.token_embedding
    broken_row = torch.full((1, runner.decoder.spec.hidden_size), torch.nan)
    if isinstance(table, PackedEmbedding):
        table.set_rows(7, broken_row)
    else:
        table.weight[7] = broken_row

    def row(id: int, tokens: list[int], pages: list[int], last: bool) -> Row:
        return Row(id, tokens, 0, [array("q", pages)], Sample(GREEDY, tokens, []) if last else None)

    fine = row(1, [1, 2, 3], [4, 5], last=True)
    (expected,) = runner.run(StepPlan((fine,))).drawn
    broken, chunk, neighbour = runner.run(
        StepPlan((row(0, [7, 1], [0, 1], True), row(2, [1, 7], [2, 3], False), fine))
    ).drawn
    assert isinstance(broken, SampleError) and isinstance(chunk, SampleError)
    # A product of another number of rows may round differently in its last bit, so the neighbour's
    # is near, not equal.
    assert isinstance(neighbour, SampledToken) and isinstance(expected, SampledToken)
    assert neighbour.token == expected.token and abs(neighbour.logprob - expected.logprob) < 1e-5
    (reused,) = runner.run(StepPlan((row(3, [1, 2, 3], [0, 1], True),), clear=(0, 1, 2, 3))).drawn
    assert runner.pool.numbers_PN.isfinite().all()
    assert reused == expected
