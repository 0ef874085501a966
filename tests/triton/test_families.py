"""The real decoder and runner over the GPU's kernels, interpreted: every family's logits and tokens are those over the reference."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cache.layout import CacheLayout
from cache.pool import KVPool
from model import native
from model.backends import backend_for
from model.step import Drawn, Sampling
from tests.checkpoints import SHAPES, TinyCheckpoint, make_checkpoint
from tests.families import FamilyCheckpoint, make_family_checkpoint
from tests.test_decoder import GREEDY, TOLERANCE, finish, load, logits_by_chunks, make_core

FAMILIES = ("gpt_bigcode", "falcon", "gemma", "gemma3_text", "llama", "mistral", "santacoder", "deepseek_v2", "deepseek_v3", "minicpm3")
SAMPLE = [("gpt_bigcode", 3), ("falcon", 1), ("gemma", 2), ("gemma3_text", 1), ("llama", 2), ("deepseek_v2", 4), ("minicpm3", 2)]
"""mistral is llama with gemma3_text's windows here, santacoder is gpt_bigcode, deepseek_v3 is deepseek_v2."""


def make(family: str, number: int, folder: Path) -> TinyCheckpoint | FamilyCheckpoint:
    return make_checkpoint(SHAPES[number], folder) if family == "gpt_bigcode" else make_family_checkpoint(family, number, folder)


def check(family: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make(family, number, folder)
    decoder = load(checkpoint.folder)
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, decoder.spec.vocab_size, (70,), generator=generator).tolist()
    with torch.inference_mode():
        expected = logits_by_chunks(decoder, "reference", ids, [70], 16)
        assert (logits_by_chunks(decoder, "triton", ids, [40, 1, 1, 5, 23], 16) - expected).abs().max() < TOLERANCE
    outputs = []
    for name in ("reference", "triton"):
        monkeypatch.setattr("model.runner.backend_for", lambda pool, num_heads, name=name: name)
        core = make_core(checkpoint, num_pages=40, page_size=32)  # type: ignore[arg-type]
        core.scheduler.submit(0, ids[:21], 21, GREEDY)
        core.scheduler.submit(1, ids[30:33], 5, GREEDY)
        outputs.append(finish(core))
    assert outputs[0] == outputs[1] and [len(outputs[0][i]) for i in (0, 1)] == [21, 5]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("family", "number"), SAMPLE)
def test_logits_and_greedy_tokens(family: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(family, number, tmp_path, monkeypatch)


OTHERS = [(family, number) for family in FAMILIES for number in range(5) if (family, number) not in SAMPLE]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("family", "number"), OTHERS)
def test_logits_and_greedy_tokens_of_the_others(family: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(family, number, tmp_path, monkeypatch)


# With products that take a row's bits from the row alone.
@pytest.mark.usefixtures("interpreter")
@pytest.mark.skipif(native.library() is None, reason="no kernels were compiled: torch's products are not invariant")
@pytest.mark.parametrize(("family", "number"), [("gemma3_text", 1), ("deepseek_v3", 4)])
def test_the_same_bits_whole_in_chunks_and_in_company(family: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make(family, number, tmp_path)
    monkeypatch.setattr("model.runner.backend_for", lambda pool, num_heads: "triton")
    prompts = [list(range(3, 50)), list(range(100, 112)), [7]]

    def drawn(submitted: list[int], step_tokens: int) -> dict[int, list[Drawn]]:
        core = make_core(checkpoint, num_pages=40, page_size=32, max_running=8, step_tokens=step_tokens)  # type: ignore[arg-type]
        for i in submitted:
            core.scheduler.submit(i, prompts[i], 4, Sampling(seed=i))
        found: dict[int, list[Drawn]] = {i: [] for i in submitted}
        while core.scheduler.has_work:
            for advance in core.step():
                assert isinstance(advance.drawn, Drawn)
                found[advance.id].append(advance.drawn)
        return found

    together = drawn([0, 1, 2], 64)
    assert [len(together[i]) for i in range(3)] == [4, 4, 4]
    assert drawn([2, 1, 0], 16) == together
    assert {i: drawn([i], 64)[i] for i in range(3)} == together


def test_a_gpu_gets_these_kernels_where_they_fit() -> None:
    """A meta tensor stands for the GPU's."""

    def pool(page_size: int, dtype: torch.dtype = torch.bfloat16) -> KVPool:
        return KVPool.allocate(CacheLayout.of(2, (), page_size), 4, 128, 128, dtype, torch.device("meta"))

    expected = "reference" if find_spec("triton") is None else "triton"
    assert backend_for(pool(64), 16) == backend_for(pool(256), 71) == backend_for(pool(16, torch.float32), 16) == expected
    assert backend_for(pool(1), 16) == backend_for(pool(48), 16) == "reference"
