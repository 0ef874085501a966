"""Weights as in a GGUF file: 4-bit blocks stay 4-bit, other quantized ones are held in int8, a
matrix in parts where its tensors differ.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.options import PlanOptions
from commands.plan import make_plan
from model.checkpoint.families import read_spec
from model.checkpoint.gguf.repack import repack, repacks
from model.checkpoint.names import Part
from model.checkpoint.weights import Checkpoint
from model.devices.blocks import BlockFormat
from model.devices.device import Device
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from tests.model.checkpoint.gguf.test_loading import LLAMA, convert
from tests.model.devices.cpu.test_program import NUM_PAGES, ragged, states
from tests.support.families import CONFIGS
from tests.support.gguf_models import make_folder
from tests.support.torch_blocks import product

FULL = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "attention_bias": True,
}
MIXED = {
    "token_embd": "Q6_K",
    "output": "Q8_0",
    "attn_q": "Q4_K",
    "attn_k": "Q4_1",
    "attn_v": "Q6_K",
    "attn_output": "Q5_K",
    "ffn_gate": "Q4_K",
    "ffn_up": "F16",
    "ffn_down": "Q4_0",
}
"""Parts of one matrix differ: the queries, the key and the value, and the halves of a gated MLP."""


def make_gguf(
    folder: Path, config: dict[str, Any], kind: str = "F32", kinds: dict[str, str] | None = None
) -> Path:
    (folder / "gguf").mkdir()
    make_folder(folder / "source", config)
    convert(folder / "source", folder / "gguf", kind, kinds=kinds)
    return folder / "gguf"


def load(folder: Path, dtype: str = "auto", quantization: str = "auto") -> ModelRunner:
    options = EngineOptions("cpu", dtype, 1, 16, NUM_PAGES, None, 320, 4, 512, quantization)
    return ModelRunner.load(folder, read_spec(folder), options)


def held(matrix: Any) -> torch.Tensor:
    """All rows of a linear layer, in float32."""
    return torch.cat(
        [part.rows(torch.arange(part.shape[0])) for part in [*matrix.stack] or [matrix]]
    )


def test_each_part_of_a_matrix_is_held_as_in_the_file(tmp_path: Path) -> None:
    folder = make_gguf(tmp_path, FULL, kinds=MIXED)
    decoder, checkpoint = load(folder).decoder, Checkpoint(folder)
    parts = {
        "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "attention.out": ["self_attn.o_proj"],
        "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down": ["mlp.down_proj"],
    }
    forms = {
        "attention.qkv": ["int4", "int4", "int8"],
        "attention.out": ["int8"],
        "mlp.up": ["int4", None],
        "mlp.down": ["int4"],
    }
    for name, theirs in parts.items():
        matrix: Any = decoder.get_submodule(f"blocks.1.{name}")
        each = [part.form and part.form.name for part in [*matrix.stack] or [matrix]]
        assert each == forms[name]
        names = [f"model.layers.1.{module}.weight" for module in theirs]
        expected = [checkpoint.read(Part(name)).float() for name in names]
        for rows, file, tensor in zip(
            held(matrix).split([len(e) for e in expected]), expected, names, strict=True
        ):
            kind = MIXED[checkpoint.tensors[tensor].stored.name.split(".")[-2]]
            if kind in ("Q4_0", "Q4_1", "F16"):
                assert torch.equal(rows, file), tensor
            elif kind == "Q4_K":
                # The numbers are the file's, each scale and minimum the float16 nearest to it.
                assert 0 < (rows - file).abs().max() < 2**-11 * 0.002 * 63 * 16
            else:
                assert (rows - file).abs().max() <= file.abs().max() / 127
    up: Any = decoder.get_submodule("blocks.0.mlp.up")
    assert up.stack[1].weight.dtype == torch.float16
    assert decoder.block_forms == {"int4": 2 * 4, "int8": 2 * 2 + 2}


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("llama", MIXED), ("gemma", {"attn_v": "Q6_K"}), ("santacoder", {"attn_qkv": "Q5_K"})],
)
def test_a_program_and_the_modules_give_the_same_bits(
    family: str, kinds: dict[str, str], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_attention_heads": 4}
    config = FULL if family == "llama" else dict(CONFIGS[family][0])
    if family == "gemma":
        config |= sizes
    if family == "santacoder":
        config |= {"n_embd": 256, "n_inner": 512, "n_head": 4}
    runner = load(make_gguf(tmp_path, config, "Q4_K", kinds))
    assert set(runner.decoder.block_forms) == {"int4", "int8"}
    modules, rng = Device.forward(runner.device, runner.decoder, runner.backend), random.Random(7)
    for threads, most_tokens in ((1, 8), (2, 1), (2, 40)):
        plan = ragged(runner, rng, 3, most_tokens)
        for found, expected in zip(
            states(runner, runner.forward, plan, threads),
            states(runner, modules, plan, 1),
            strict=True,
        ):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_product_in_parts_is_that_of_each_part(num_tokens: int, tmp_path: Path) -> None:
    folder = make_gguf(tmp_path, FULL, kinds=MIXED)
    decoder, checkpoint = load(folder).decoder, Checkpoint(folder)
    qkv: Any = decoder.get_submodule("blocks.0.attention.qkv")
    up: Any = decoder.get_submodule("blocks.0.mlp.up")
    x_TD = torch.randn(num_tokens, 256)

    def expected(name: str) -> torch.Tensor:
        form, rows = blocks_of(checkpoint, Part(f"model.layers.0.{name}.weight"))
        return product(form, (qkv if "attn" in name else up).norm(x_TD), rows)

    q, k, v = (expected(f"self_attn.{name}_proj") for name in "qkv")
    assert torch.equal(qkv(x_TD), torch.cat([q, k, v], dim=-1) + qkv.bias)
    gated = torch.nn.functional.silu(expected("mlp.gate_proj")) * (up.norm(x_TD) @ held(up)[512:].T)
    torch.testing.assert_close(up(x_TD), gated, rtol=1e-4, atol=1e-4)


def blocks_of(checkpoint: Checkpoint, part: Part) -> tuple[BlockFormat, torch.Tensor]:
    """The format that a part is held in, and its rows as the definition makes them."""
    form, (kind, rows) = checkpoint.held_as(part), checkpoint.raw_blocks(part) or ("", iter(()))
    assert isinstance(form, BlockFormat)
    if repacks(kind, form.name):
        return form, repack(kind, form.name, torch.cat([each.clone() for each in rows]))
    return form, form.quantize(checkpoint.read(part))


@pytest.mark.parametrize(
    ("dtype", "quantization", "form"),
    [
        ("auto", "none", None),
        ("bfloat16", "auto", None),
        ("auto", "int8", "int8"),
        ("auto", "int4", "int4"),
    ],
)
def test_what_is_asked_for_is_what_is_held(
    dtype: str, quantization: str, form: str | None, tmp_path: Path
) -> None:
    decoder = load(make_gguf(tmp_path, FULL, kinds=MIXED), dtype, quantization).decoder
    qkv: Any = decoder.get_submodule("blocks.0.attention.qkv")
    assert not decoder.block_forms and (qkv.form and qkv.form.name) == form and not qkv.stack
    if form is None:
        assert qkv.weight.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)


def test_the_plan_says_what_is_held(tmp_path: Path) -> None:
    folder = make_gguf(tmp_path, FULL, kinds=MIXED)
    plan = make_plan(PlanOptions(model=folder, memory=10**9, device="cpu"))
    runner = load(folder)
    assert plan.weight_form == "mixed" and plan.weight_bytes["mixed"] == runner.weight_bytes
    assert plan.block_forms == runner.decoder.block_forms
    asked = make_plan(PlanOptions(model=folder, memory=10**9, device="cpu", quantization="none"))
    assert (
        not asked.block_forms
        and asked.weight_bytes[asked.weight_form] == load(folder, quantization="none").weight_bytes
    )
