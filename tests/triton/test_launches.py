"""Launches of a captured step, counted on torch's meta device: it computes nothing, and whatever
would wait for a GPU raises there.

Counted are kernels of ours, and torch's operations but for those that only look at memory or
allocate it. What cuBLAS adds to a product (the reduction of split sums) is not seen.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cache.pool import KVPool
from model.checkpoint.families import read_spec
from model.decoder import Decoder, meta_decoder
from model.devices import create_backend
from model.devices.gpu.device import GpuDevice
from model.kv_layout import layout_of
from model.runner.runner import ModelRunner
from tests.support.families import CONFIGS, bigcode

FREE = {
    "alias", "as_strided", "detach", "detach_", "expand", "permute", "select", "slice", "split", "split_with_sizes", "t", "transpose",  # noqa: E501
    "unbind", "unsqueeze", "squeeze", "view", "_unsafe_view", "unfold", "lift_fresh",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
"""Operations of torch that launch nothing."""
ATTENTION = "model.devices.gpu.attention"
GPT_BIGCODE = bigcode(64, 4, 3, 301)
DEVICE = GpuDevice("meta")


class Launches(TorchDispatchMode):
    """Notes what is launched while it is active: names of kernels, with `attention` for each of its
    kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # In inference mode, operations arrive that consist of others.
            found = function.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        name = function.overloadpacket.__name__
        self.names += [name] if name not in FREE else []
        return function(*args, **kwargs)

    def launch(self, executor: Any, *_: Any, **__: Any) -> None:
        """Instead of an interpreted kernel."""
        function = executor.fn
        self.names.append(
            "attention" if function.__module__.startswith(ATTENTION) else function.__name__
        )


class Capture:
    """A stream that runs captured work once, while launches are noted."""

    def __init__(self, launches: Launches) -> None:
        self.launches = launches

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        with self.launches:
            work()
        return work


def decoder_of(
    folder: Path, config: dict[str, Any], quantization: str = "none", *, deterministic: bool = False
) -> Decoder:
    """On the meta device, as a GPU has it."""
    (folder / "config.json").write_text(json.dumps(config))
    decoder = meta_decoder(read_spec(folder)).to(torch.bfloat16)
    products = DEVICE.products(DEVICE.dtypes("auto"), quantization, deterministic)
    products.replace(decoder, torch.bfloat16)
    products.finish(decoder)
    return decoder


@pytest.fixture
def launches(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Launches:
    from triton.runtime.interpreter import GridExecutor

    noted = Launches()
    monkeypatch.setattr(
        GridExecutor,
        "__call__",
        lambda executor, *args, **kwargs: noted.launch(executor, *args, **kwargs),
    )
    # Without numbers there are no bits to compare.
    monkeypatch.setattr("model.devices.gpu.modules.prove_places", lambda decoder: None)
    return noted


def capture(decoder: Decoder, launches: Launches) -> int:
    """Captures steps of one and of two rows. -> how many were"""
    spec = decoder.spec
    layout = layout_of(spec, 16)
    pool = KVPool.allocate(layout, layout.pages_per_block * 40, torch.bfloat16, DEVICE.torch_device)
    heads = spec.num_query_heads
    backend = create_backend(DEVICE.backend_for(pool, heads), pool, spec.attention_scale, heads)
    stream: Any = Capture(launches)
    return ModelRunner(decoder, pool, backend, DEVICE, stream, most_rows=2, most_tokens=64).capture(
        64
    )


def by_layer(decoder: Decoder, launches: Launches, num_sizes: int = 2) -> list[list[str]]:
    """What each block of each captured step launches: of one row, and of two."""
    firsts, ends = list[int](), list[int]()
    for block in decoder.blocks:
        block.register_forward_pre_hook(lambda *_: firsts.append(len(launches.names)))
        block.register_forward_hook(lambda *_: ends.append(len(launches.names)))
    assert capture(decoder, launches) == num_sizes
    return [launches.names[first:end] for first, end in zip(firsts, ends, strict=True)]


def outside_attention(layers: list[list[str]]) -> list[str]:
    """What every layer launches besides attention, which takes two launches."""
    expected = [name for name in layers[0] if name != "attention"]
    for names in layers:
        assert [name for name in names if name != "attention"] == expected
        assert names.count("attention") == 2
    return expected


CUBLAS = "addmm", "_addmm_activation", "mm"
BIGCODE = ["addmm", "addmm", "add_norm", "_addmm_activation", "addmm", "add_norm"]
GEMMA3 = ["mm", "norm_heads", "mm", "add_norm", "mm", "gate", "mm", "add_norm"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT_BIGCODE, BIGCODE),
        (CONFIGS["gemma3_text"][0], GEMMA3),
        (CONFIGS["falcon"][0], ["mm", "mm", "mm", "gelu", "mm", "add_norm"]),
        (CONFIGS["falcon"][3], ["mm", "mm", "add_norm", "mm", "gelu", "mm", "add_norm"]),
        (CONFIGS["llama"][0], ["mm", "mm", "add_norm", "mm", "gate", "mm", "add_norm"]),
    ],
    ids=["gpt_bigcode", "gemma3", "falcon", "falcon with two norms", "llama"],
)
def test_a_layer_launches_what_it_needs(
    config: dict[str, Any], expected: list[str], tmp_path: Path, launches: Launches
) -> None:
    """With those of attention eight for gpt_bigcode, and ten for gemma3. Products of one row are
    ours, one launch as well.
    """
    layers = by_layer(decoder_of(tmp_path, config), launches)
    singles, others = (
        [names for names in layers if ("one_row" in names) is single] for single in (True, False)
    )
    assert outside_attention(others) == expected and len(singles) == len(others)
    # Any activation is applied in ours.
    unfused = [name for name in outside_attention(singles) if name != "gelu"]
    assert unfused == ["one_row" if name in CUBLAS else name for name in expected if name != "gelu"]


def test_a_step_of_whole_slabs_launches_no_more(tmp_path: Path, launches: Launches) -> None:
    """Steps are captured with as many rows as products in slabs have."""
    for config, expected in ((GPT_BIGCODE, BIGCODE), (CONFIGS["gemma3_text"][0], GEMMA3)):
        launches.names.clear()
        decoder = decoder_of(tmp_path, config, deterministic=True)
        found = outside_attention(by_layer(decoder, launches, 1))
        assert found == expected and decoder.row_multiple == 256


@pytest.mark.parametrize(
    "wait",
    [
        Tensor.item,
        Tensor.cpu,
        Tensor.tolist,
        Tensor.nonzero,
        bool,
        torch.unique,
        partial(torch.equal, torch.ones(1)),
    ],
)
def test_what_waits_for_the_device_is_found(
    wait: Callable[[Tensor], object],
    tmp_path: Path,
    launches: Launches,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoder = decoder_of(tmp_path, GPT_BIGCODE)
    decoder.blocks[1].register_forward_hook(
        lambda module, args, found: wait(found[0][:1, 0]) and None
    )
    assert capture(decoder, launches) == 0 and "meta" in caplog.text.lower()
