"""Rotary scalings of configs: both spellings, refusals, and what null means. test_families holds
their values to `transformers`.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint.config import Config
from model.checkpoint.families import read_spec
from model.checkpoint.rope import rotary
from model.spec import CheckpointError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA |= {
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def spec_of(folder: Path, **config: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


def test_both_spellings_mean_the_same() -> None:
    new = Config({"rope_parameters": YARN | {"rope_theta": 500.0}})
    old = Config(
        {
            "rope_theta": 500.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 64,
        }
    )
    assert rotary(new, 16, 256) == rotary(old, 16, 256)
    both = Config(dict(new.values) | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    with pytest.raises(CheckpointError, match="rope_scaling and rope_parameters differ"):
        rotary(both, 16, 256)
    with pytest.raises(
        CheckpointError, match="original_max_position_embeddings is 32 beside and 64 in"
    ):
        rotary(Config({"rope_scaling": YARN, "original_max_position_embeddings": 32}), 16, 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic'; supported: default, linear",
        ),
        ({"rope_scaling": {"rope_type": ["x"]}}, "rope_type is"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 1e-320}},
            "angles that are no numbers|a number above 0",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}},
            "beta_fast has no meaning for rope_type 'linear'",
        ),
        ({"rope_scaling": YARN | {"rope_theta": 1}}, "angles that are no numbers"),
        ({"rope_scaling": YARN | {"beta_fast": 5e-324}}, "angles that are no numbers"),
        ({"rope_theta": 1e-320}, "angles that are no numbers"),
        ({"rope_theta": -1}, "rope_theta must be a number above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"head_dim": 7}, "7 columns of a head are to be rotated, which go in pairs"),
        (
            {"hidden_size": 3},
            "head_dim must be an integer from 1 to 8192; by default it would be 0",
        ),
        ({"head_dim": 2**30}, "head_dim must be an integer from 1 to 8192"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers must be an integer from 1 to 1024"),
    ],
)
def test_what_cannot_be_turned_is_refused_at_once(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=message):
        spec_of(tmp_path, **LLAMA | changes)
    # Lists of a lying config's length would take minutes and gigabytes.
    assert time.monotonic() - begin < 30


def test_a_value_of_any_length_makes_a_short_message(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        spec_of(tmp_path, **LLAMA | {"hidden_size": "x" * 10**6})
    assert len(str(refusal.value)) < 300


def test_null_is_no_scale_where_that_is_what_it_means(tmp_path: Path) -> None:
    minicpm3 = LLAMA | {"model_type": "minicpm3", "qk_rope_head_dim": 8}
    plain = spec_of(tmp_path, **minicpm3 | {"scale_depth": None, "dim_model_base": None})
    assert plain.residual_scale == 1 and plain.logit_scale == 1
    published = spec_of(tmp_path, **minicpm3)
    assert published.residual_scale == 1.4 / 2**0.5 and published.logit_scale == 256 / 64
    deepseek = LLAMA | {"model_type": "deepseek_v3", "first_k_dense_replace": 0}
    nulls = spec_of(tmp_path, **deepseek | {"norm_topk_prob": None, "rope_interleave": None})
    assert not nulls.experts.normalised and not nulls.rotary.interleaved
    absent = spec_of(tmp_path, **deepseek)
    assert absent.experts.normalised and absent.rotary.interleaved


def test_too_many_experts_are_refused_before_they_are_built(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="n_routed_experts must be an integer from 1 to 64"):
        spec_of(
            tmp_path,
            **LLAMA
            | {"model_type": "deepseek_v3", "num_hidden_layers": 1024, "n_routed_experts": 4096},
        )
