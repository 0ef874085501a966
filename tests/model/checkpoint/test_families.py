"""Every family against `transformers`: logits for every way of cutting a text, greedy tokens, and
the same from a running server.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commands.held_out import decoder_logits
from model.checkpoint.families import read_spec, spec_of
from model.checkpoint.weights import load_decoder
from model.devices.products import Products
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import CheckpointError
from server.text.codec import TextCodec
from tests.model.test_decoder import (
    CPU,
    GREEDY,
    TOLERANCE,
    finish,
    load,
    logits_by_chunks,
    make_core,
)
from tests.support.families import CONFIGS, FamilyCheckpoint
from tests.support.processes import ServerProcess
from tests.support.submitting import submit
from tests.support.torch_blocks import BlockProducts

ALL = [(family, number) for family, configs in CONFIGS.items() for number in range(len(configs))]
PROMPT = "def f(x): "
SERVED = ("falcon", "gemma3_text", "deepseek_v3")
"""Byte-level tokens without BOS; pieces and layers with a window; latent attention with experts.
`-m slow` serves every checkpoint."""

Family = Callable[[str, int], FamilyCheckpoint]


@pytest.fixture(scope="module", params=ALL, ids=lambda param: f"{param[0]}-{param[1]}")
def checkpoint(request: pytest.FixtureRequest, family_checkpoint: Family) -> FamilyCheckpoint:
    return family_checkpoint(*request.param)


def test_what_transformers_writes_beside_the_model_is_no_warning(
    checkpoint: FamilyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder as `transformers` wrote it, and with the keys of its own that other versions of it
    add.
    """
    values = json.loads((checkpoint.folder / "config.json").read_text())
    values.pop("auto_map", None)  # Code of the checkpoint's own, which has a warning of its own.
    own: dict[str, Any] = {
        "_name_or_path": "x",
        "_model_name_or_path": "x",
        "_commit_hash": "0",
        "_attn_implementation": "sdpa",
        "architectures": ["X"],
    }
    own |= {
        "transformers_version": "4.57.1",
        "torch_dtype": "float32",
        "dtype": "float32",
        "gradient_checkpointing": False,
    }
    spec_of(checkpoint.folder, values | own)
    assert caplog.messages == []
    spec_of(checkpoint.folder, values | {"scale_of_everything": 2.0})
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "keys that onehead does not know and ignores: 'scale_of_everything'"
    ]


def random_ids(checkpoint: FamilyCheckpoint, count: int) -> list[int]:
    rng = random.Random(checkpoint.number)
    return [rng.randrange(3, checkpoint.vocab_size) for _ in range(count)]


@torch.no_grad()
def test_logits_whole_chunked_and_decoded(checkpoint: FamilyCheckpoint) -> None:
    decoder = load(checkpoint.folder)
    ids = random_ids(checkpoint, 110)
    expected = checkpoint.oracle(torch.tensor([ids])).logits[0]
    for backend in ("reference", "native"):
        for chunks, page_size in (
            ([110], 16),
            ([1] * 110, 16),
            ([60, *[1] * 20, 30], 7),
            ([13, 40, 1, 56], 64),
        ):
            actual = logits_by_chunks(decoder, backend, ids, chunks, page_size)
            assert (actual - expected).abs().max() < TOLERANCE, (backend, chunks, page_size)


def greedy(checkpoint: FamilyCheckpoint, prompt: list[int], count: int) -> list[int]:
    """What `transformers` goes on with."""
    generated = checkpoint.oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.slow
def test_200_greedy_tokens(checkpoint: FamilyCheckpoint) -> None:
    prompt = random_ids(checkpoint, 37)
    core = make_core(checkpoint, num_pages=700)  # type: ignore[arg-type]
    submit(core.scheduler, 0, prompt, 200, GREEDY)
    assert finish(core)[0] == greedy(checkpoint, prompt, 200)


def check_served(checkpoint: FamilyCheckpoint) -> None:
    """A server of the checkpoint answers with what `transformers` goes on with."""
    server = ServerProcess(checkpoint.folder, "--cache.pages", "400", "--engine.step_tokens", "64")
    ids = TextCodec(checkpoint.folder).encode(PROMPT)
    parameters = {"max_new_tokens": 200, "details": True, "ignore_eos": True, "do_sample": False}
    status, body = server.post("/generate", {"inputs": PROMPT, "parameters": parameters})
    assert status == 200, body
    assert [token["id"] for token in body["details"]["tokens"]] == greedy(checkpoint, ids, 200)
    assert server.stop() == 0


@pytest.mark.slow
def test_200_greedy_tokens_through_the_server(checkpoint: FamilyCheckpoint) -> None:
    check_served(checkpoint)


@pytest.mark.parametrize("family", SERVED)
def test_200_greedy_tokens_of_three_families_through_the_server(
    family: str, family_checkpoint: Family
) -> None:
    check_served(family_checkpoint(family, 0))


@pytest.mark.parametrize("family", CONFIGS)
def test_tokenizers_give_text_back(family: str, family_checkpoint: Family) -> None:
    codec = TextCodec(family_checkpoint(family, 0).folder)
    ids = codec.encode("def f(x):\n    return é + 'λ'\n")
    assert codec.tokenizer.decode(ids) == "def f(x):\n    return é + 'λ'\n"
    assert (len(codec.opening) == 1) == (family not in ("falcon", "santacoder"))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.bfloat16, "none"), (torch.float32, "int8"), (torch.bfloat16, "int8")],
)
@torch.inference_mode()
def test_rounded_weights_say_much_the_same(
    family: str, dtype: torch.dtype, quantization: str, family_checkpoint: Family
) -> None:
    checkpoint = family_checkpoint(family, 1)
    exact = load(checkpoint.folder)
    products = Products() if quantization == "none" else BlockProducts(quantization)
    rounded = load_decoder(checkpoint.folder, exact.spec, dtype, CPU, products)
    ids = torch.tensor(random_ids(checkpoint, 60))
    logits = [decoder_logits(decoder)(ids).float() for decoder in (exact, rounded)]
    assert (logits[0] - logits[1]).norm() < 0.15 * logits[0].norm()


def test_layers_behind_the_last_are_read_over_only_where_the_config_counts_them(
    tmp_path: Path, family_checkpoint: Family
) -> None:
    folder = shutil.copytree(family_checkpoint("deepseek_v3", 0).folder, tmp_path / "appended")
    config = json.loads((folder / "config.json").read_text())
    for appended in (1, 0):
        (folder / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": 2, "num_nextn_predict_layers": appended})
        )
        if appended:
            load(folder)
        else:
            with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.2\."):
                load(folder)


def test_too_few_pages_for_anyone_are_refused(family_checkpoint: Family) -> None:
    folder = family_checkpoint("gemma3_text", 0).folder
    with pytest.raises(
        MemoryError, match=r"cache\.pages is 3 pages; 64 tokens of one sequence need 6"
    ):
        ModelRunner.load(
            folder, read_spec(folder), EngineOptions("cpu", "float32", 1, 64, 3, None, 512, 4, 64)
        )
