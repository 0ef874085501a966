"""Gemma 4: the folder of the whole model, of which the text is served, and what is refused."""

import copy
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint.families import read_spec, spec_of
from model.checkpoint.gguf.config import FREQUENCIES, config_of
from model.checkpoint.gguf.header import GGUFFile
from model.checkpoint.mapped import MappedRows
from model.checkpoint.weights import load_decoder
from model.devices import find_device
from model.kv_layout import layout_of
from model.spec import CheckpointError, ModelSpec
from tests.model.test_decoder import TOLERANCE, load, logits_by_chunks
from tests.support.families import CONFIGS, gemma4, make_family_checkpoint
from tests.support.gguf_models import make_folder, write_gguf

CPU = torch.device("cpu")
E2B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 1536,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "sliding_window": 512,
    "num_kv_shared_layers": 20,
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
"""The published configuration of Gemma 4 E2B."""
FULL = [4, 9, 14, 19, 24, 29, 34]
"""Its layers with full attention."""
ROTATIONS = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
TURNS_TWICE = {"rope_type": "proportional", "partial_rotary_factor": 2}


def layers(**more: Any) -> dict[str, Any]:
    """A per_layer_config."""
    return {str(layer): {"head_dim": 512} | more for layer in FULL}


def spec(**changes: Any) -> ModelSpec:
    return spec_of(Path("m"), E2B | changes)


