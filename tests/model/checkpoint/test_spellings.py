"""Earlier model types and names of keys are read as `transformers` reads them, and as Falcon's
first code did.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from commands.held_out import decoder_logits
from model.checkpoint.families import read_spec, spec_of
from model.checkpoint.spellings import KEYS
from model.checkpoint.weights import load_decoder
from model.spec import CheckpointError
from tests.support.families import CONFIGS, FamilyCheckpoint

FIRST_FALCON = {
    "model_type": "RefinedWebModel",
    "architectures": ["RWForCausalLM"],
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "multi_query": True,
    "n_head": 71,
    "n_layer": 32,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 65024,
}
"""Falcon-7B's as it was first published, but for what is about its code and training."""
OF_TYPE = {"gpt2": "santacoder", "gpt_bigcode": "santacoder"}


def test_falcon_7b_as_first_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    today = {"model_type": "falcon", "num_attention_heads": 71, "num_hidden_layers": 32}
    today |= {
        key: value
        for key, value in FIRST_FALCON.items()
        if key not in ("model_type", "n_head", "n_layer")
    }
    assert spec_of(tmp_path, FIRST_FALCON) == spec_of(tmp_path, today) and not caplog.records


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"multi_query": False}, "multi_query is False, so there are 71 key/value heads"),
        ({"alibi": True}, "alibi is True; ALiBi is not supported"),
        ({"model_type": "RefinedWeb", "n_head_kv": 8}, "num_kv_heads is 8, expected 1"),
        ({"model_type": "RefinedWeb"}, "num_kv_heads must be .*|num_kv_heads is 71, expected 1"),
        (
            {"num_attention_heads": 64},
            "n_head is 71 and num_attention_heads 64, which mean the same; expected one of them",
        ),
        ({"n_layer": "3"}, "num_hidden_layers must be an integer"),
    ],
)
def test_what_is_no_falcon_with_one_head_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/config.json: ({words})"):
        spec_of(tmp_path, FIRST_FALCON | changes)


def test_the_newer_falcon_with_one_head_has_two_norms(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, FIRST_FALCON | {"model_type": "RefinedWeb", "n_head_kv": 1})
    assert spec.parallel and not spec.shared_norm


@pytest.mark.parametrize(
    ("kind", "other"),
    [(kind, other) for kind, names in KEYS.items() if kind != "falcon" for other in names],
)
def test_another_name_is_read_as_transformers_reads_it(
    kind: str, other: str, tmp_path: Path
) -> None:
    values = dict(CONFIGS[OF_TYPE.get(kind, kind)][0]) | {"model_type": kind}
    values |= {"attention_head_type": "multiquery"} if kind == "gpt2" else {}
    name = KEYS[kind][other]
    renamed = {key: value for key, value in values.items() if key != name} | {other: values[name]}
    assert spec_of(tmp_path, renamed) == spec_of(tmp_path, values)
    assert spec_of(tmp_path, values | {other: values[name], name: None}) == spec_of(
        tmp_path, values
    )
    assert spec_of(tmp_path, values | {other: values[name]}) == spec_of(tmp_path, values)
    with pytest.raises(CheckpointError, match=f"{other} is .* which mean the same"):
        spec_of(tmp_path, values | {other: values[name] + 1})
    theirs = CONFIG_MAPPING[kind]
    if other in theirs.attribute_map:
        of = {key: value for key, value in renamed.items() if key != "model_type"}
        assert getattr(theirs(**of), name) == values[name]


@pytest.mark.parametrize("family", CONFIGS)
def test_what_transformers_writes_of_a_config_is_the_same_model(
    family: str, tmp_path: Path
) -> None:
    for values in CONFIGS[family]:
        of = {key: value for key, value in values.items() if key != "model_type"}
        written = json.loads(
            CONFIG_MAPPING[values["model_type"]](**of).to_json_string(use_diff=False)
        )
        assert spec_of(tmp_path, written) == spec_of(tmp_path, values)


def test_a_nested_text_config_says_what_is_wrong_with_the_text_model(tmp_path: Path) -> None:
    values = CONFIGS["gemma3_text"][0]
    text = {key: value for key, value in values.items() if key != "model_type"}
    outer = {"model_type": "gemma3", "vision_config": {"hidden_size": 9}, "text_config": text}
    assert spec_of(tmp_path, outer) == spec_of(tmp_path, values)
    assert spec_of(tmp_path, outer | {"text_config": values}) == spec_of(tmp_path, values)
    with pytest.raises(CheckpointError, match="num_key_value_heads is 4"):
        spec_of(tmp_path, outer | {"text_config": text | {"num_key_value_heads": 4}})
    for wrong in (None, [1], 3):
        with pytest.raises(CheckpointError, match="model_type is 'gemma3'; supported"):
            spec_of(tmp_path, outer | {"text_config": wrong})


@torch.inference_mode()
def test_the_weights_of_the_first_falcon_are_those_of_today(
    family_checkpoint: Callable[[str, int], FamilyCheckpoint], tmp_path: Path
) -> None:
    made = family_checkpoint("falcon", 0)
    folder = Path(shutil.copytree(made.folder, tmp_path / "first"))
    config = json.loads((folder / "config.json").read_text())
    sizes = {key: config[key] for key in ("hidden_size", "vocab_size")}
    sizes |= {
        "n_head": config["num_attention_heads"],
        "n_layer": config["num_hidden_layers"],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(FIRST_FALCON | sizes))
    ids = torch.arange(5, 45)
    decoder = load_decoder(folder, read_spec(folder), torch.float32, torch.device("cpu"))
    assert (decoder_logits(decoder)(ids) - made.oracle(ids[None]).logits[0]).abs().max() < 1e-4
