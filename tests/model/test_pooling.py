"""Vectors of texts: bidirectional attention, pooling and the layers after it, against
`transformers`; what is refused of the files that say so.
"""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint.families import read_spec
from model.checkpoint.gguf.config import config_of
from model.checkpoint.gguf.header import GGUFFile
from model.checkpoint.identity import ModelFiles
from model.devices import create_backend
from model.options import EngineOptions
from model.runner.runner import ModelRunner
from model.spec import CheckpointError, OptionError
from model.step import Sampling
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from tests.support.embedders import (
    CLASSIFIERS,
    CONTEXT,
    VOCABULARY,
    WIDTH,
    Embedder,
    make_classifier,
    make_embedder,
    write,
)
from tests.support.gguf_models import write_gguf
from tests.support.submitting import submit

OPTIONS = EngineOptions("cpu", "float32", 1, 16, 200, None, CONTEXT, 4, CONTEXT)
Files = dict[str, Any]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return make_embedder(tmp_path_factory.mktemp("embedder"))


def load(folder: Path, **changes: Any) -> ModelRunner:
    return ModelRunner.load(folder, read_spec(folder, pools=True), replace(OPTIONS, **changes))


def vectors(runner: ModelRunner, prompts: list[list[int]], whole: bool = True) -> list[Any]:
    """The vectors of texts that are submitted together."""
    limits = Limits(
        runner.pool.num_pages, runner.pool.layout, CONTEXT + 1, 4, CONTEXT, is_whole=whole
    )
    core = EngineCore(Scheduler(limits), runner)
    for id, prompt in enumerate(prompts):
        submit(core.scheduler, id, prompt, 1, Sampling())
    found: dict[int, bytes] = {}
    while core.scheduler.has_work:
        found |= {event.id: event.vector for event in core.step()}
    assert core.scheduler.allocator.num_available == limits.num_pages
    return [np.frombuffer(found[id], np.float32) for id in range(len(prompts))]


def convert(source: Path, folder: Path, **changes: Any) -> None:
    """Makes a folder with a GGUF file of an embedder's."""
    write_gguf(source, folder / "m.gguf", **changes)
    (folder / "config.json").write_text(json.dumps(config_of(GGUFFile.open(folder / "m.gguf"))))


def texts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, 2, 5, 6, 7, 16, 17, 40, 95, CONTEXT]
    # Without the pad token, 0, which `transformers` would not count at the end.
    return [rng.choices(range(1, VOCABULARY), k=count) for count in lengths]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_vector_is_that_of_transformers(embedder: Embedder, backend: str) -> None:
    runner = load(embedder.folder)
    if backend == "reference":
        spec = runner.decoder.spec
        found = create_backend("reference", runner.pool, spec.attention_scale, spec.num_query_heads)
        runner = ModelRunner(runner.decoder, runner.pool, found, runner.device)
    for ids, vector in zip(texts(), vectors(runner, texts()), strict=True):
        expected = embedder.vector(ids)
        assert torch.allclose(torch.from_numpy(vector.copy()).double(), expected, atol=2e-4)
        assert torch.cosine_similarity(torch.tensor(vector).double(), expected, 0) > 1 - 1e-9


@pytest.mark.parametrize("window", [2, 4, 32, 400])
def test_windows_of_any_width_count_both_ways(window: int, tmp_path: Path) -> None:
    made = make_embedder(tmp_path, window, seed=window)
    for ids, vector in zip(texts(1), vectors(load(tmp_path), texts(1)), strict=True):
        similarity = torch.cosine_similarity(torch.tensor(vector).double(), made.vector(ids), 0)
        assert similarity > 1 - 1e-9


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_vector_has_the_same_bits_in_any_company(embedder: Embedder, quantization: str) -> None:
    runner, prompts = load(embedder.folder, quantization=quantization), texts(2)
    alone = [vectors(runner, [prompt])[0] for prompt in prompts]
    for seed in range(5):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        for number, vector in zip(order, vectors(runner, [prompts[i] for i in order]), strict=True):
            assert np.array_equal(vector, alone[number])