def test_the_published_configuration() -> None:
    found = spec()
    assert found.num_storing_layers == 15
    assert found.kv_sources[13:20] == (13, 14, 13, 13, 13, 13, 14)
    assert [found.head_dim_of(layer) for layer in (0, 4, 34)] == [256, 512, 512]
    assert [found.intermediate_size_of(layer) for layer in (14, 15)] == [6144, 12288]
    assert found.rotary is not None
    frequencies = found.rotary.inverse_frequencies
    assert len(frequencies) == 256 and frequencies[64:] == (0.0,) * 192
    assert frequencies[63] == pytest.approx(1e6 ** (-126 / 512))
    layout = layout_of(found, 16)
    assert [(g.window, g.layers_per_page, g.num_stacks) for g in layout.groups] == [
        (512, 6, 2),
        (None, 3, 1),
    ]
    # Without bound 6 KiB a token in bfloat16, and 12 KiB of each token within the window.
    assert layout.token_numbers == 3072 and found.kv_bytes_per_token(2) == 18 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, expected 1"),
        ({"num_global_key_value_heads": 4}, "num_global_key_value_heads is 4"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v is True"),
        ({"enable_moe_block": True}, "enable_moe_block is True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers must be an integer from 0 to 34"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers must be a layer of each kind"),
        ({"layer_types": ["sliding_attention"] * 35}, "layer_types must be a list that ends with"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 35"),
        ({"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input must be an integer of at"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping must be a number above 0"),
        ({"per_layer_config": {"0": {"head_dim": 512}}}, f"full attention, {FULL}, found {{'0': "),
        ({"per_layer_config": {"9" * 5000: {}}}, "full attention, [4, 9"),
        ({"per_layer_config": layers() | {"04": {}}}, "full attention, [4, 9"),
        ({"per_layer_config": layers() | {"34": {}}}, "one head_dim for all layers"),
        ({"per_layer_config": layers(width=1)}, "per_layer_config: 4: width is not known"),
        ({"per_layer_config": layers(num_key_value_heads=2)}, "num_key_value_heads is 2, expected"),
        ({"vocab_size_per_layer_input": 2**31 - 1}, "a table of"),
        (
            {"rope_parameters": {"full_attention": TURNS_TWICE}},
            "partial_rotary_factor must be a share",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        spec(**changes)
    assert message in str(error.value)


WRONG: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 512, 2**31, 2**63, 1e400, -0.5, 0.3, "", "x", "all", [],
    [1], ["full_attention"] * 35, {}, {"4": {}}, {"full_attention": {}}, {"rope_type": "yarn"},
)  # fmt: skip


def test_changed_configurations_are_read_or_refused_in_one_line() -> None:
    """A thousand, of one to three keys at any depth."""
    rng, refused = random.Random(0), 0
    for _ in range(1000):
        config: Any = copy.deepcopy(CONFIGS["gemma4_text"][0]) | {"rope_parameters": ROTATIONS}
        config["layer_types"] = list(config["layer_types"])
        for _ in range(rng.randint(1, 3)):
            place: Any = config
            while isinstance(place.get(key := rng.choice(sorted(place))), dict) and place[key]:
                if rng.random() < 0.3:
                    break
                place = place[key] = dict(place[key])
            place[key if rng.random() < 0.9 else f"{key}x"] = rng.choice(WRONG)
        try:
            layout_of(spec_of(Path("m"), config, warn=False), 16)
        except CheckpointError as error:
            refused += 1
            assert "config.json" in str(error) and "\n" not in str(error)
    assert 300 < refused < 950


def test_of_the_whole_model_the_text_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Towers are passed over, and so are keys and values of layers that read another's."""
    (text := tmp_path / "text").mkdir()
    (whole := tmp_path / "whole").mkdir()
    make_family_checkpoint("gemma4_text", 0, text)
    config = json.loads((text / "config.json").read_text())
    config = {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": config,
        "vision_config": {"hidden_size": 8},
        "audio_config": None,
        "image_token_id": 258880,
    }
    (whole / "config.json").write_text(json.dumps(config))
    tensors = load_file(text / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()
    }
    others = (
        "model.vision_tower.encoder.layers.0.mlp.up_proj.weight",
        "model.audio_tower.conv.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.language_model.layers.7.self_attn.k_proj.weight",
        "model.language_model.layers.14.self_attn.v_proj.weight",
        "model.language_model.layers.9.self_attn.k_norm.weight",
    )
    path = whole / "model.safetensors"
    save_file(renamed | {name: torch.ones(2, 2) for name in others}, path)
    with caplog.at_level(logging.WARNING):
        read = read_spec(whole)
    assert not caplog.records
    found, expected = (
        load_decoder(folder, read_spec(folder), torch.float32, CPU) for folder in (whole, text)
    )
    for (name, ours), (other, theirs) in zip(
        found.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(ours, theirs)
    assert read.model_type == "gemma4"
    save_file(
        renamed | {"model.language_model.layers.6.self_attn.k_proj.bias": torch.ones(2)}, path
    )
    with pytest.raises(CheckpointError, match=r"unexpected tensor .*layers\.6\.self_attn\.k_proj"):
        load_decoder(whole, read, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_table_of_layer_inputs_stays_in_its_file(dtype: torch.dtype, tmp_path: Path) -> None:
    made = make_family_checkpoint("gemma4_text", 0, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.embed_tokens_per_layer.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
    device, read = find_device("cpu"), read_spec(made.folder)
    products = device.products(device.dtypes("auto"), "int8", deterministic=False)
    decoder: Any = load_decoder(made.folder, read, torch.float32, CPU, products)
    ids = torch.tensor([5, 300, 0, 5])
    assert torch.equal(decoder.layer_inputs.table(ids), tensors[name].to(dtype)[ids].float())
    assert not any("table" in name for name, _ in decoder.named_parameters())
    with pytest.raises(IndexError):
        decoder.layer_inputs.table(torch.tensor([read.layer_input_vocab_size]))


def test_a_damaged_row_of_the_table_has_no_numbers_and_the_others_are_as_they_were(
    tmp_path: Path,
) -> None:
    (source := tmp_path / "source").mkdir()
    (folder := tmp_path / "gguf").mkdir()
    config = CONFIGS["gemma4_text"][0] | {"hidden_size_per_layer_input": 32}
    make_folder(source, config)
    write_gguf(source, folder / "m.gguf", "Q8_0")
    opened = GGUFFile.open(folder / "m.gguf")
    stored = opened.entries["per_layer_token_embd.weight"]
    table, ids = MappedRows(stored), torch.tensor([7, 8, 7])
    expected = table(ids)
    with (folder / "m.gguf").open("r+b") as file:  # The scale of a block of row 8.
        file.seek(stored.begin + 8 * stored.num_bytes // stored.shape[0] + 34)
        file.write(b"\x00\x7c")
    found = table(ids)
    assert torch.equal(found[[0, 2]], expected[[0, 2]]) and not found[1].isfinite().all()


@pytest.mark.parametrize(
    ("divisors", "message"),
    [
        ([1.0] * 4 + [1e30] * 4, "for the first of 16 pairs"),
        ([1.0, 2.0] + [1e30] * 14, "one divisor"),
        ([1e30] * 16, "one divisor"),
        ([1e30] + [1.0] * 15, "one divisor"),
        ([float("nan")] * 16, "one divisor"),
    ],
)
def test_divisors_of_frequencies_that_do_not_fit_are_refused(
    divisors: list[float], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path, CONFIGS["gemma4_text"][0])
    array = np.array(divisors, np.float32)
    monkeypatch.setattr("tests.support.gguf_models._factors", lambda _: {FREQUENCIES: array})
    write_gguf(tmp_path, tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=message):
        config_of(GGUFFile.open(tmp_path / "m.gguf"))


@pytest.mark.parametrize(("columns", "share"), [(176, 15 / 88), (24, 0.25), (20, 1.0)])
def test_as_many_pairs_turn_as_the_file_says(columns: int, share: float, tmp_path: Path) -> None:
    full = {"rope_type": "proportional", "partial_rotary_factor": share + 1e-9, "rope_theta": 1e6}
    rotations = ROTATIONS | {"full_attention": full}
    changes = {"global_head_dim": columns, "rope_parameters": rotations}
    make_folder(tmp_path, CONFIGS["gemma4_text"][0] | changes)
    write_gguf(tmp_path, tmp_path / "m.gguf")
    rotary = spec_of(tmp_path, config_of(GGUFFile.open(tmp_path / "m.gguf"))).rotary
    assert rotary is not None
    turning = [f for f in rotary.inverse_frequencies if f]
    assert len(turning) == round(share * columns / 2)


def test_what_ends_the_whole_model_ends_its_texts() -> None:
    text = E2B | {"eos_token_id": 1}
    found = spec_of(Path("m"), {"model_type": "gemma4", "text_config": text, "eos_token_id": [106]})
    assert found.end_token_ids == (1, 106)


def random_configuration(seed: int) -> dict[str, Any]:
    """Of number 5, E2B's own scaled down; of others, unusual dimensions."""
    rng = random.Random(seed)
    if seed == 5:
        sizes = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 24}
        more = {"use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}
        return gemma4(48, 8, "LLLLG" * 7, 400, 192, 20, **sizes, **more)
    types = "".join(rng.choice("LLG") for _ in range(rng.randint(3, 8))) + "LG"
    num_shared = rng.randint(0, len(types) - 3)
    own = types[: len(types) - num_shared]
    num_shared = num_shared if {*own} == {*types} else 0
    return gemma4(
        rng.choice((20, 36, 64)),
        rng.choice((1, 2, 5, 8)),
        types,
        rng.randint(300, 500),
        rng.randint(20, 120),
        num_shared,
        head_dim=rng.choice((8, 16, 32, 48)),
        global_head_dim=rng.choice((16, 40, 64)),
        sliding_window=rng.choice((3, 16, 50)),
        use_double_wide_mlp=rng.random() < 0.5,
        hidden_size_per_layer_input=rng.choice((4, 7, 16)),
        final_logit_softcapping=rng.choice((None, 8.0, 30.0)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@torch.no_grad()
def test_logits_of_random_configurations(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "gemma4_text", [random_configuration(seed)])
    made = make_family_checkpoint("gemma4_text", 0, tmp_path)
    # Of texts in which no logit moves by as much as the tolerance where weights move by a last bit.
    decoder, ids = load(made.folder), random.Random(10 + seed).choices(range(3, 300), k=100)
    expected = made.oracle(torch.tensor([ids])).logits[0]
    for backend in ("reference", "native"):
        for chunks in ([100], [60, *[1] * 20, 20]):
            found = logits_by_chunks(decoder, backend, ids, chunks, 16)
            assert (found - expected).abs().max() < TOLERANCE * max(1.0, expected.abs().max())


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text"])
def test_a_cap_of_a_gguf_file_is_a_number(family: str, tmp_path: Path) -> None:
    make_folder(tmp_path, CONFIGS[family][0])
    write_gguf(tmp_path, tmp_path / "m.gguf", final_logit_softcapping=[1.0, 2.0])
    with pytest.raises(CheckpointError, match=r"final_logit_softcapping must be a number above 0"):
        config_of(GGUFFile.open(tmp_path / "m.gguf"))
