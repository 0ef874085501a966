"""A cache in float8 on the CPU: what is stored, who may see it, what it costs, and where it is
refused.
"""

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.layout import CacheLayout, Columns
from cache.pages import PageAllocator
from cache.pool import FLOAT8, KVPool, in_float8
from cache.table import PageTable
from commands.options import PlanOptions
from commands.plan import make_plan
from model.batch import build_batch
from model.checkpoint.families import read_spec
from model.devices import create_backend, find_device
from model.devices.gpu.device import GpuDevice
from model.options import EngineOptions
from model.runner.runner import ModelRunner, _check_options
from model.spec import OptionError
from model.step import Row, Sample, SampledToken, SampleError, Sampling, StepPlan
from tests.support.checkpoints import SHAPES, known_ids, make_checkpoint
from tests.support.families import make_family_checkpoint
from tests.support.paths import EMBEDDED
from tests.support.processes import ServerProcess

CPU = torch.device("cpu")


def test_what_float8_holds() -> None:
    x = torch.tensor(
        [
            0.0,
            1.0625,
            1.1875,
            447.0,
            449.0,
            1e30,
            -1e30,
            2.0**-9,
            2.0**-11,
            torch.inf,
            -torch.inf,
            torch.nan,
        ]
    )
    expected = torch.tensor(
        [0.0, 1.0, 1.25, 448.0, 448.0, 448.0, -448.0, 2.0**-9, 0.0, torch.nan, torch.nan, torch.nan]
    )
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(in_float8(x.to(dtype)).float().nan_to_num(7.0), expected.nan_to_num(7.0))


@torch.inference_mode()
@pytest.mark.parametrize("value_in_key", [False, True])
def test_attention_is_that_over_the_rounded_numbers(value_in_key: bool) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        dtype = rng.choice([torch.float32, torch.bfloat16])
        windows, page_size = rng.choice([(), (None, 7, None)]), rng.choice([4, 16])
        columns = [Columns(40, 24, value_in_key)] * 3
        layout = CacheLayout.of(3, windows, page_size, columns)
        allocator = PageAllocator(200 * layout.pages_per_block)
        rows = []
        for id in range(rng.randint(2, 6)):
            start = rng.choice([0, rng.randrange(60)])
            count = rng.choice([1, 1, rng.randint(1, 30)])
            table = PageTable(allocator, layout)
            table.grow(start + count, start + count)
            rows.append(Row(id, [0] * count, start, table.pages, None))
        batch = build_batch(StepPlan(tuple(rows)), layout, find_device("cpu").upload)
        num_tokens = len(batch.token_ids_T)
        q_THd = torch.randn(num_tokens, 4, 40).to(dtype)
        k_Td = 600 * torch.randn(num_tokens, 40)
        v_Tv = k_Td[:, :24] if value_in_key else torch.randn(num_tokens, 24)
        half, whole = (
            KVPool.allocate(layout, allocator.num_pages, dtype, CPU, stored_as=x)
            for x in (FLOAT8, torch.float32)
        )
        half.numbers_PN.copy_(torch.randn(half.numbers_PN.shape))
        whole.numbers_PN.copy_(half.numbers_PN)
        assert find_device("cpu").backend_for(half, 4) == "reference"
        outputs = []
        for pool, (k, v) in (
            (half, (k_Td, v_Tv)),
            (whole, (in_float8(k_Td.to(dtype)), in_float8(v_Tv.to(dtype)))),
        ):
            backend = create_backend("reference", pool, 0.001, 4)
            outputs.append(backend.run(backend.plan(batch), 1, q_THd, k.to(dtype), v.to(dtype)))
        assert torch.equal(*outputs)
        assert torch.equal(half.numbers_PN.float(), whole.numbers_PN)
        assert whole.numbers_PN.abs().max() == 448


def make_runner(folder: Path, cache_dtype: str = "fp8") -> ModelRunner:
    options = EngineOptions("cpu", "float32", 1, 16, 20, None, 320, 4, 64, cache_dtype=cache_dtype)
    return ModelRunner.load(folder, read_spec(folder), options)


GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("family", ["gpt_bigcode", "gemma3_text", "deepseek_v2"])
@torch.inference_mode()
def test_the_plan_counts_what_the_runner_takes(family: str, tmp_path: Path) -> None:
    folder = (
        make_checkpoint(SHAPES[0], tmp_path)
        if family == "gpt_bigcode"
        else make_family_checkpoint(family, 1, tmp_path)
    ).folder
    runner = make_runner(folder)
    options = PlanOptions(model=folder, memory=10**9, device="cpu", cache_dtype="fp8", page_size=16)
    plan, spec = make_plan(options), runner.decoder.spec
    assert plan.weight_bytes["float32"] == runner.weight_bytes
    assert plan.kv_bytes_per_token["fp8"]["multi_query"] == spec.kv_bytes_per_token(1)
    assert runner.pool.num_bytes * 4 == make_runner(folder, cache_dtype="auto").pool.num_bytes
    num_pages = int((10**9 - runner.weight_bytes) * 0.4) // (
        runner.pool.num_bytes // runner.pool.num_pages
    )
    assert plan.fit is not None
    assert all(
        row["multi_query"] == runner.pool.layout.sequences(num_pages, row["context"], 512)
        for row in plan.fit
    )


@torch.inference_mode()
def test_a_numerical_error_fails_its_row_alone_and_its_pages_are_cleared(tmp_path: Path) -> None:
    runner = make_runner(make_checkpoint(SHAPES[3], tmp_path).folder)
    embedding: Any = runner.decoder.token_embedding
    embedding.set_rows(7, torch.full((1, embedding.shape[1]), torch.nan))
    fine = Row(1, [1, 2], 0, [array("q", [1])], Sample(GREEDY, [1], []))
    broken, whole = runner.run(
        StepPlan((Row(0, [7, 1], 0, [array("q", [0])], Sample(GREEDY, [1], [])), fine))
    ).drawn
    assert isinstance(broken, SampleError) and isinstance(whole, SampledToken)
    assert runner.pool.numbers_PN.isnan().any()
    (reused,) = runner.run(
        StepPlan((Row(2, [1, 2], 0, [array("q", [0])], Sample(GREEDY, [1], [])),), clear=(0,))
    ).drawn
    assert (
        isinstance(reused, SampledToken)
        and reused.token == whole.token
        and abs(reused.logprob - whole.logprob) < 1e-5
    )
    assert not runner.pool.numbers_PN.isnan().any()


@torch.inference_mode()
def test_the_embedded_model_says_much_the_same() -> None:
    ids = known_ids()
    plan = StepPlan((Row(0, ids, 0, [array("q", range(20))], Sample(GREEDY, ids, [])),))
    whole, small = make_runner(EMBEDDED, cache_dtype="auto"), make_runner(EMBEDDED)
    (before,), (after,) = whole.run(plan).drawn, small.run(plan).drawn
    assert isinstance(before, SampledToken) and isinstance(after, SampledToken)
    assert before.token == after.token and 0 < abs(before.logprob - after.logprob) < 0.2


@pytest.mark.parametrize(
    ("capability", "refused"),
    [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False), ((10, 0), False)],
)
@pytest.mark.parametrize("cache_dtype", ["fp8", "auto"])
def test_a_gpu_without_float8_is_refused_by_its_capability(
    capability: tuple[int, int], refused: bool, cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    spec = read_spec(EMBEDDED)
    options = EngineOptions("cuda", "auto", 1, 16, 20, None, 320, 4, 64, cache_dtype=cache_dtype)
    if not refused or cache_dtype != "fp8":
        _check_options(spec, options, GpuDevice())
        return
    found = (
        rf"cache\.dtype fp8: .* compute capability {capability[0]}\.{capability[1]}, expected "
        r"8\.9 or more"
    )
    with pytest.raises(OptionError, match=found):
        _check_options(spec, options, GpuDevice())


def test_a_server_answers_and_says_what_it_holds(tiny_folder: Path) -> None:
    server = ServerProcess(tiny_folder, "--cache.dtype", "fp8", "--engine.max_running", "4")
    try:
        info, plan = (json.loads(server.get(path)[1]) for path in ("/info", "/plan"))
        spec = read_spec(tiny_folder)
        assert info["kv_dtype"] == plan["cache"]["dtype"] == "float8_e4m3fn"
        assert (
            info["kv_bytes_per_token"]
            == plan["kv_bytes_per_token"]["multi_query"]
            == spec.kv_bytes_per_token(1)
        )
        assert (
            server.text("def f", max_new_tokens=8) == server.text("def f", max_new_tokens=8) != ""
        )
        completion = server.post("/v1/completions", {"prompt": "def f", "max_tokens": 2})[1]
        assert "-float8_e4m3fn-cpu-reference+native" in completion["system_fingerprint"]
    finally:
        server.process.terminate()
        log = server.process.communicate()[1]
    assert "bytes per token in float8_e4m3fn" in log and "not batch-invariant;" in log