def test_a_step_that_does_not_fit_is_computed_text_by_text(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, prompts = load(embedder.folder), texts(3)
    expected = vectors(runner, prompts)
    launch = runner.launch

    def refuse(plan: Any) -> Any:
        if len(plan.rows) > 1:
            raise MemoryError("no")
        return launch(plan)

    monkeypatch.setattr(runner, "launch", refuse)
    for found, wanted in zip(vectors(runner, prompts), expected, strict=True):
        assert np.array_equal(found, wanted)


def test_a_gguf_file_gives_the_vectors_of_its_folder(embedder: Embedder, tmp_path: Path) -> None:
    convert(embedder.folder, tmp_path)
    spec = read_spec(tmp_path, pools=True)
    assert spec.pooling == read_spec(embedder.folder, pools=True).pooling
    found = vectors(load(tmp_path), texts()[:5])
    for vector, wanted in zip(found, vectors(load(embedder.folder), texts()[:5]), strict=True):
        assert np.allclose(vector, wanted, atol=1e-4)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_classifier(family, tmp_path, ("bad", "fair", "good"))
    runner = load(tmp_path)
    assert runner.decoder.spec.pooling.labels == ("bad", "fair", "good")
    prompts = texts(4)
    for ids, vector in zip(prompts, vectors(runner, prompts, whole=False), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0]
        assert torch.allclose(torch.from_numpy(vector.copy()), expected, atol=1e-3)


# --- files


def changed(path: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / path
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def without(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).unlink()


def modules(*kinds: str, path: Any = "1_Pooling") -> Callable[[Path], None]:
    values = [{"type": f"x.{kind}", "path": path if i else ""} for i, kind in enumerate(kinds)]
    return lambda folder: _write(folder / "modules.json", json.dumps(values))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


REFUSED = {
    "an odd window": (changed("config.json", sliding_window=257), "sliding_window must be even"),
    "no modules": (without("modules.json"), "no modules.json"),
    "another module": (modules("Transformer", "Pooling", "LSTM"), "the modules are"),
    "no pooling": (modules("Transformer", "Dense"), "the modules are"),
    "two in one": (modules("Transformer Pooling"), "the modules are"),
    "a norm before": (modules("Transformer", "Pooling", "Normalize", "Dense"), "the modules are"),
    "a path out of it": (
        modules("Transformer", "Pooling", path="../x"),
        "is not a number and a name",
    ),
    "no path": (modules("Transformer", "Pooling", path=None), r"Expected `str`, got `null`.*path"),
    "not a list": (lambda f: (f / "modules.json").write_text("7"), "expected a list of modules"),
    "not JSON": (lambda f: (f / "modules.json").write_text("["), "expected a list of modules"),
    "another pooling": (
        changed("1_Pooling/config.json", pooling_mode_max_tokens=True),
        "mean_tokens and max_tokens",
    ),
    "a list of kinds": (changed("1_Pooling/config.json", pooling_mode=["mean"]), "pools by"),
    "of text alone": (changed("1_Pooling/config.json", include_prompt=False), "include_prompt"),
    "another activation": (
        changed("2_Dense/config.json", activation_function="torch.nn.ReLU"),
        "activation_function must be one of Identity, Tanh",
    ),
    "sizes that differ": (changed("3_Dense/config.json", in_features=9), "takes 9 numbers"),
    "no size": (changed("3_Dense/config.json", out_features=None), "out_features must be"),
    "no weights": (without("2_Dense/model.safetensors"), "2_Dense/model.safetensors: no such file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_say_something_else_are_refused(case: str, tmp_path: Path) -> None:
    make_embedder(tmp_path)
    change, words = REFUSED[case]
    change(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id2label": {"1": "a", "2": "b"}}, "id2label must be names"),
        ({"id2label": {"0": None}}, "id2label must be names"),
        ({"id2label": {}}, "id2label must be names"),
        ({"problem_type": "ranking"}, "problem_type must be one of"),
        ({"id2label": {str(i): "x" for i in range(5)}}, "score.weight has shape"),
    ],
)
def test_heads_that_cannot_be_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make_classifier("gemma", tmp_path, ("bad", "good"))
    changed("config.json", **changes)(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_modules_in_a_folder_that_is_a_link_are_refused(tmp_path: Path) -> None:
    make_embedder(tmp_path)
    (tmp_path / "1_Pooling").rename(tmp_path / "elsewhere")
    (tmp_path / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is not a number and a name"):
        load(tmp_path)


def test_a_model_without_prefix_in_several_files(embedder: Embedder, tmp_path: Path) -> None:
    shutil.copytree(embedder.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    config = (tmp_path / "config.json").read_text()
    embedder.model.save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "config.json").write_text(config)
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    for vector, wanted in zip(
        vectors(load(tmp_path), texts()[:4]),
        vectors(load(embedder.folder), texts()[:4]),
        strict=True,
    ):
        assert np.array_equal(vector, wanted)


def test_newer_spellings_and_other_layers(tmp_path: Path) -> None:
    make_embedder(tmp_path)
    write(tmp_path / "1_Pooling", {"pooling_mode": "lasttoken"})
    changed("2_Dense/config.json", activation_function="torch.nn.modules.activation.Tanh")(tmp_path)
    pooling = read_spec(tmp_path, pools=True).pooling
    assert pooling is not None and pooling.over == "last" and pooling.size(1) == WIDTH
    assert [layer.activation for layer in pooling.layers] == ["tanh", "none"]
    assert len(vectors(load(tmp_path), texts()[:2])[0]) == WIDTH


def test_commands_that_generate_refuse_it(embedder: Embedder) -> None:
    with pytest.raises(CheckpointError, match="generates none"):
        read_spec(embedder.folder)


def test_speculation_is_refused(embedder: Embedder) -> None:
    with pytest.raises(OptionError, match="without speculation"):
        load(embedder.folder, speculation="ngram")


def test_a_cache_on_disk_is_refused(embedder: Embedder, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cache\.disk is set"):
        load(embedder.folder, cache_disk=str(tmp_path))


def test_the_digest_covers_the_layers_after_pooling(tmp_path: Path) -> None:
    made = make_embedder(tmp_path)

    def digest() -> str:
        spec = read_spec(made.folder, pools=True)
        return ModelFiles(made.folder, made.folder / "tokenizer.json", spec).digest()

    before, file = digest(), made.folder / "3_Dense/model.safetensors"
    assert digest() == before
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert digest() != before


def test_a_gguf_file_without_the_layers_is_refused(embedder: Embedder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing tensor dense_3\.weight"):
        convert(embedder.folder, tmp_path, leave_out=("dense_3.weight",))
