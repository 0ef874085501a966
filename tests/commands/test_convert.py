"""`onehead convert` against `transformers`: pooling is the original with every key/value head
replaced by their mean, and nothing else.

Then what follows from it: losses on the same sequences, refusal to serve what was only pooled, and
training that goes on from it.
"""

import json
import logging
import math
import shutil
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from commands import cli
from commands.convert import convert as convert_tool
from commands.convert.convert import convert
from commands.held_out import decoder_logits
from commands.options import ConvertOptions, TrainOptions
from commands.saving import config_from_spec
from commands.train import train
from model.checkpoint.conversion import only_pooled
from model.checkpoint.families import read_spec
from model.checkpoint.weights import load_decoder
from model.spec import CheckpointError, OptionError
from server.config import EngineSettings, ServerSection, load
from server.engine import worker
from server.service import start_message
from tests.support.checkpoints import make_tokenizer
from tests.support.families import CONFIGS, make_family_checkpoint

CPU = torch.device("cpu")
GPT = {
    "n_embd": 48,
    "n_head": 3,
    "n_layer": 2,
    "n_positions": 64,
    "vocab_size": 301,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
LLAMA |= {"vocab_size": 301, "bos_token_id": 2, "eos_token_id": 0}
SOURCES: dict[str, dict[str, Any]] = {
    "gpt2": GPT,
    "gpt2 untied": GPT
    | {"tie_word_embeddings": False, "n_inner": 50, "activation_function": "gelu"},
    "gpt_bigcode": GPT | {"multi_query": False},
    "llama": LLAMA | {"num_key_value_heads": 2, "attention_bias": True},
    "mistral": LLAMA | {"num_key_value_heads": 4, "sliding_window": 7, "head_dim": 10},
    "gemma": LLAMA | {"num_key_value_heads": 4, "head_dim": 16},
}


@cache
def make_model(kind: str) -> Any:
    """A random model of `transformers`, every vector of it too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(kind))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind.split()[0], **SOURCES[kind]), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.ndim == 1 else 1.2 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    return model


def write(kind: str, folder: Path) -> Path:
    make_model(kind).save_pretrained(folder)
    make_tokenizer(vocab_size=300).save(str(folder / "tokenizer.json"))
    return folder


@torch.no_grad()
def averaged(kind: str) -> Any:
    """The same model with the mean of its key/value heads in the place of each."""
    model = deepcopy(make_model(kind))
    heads = SOURCES[kind].get("num_key_value_heads", 3)
    size = model.config.to_dict().get("head_dim") or 48 // SOURCES[kind].get("n_head", 4)
    for name, parameter in model.named_parameters():
        if ".c_attn." in name and kind.startswith("gpt2"):
            by_head = parameter.unflatten(-1, (3, heads, size))
            by_head[..., 1:, :, :] = by_head[..., 1:, :, :].double().mean(-2, keepdim=True).float()
        elif ".c_attn." in name:
            by_head = parameter.unflatten(0, (heads, 3, size))
            by_head[:, 1:] = by_head[:, 1:].double().mean(0).float()
        elif ".k_proj." in name or ".v_proj." in name:
            by_head = parameter.unflatten(0, (heads, size))
            by_head[:] = by_head.double().mean(0).float()
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def unmeasured(model: Path, output: Path) -> ConvertOptions:
    return ConvertOptions(model=model, output=output, evaluate=False)


@pytest.mark.parametrize("kind", SOURCES)
@torch.no_grad()
def test_a_pooled_model_is_the_original_with_averaged_heads(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source, output = write(kind, tmp_path / "source"), tmp_path / "output"
    convert(unmeasured(source, output))
    oracle, heads = averaged(kind), SOURCES[kind].get("num_key_value_heads", 3)
    ids_T = torch.randint(0, 301, (60,), generator=torch.Generator().manual_seed(0))
    expected_TV = oracle(ids_T[None]).logits[0]
    spec = read_spec(output)
    assert (
        decoder_logits(load_decoder(output, spec, torch.float32, CPU))(ids_T) - expected_TV
    ).abs().max() < 1e-4
    theirs = AutoModelForCausalLM.from_pretrained(
        output, attn_implementation="eager", dtype=torch.float32
    )
    assert (theirs(ids_T[None]).logits[0] - expected_TV).abs().max() < 1e-4
    wanted, size = dict(oracle.named_parameters()), spec.head_dim
    for name, value in tensors_of(output).items():
        original = (
            wanted[name].T
            if kind.startswith("gpt2") and value.ndim == 2 and (".attn." in name or ".mlp." in name)
            else wanted[name]
        )
        if ".c_attn." in name:
            first = (0, 48, 96) if kind.startswith("gpt2") else (0, size, 2 * size)
            rows = (
                original
                if kind.startswith("gpt2")
                else original.unflatten(0, (heads, 3, size)).transpose(0, 1).flatten(0, 2)
            )
            original = torch.cat(
                [rows[:48], *(original[begin : begin + size] for begin in first[1:])]
            )
        elif ".k_proj." in name or ".v_proj." in name:
            original = original[:size]
        assert torch.equal(value, original), name
    config = config_of(output)
    assert config["onehead_conversion"] == {
        "method": "mean_pool",
        "heads": heads,
        "uptrained_steps": 0,
    }
    assert (
        config["model_type"] == kind.split()[0].replace("gpt2", "gpt_bigcode")
        and (output / "tokenizer.json").is_file()
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_gpt2_as_first_published_in_two_pickles(legacy: bool, tmp_path: Path) -> None:
    source = write("gpt2", tmp_path / "source")
    convert(unmeasured(source, tmp_path / "wanted"))
    tensors = {
        name.removeprefix("transformer."): value for name, value in tensors_of(source).items()
    }
    tensors |= {"lm_head.weight": tensors["wte.weight"], "h.0.attn.masked_bias": torch.tensor(-1e4)}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    (source / "model.safetensors").unlink()
    weight_map = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        shard = {name: value for name, value in tensors.items() if weight_map[name] == file}
        torch.save(shard, source / file, _use_new_zipfile_serialization=not legacy)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(unmeasured(source, tmp_path / "output"))
    wanted, found = tensors_of(tmp_path / "wanted"), tensors_of(tmp_path / "output")
    assert wanted.keys() == found.keys() and all(
        torch.equal(wanted[name], found[name]) for name in wanted
    )
    (source / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"wte.weight": "../pytorch_model.bin"}})
    )
    with pytest.raises(
        CheckpointError, match=r"plain names of \.bin files, found .*\.\./pytorch_model"
    ):
        convert(unmeasured(source, tmp_path / "other"))


@pytest.mark.parametrize("family", ["falcon", "santacoder"])
def test_a_pickle_with_one_head_is_rewritten_and_not_marked(family: str, tmp_path: Path) -> None:
    source = make_family_checkpoint(family, 0, tmp_path / "source").folder
    output = tmp_path / "output"
    with pytest.raises(CheckpointError, match="has one key/value head already; nothing to convert"):
        convert(ConvertOptions(model=source, output=output))
    tensors = tensors_of(source)
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    convert(ConvertOptions(model=source, output=output))
    written = tensors_of(output)
    assert all(torch.equal(tensors[name], value) for name, value in written.items())
    assert (
        config_of(output) == config_of(source)
        and not (output / "conversion.json").exists()
        and only_pooled(output) is None
    )
    load_decoder(output, read_spec(output), torch.float32, CPU)


class Command:
    """What a pickle with code in it looks like."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_with_code_in_it_is_refused_unread(tmp_path: Path) -> None:
    source = write("gpt2", tmp_path / "source")
    tensors: dict[str, Any] = tensors_of(source)
    (source / "model.safetensors").unlink()
    torch.save(tensors | {"more": Command(tmp_path / "ran")}, source / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError,
        match=r"^[^\n]*/pytorch_model\.bin: expected weights and nothing else, "
        r"[^\n]*\(UnpicklingError\)$",
    ):
        convert(unmeasured(source, tmp_path / "output"))
    torch.save({"state_dict": tensors}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="expected tensors by name"):
        convert(unmeasured(source, tmp_path / "output"))
    assert not (tmp_path / "ran").exists() and not (tmp_path / "output").exists()


def change_config(folder: Path, **more: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | more))


def change_tensor(folder: Path, name: str, value: Tensor | None) -> None:
    tensors = tensors_of(folder) | ({} if value is None else {name: value})
    save_file(
        {key: tensor for key, tensor in tensors.items() if value is not None or key != name},
        folder / "model.safetensors",
    )


def pickled(folder: Path, **more: Tensor) -> Path:
    """The same folder with pytorch_model.bin; `more` by names with _ for the dots."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    named = {name.replace(".", "_"): name for name in (*tensors, "lm_head.weight")}
    torch.save(
        tensors | {named[key]: value for key, value in more.items()}, folder / "pytorch_model.bin"
    )
    return folder


def test_text_ids_and_dtype_of_gpt2_are_the_sources(tmp_path: Path) -> None:
    source = write("gpt2", tmp_path / "source")
    ids = {"eos_token_id": [5, 3], "bos_token_id": 7, "pad_token_id": 9, "dtype": "float32"}
    change_config(source, **ids)
    convert(unmeasured(source, tmp_path / "output"))
    assert config_of(tmp_path / "output").items() >= ids.items() and set(
        read_spec(tmp_path / "output").end_token_ids
    ) >= {3, 5}
    config = config_of(source)
    (source / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key not in ids})
    )
    convert(unmeasured(source, tmp_path / "without"))
    assert not config_of(tmp_path / "without").keys() & ids.keys()


def test_several_end_tokens_of_a_spec_are_written(tmp_path: Path) -> None:
    spec = replace(
        read_spec(make_family_checkpoint("santacoder", 0, tmp_path).folder), end_token_ids=(3, 5)
    )
    config = config_from_spec(spec)
    assert config["eos_token_id"] == [3, 5] and config["bos_token_id"] == 3


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("as_pickle", [False, True])
def test_a_tied_head_of_other_values_is_refused(
    as_pickle: bool, inner: bool, tmp_path: Path
) -> None:
    source = write("gpt2", tmp_path / "source")
    tensors = {
        name.removeprefix("transformer.") if inner else name: value
        for name, value in tensors_of(source).items()
    }
    embedding = "wte.weight" if inner else "transformer.wte.weight"
    for change, refused in ((0.0, False), (1.0, True)):
        head = tensors[embedding].clone()
        head[3, 3] += change
        save_file(tensors | {"lm_head.weight": head}, source / "model.safetensors")
        if as_pickle:
            pickled(source)
        if refused:
            with pytest.raises(
                CheckpointError,
                match=f"lm_head.weight differs from {embedding}, to which config.json ties it",
            ):
                convert(unmeasured(source, tmp_path / "refused"))
        else:
            convert(unmeasured(source, tmp_path / "output"))
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.tensor([math.nan] * 48),
            r"pytorch_model\.bin: transformer\.ln_f\.bias holds NaN or infinity",
        ),
        (
            torch.tensor([math.inf] * 48),
            r"pytorch_model\.bin: transformer\.ln_f\.bias holds NaN or infinity",
        ),
        (
            torch.ones(48).to_sparse(),
            r"ln_f\.bias has dtype torch\.float32 and layout torch\.sparse_coo, expected dense F64",
        ),
        (
            torch.ones(48, device="meta"),
            r"ln_f\.bias has dtype torch\.float32 and layout torch\.strided on meta, expected "
            r"dense F64",
        ),
    ],
)
def test_a_pickles_values_are_numbers(value: Tensor, message: str, tmp_path: Path) -> None:
    source = pickled(write("gpt2", tmp_path / "source"), transformer_ln_f_bias=value)
    with pytest.raises(CheckpointError, match=message):
        convert(unmeasured(source, tmp_path / "output"))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_half_written_leaves_nothing_in_the_way(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = write("gpt2", tmp_path / "source"), tmp_path / "output"

    def fail(_: Path, made: Path) -> None:
        assert (made / "model.safetensors").exists() and not output.exists()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(convert_tool, "copy_companions", fail)
        with pytest.raises(OptionError if isinstance(error, OSError) else KeyboardInterrupt):
            convert(unmeasured(source, output))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    output.mkdir()
    convert(unmeasured(source, output))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["output", "source"]
    assert output.stat().st_mode == source.stat().st_mode


MARKS = tuple(f"<{i}>" for i in range(46))
FALCON = CONFIGS["falcon"][0] | {"multi_query": False}
REFUSALS: dict[str, tuple[str, Any, str]] = {
    "family": (
        "llama",
        lambda f: change_config(f, model_type="qwen2"),
        r"model_type is 'qwen2'; supported: .*heads are pooled of gpt2",
    ),
    "falcon": (
        "llama",
        lambda f: (f / "config.json").write_text(json.dumps(FALCON)),
        r"71 key/value heads.*model_type 'falcon'; heads are",
    ),
    "own": (
        "llama",
        lambda f: change_config(f, num_key_value_heads=1, rope_parameters={"rope_type": "what"}),
        r"^[^\n]*what((?!pooled).)*$",
    ),
    "heads": (
        "llama",
        lambda f: change_config(f, num_key_value_heads=3),
        r"a divisor of num_attention_heads 4, found 3",
    ),
    "scale": (
        "gpt2",
        lambda f: change_config(f, scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx is True",
    ),
    "fused": (
        "gpt_bigcode",
        lambda f: change_config(f, n_head=4, n_embd=64),
        r"c_attn\.\w+ has shape .*, expected 192 rows for 4",
    ),
    "rows": (
        "llama",
        lambda f: change_config(f, num_key_value_heads=4),
        r"_proj\.\w+ has shape \[24.*, expected 48 rows for 4",
    ),
    "shape": (
        "gpt2",
        lambda f: change_tensor(f, "transformer.wpe.weight", torch.ones(3, 48)),
        r"wpe\.weight has shape \[3, 48\], expected",
    ),
    "missing": (
        "llama",
        lambda f: change_tensor(f, "model.norm.weight", None),
        r"source: missing tensor model\.norm\.weight",
    ),
    "more": (
        "mistral",
        lambda f: change_tensor(f, "model.new.weight", torch.ones(2)),
        r"unexpected tensor model\.new\.weight",
    ),
    "twice": (
        "gpt2",
        lambda f: change_tensor(f, "wpe.weight", torch.ones(64, 48)),
        "with and without `transformer.`",
    ),
    "dtype": (
        "llama",
        lambda f: change_tensor(f, "model.norm.weight", torch.ones(48, dtype=torch.int8)),
        "has dtype I8, expected one of",
    ),
    "weights": (
        "llama",
        lambda f: (f / "model.safetensors").unlink(),
        r"expected model\.safetensors or pytorch_model\.bin",
    ),
    "tokens": (
        "llama",
        lambda f: make_tokenizer(MARKS, 310).save(str(f / "tokenizer.json")),
        "ids up to 30., expected less than the vocab",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals_name_what_was_found_and_expected(what: str, tmp_path: Path) -> None:
    kind, damage, message = REFUSALS[what]
    source = write(kind, tmp_path / "source")
    damage(source)
    with pytest.raises(CheckpointError, match=message):
        convert(ConvertOptions(model=source, output=tmp_path / "output", evaluate=what == "tokens"))
    assert not (tmp_path / "output").exists()


def test_the_command_refuses_with_its_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write("llama", tmp_path / "source"), tmp_path / "output"
    command = ["convert", "--model", str(source), "--output", str(output), "--no-evaluate"]
    assert cli.main(command) == 0 and "onehead train --init" in capsys.readouterr().out
    assert (
        cli.main(command) == 2
        and f"output {output} exists, expected a new or empty folder" in capsys.readouterr().err
    )
    assert cli.main(["convert", "--model", str(output), "--output", str(tmp_path / "x")]) == 78
    assert (
        cli.main(["convert", "--model", str(tmp_path / "nowhere"), "--output", str(tmp_path / "x")])
        == 78
    )
    (tmp_path / "file").write_text("")
    for more, message in (
        (["--threads", "-3"], "threads: Input should be greater than or equal to 0"),
        (["--threads", "5000"], "threads: Input should be less than or equal to 1024"),
        (["--data", str(tmp_path)], f"data {tmp_path} has no effect with --no-evaluate"),
        (["--output", "/proc/x"], "output /proc/x cannot be made: "),
        (["--output", str(tmp_path / "file" / "x")], "x cannot be made: "),
    ):
        given = ["--model", str(source), "--output", str(tmp_path / "x"), "--no-evaluate", *more]
        arguments = given if "--output" not in more else [*given[:2], *given[4:]]
        assert cli.main(["convert", *arguments]) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["convert", "train"])
def test_the_help_is_for_users(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert f"onehead {command}: " in shown and "Raises" not in shown and "OptionError" not in shown


# --- losses, serving, training


@dataclass(frozen=True)
class Pooled:
    """A converted folder and the corpus its losses were measured on."""

    folder: Path
    source: Path
    data: Path

    def training(self, work: Path, **more: Any) -> TrainOptions:
        given: dict[str, Any] = {
            "init": self.folder,
            "data": (str(self.data),),
            "work": work / "work",
            "steps": 2,
            "warmup_steps": 1,
            "threads": 1,
        }
        sizes = {
            "sequence": 16,
            "batch_tokens": 64,
            "long_share": 0.5,
            "save_every": 1,
            "learning_rate": 1e-3,
        }
        return TrainOptions(output=work / "trained", **(given | sizes | more))


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for i in range(60):
        (folder / f"module_{i}.py").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 4)
    return folder


def make_pooled(kind: str, data: Path, folder: Path) -> Pooled:
    source = write(kind, folder / "source")
    convert(ConvertOptions(model=source, output=folder / "pooled", data=data))
    return Pooled(folder / "pooled", source, data)


@pytest.fixture(scope="module")
def pooled(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Pooled:
    return make_pooled("gpt2", corpus_folder, tmp_path_factory.mktemp("pooled"))


def record_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "conversion.json").read_text())
    return record


def test_the_record_holds_both_losses(pooled: Pooled) -> None:
    from commands import corpus
    from commands.held_out import comparison_rows, losses

    record = record_of(pooled.folder)
    assert (
        record["source"] == str(pooled.source)
        and record["kind"] == "3 key/value heads pooled into 1"
        and record["uptrained"] is None
    )
    spec = read_spec(pooled.folder)
    rows_BU = comparison_rows(
        corpus.read_documents(pooled.data), corpus.read_tokenizer(pooled.folder, 301), spec
    )
    assert rows_BU.shape[1] == spec.max_positions + 1 and record["held_out"]["sequences"] == len(
        rows_BU
    )
    for stage, model in (("before", make_model("gpt2")), ("pooled", averaged("gpt2"))):
        each = list(losses(lambda ids_T, model=model: model(ids_T[None]).logits[0], rows_BU))
        assert record["losses"][stage] == pytest.approx(sum(each) / len(each), abs=1e-4)


def test_without_a_tokenizer_there_are_no_losses_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write("llama", tmp_path / "source")
    (source / "tokenizer.json").unlink()
    convert(ConvertOptions(model=source, output=tmp_path / "output"))
    assert "no tokenizer.json, so the held-out loss is not measured" in capsys.readouterr().out
    assert record_of(tmp_path / "output")["losses"] is None
    assert (
        only_pooled(tmp_path / "output")
        == f"{tmp_path / 'output'}: its 2 key/value heads were averaged into one, and the model "
        "was not trained since"
    )


def load_worker(folder: Path) -> Any:
    settings = load(
        EngineSettings,
        ["--model", str(folder), "--cache.pages", "4", "--engine.threads", "1"],
        "onehead",
    )
    return worker.load(start_message(settings, ServerSection()), lambda *_: None)


def test_only_pooled_is_served_with_a_warning(
    pooled: Pooled, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "onehead"):
        assert load_worker(pooled.folder)
    fact = f"{pooled.folder}: its 3 key/value heads were averaged into one, and the model was not"
    way_out = f"`onehead train --init {pooled.folder} --output NEW` trains it"
    assert f"{fact} trained since; {way_out}" in caplog.messages


@pytest.mark.parametrize("value", [{}, {"uptrained_steps": -1}, {"uptrained_steps": "many"}, []])
def test_a_mark_that_says_nothing_is_refused(value: Any, pooled: Pooled, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(config_of(pooled.folder) | {"onehead_conversion": value})
    )
    with pytest.raises(CheckpointError, match="onehead_conversion"):
        only_pooled(tmp_path)


def test_training_goes_on_from_it(
    pooled: Pooled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = pooled.training(tmp_path)
    train.train(options)
    record, config = record_of(options.output), config_of(options.output)
    assert (
        record["losses"] == record_of(pooled.folder)["losses"] and record["uptrained"]["steps"] == 2
    )
    assert record["uptrained"]["loss"] < record["losses"]["pooled"]
    shown = capsys.readouterr().out
    assert all(
        text in shown
        for text in (
            "as it came",
            "pooled",
            "trained since for 2 steps",
            f"{record['uptrained']['loss']:.4f}",
        )
    )
    assert (
        config["onehead_conversion"]["uptrained_steps"] == 2
        and config["model_type"] == "gpt_bigcode"
    )
    before, after = tensors_of(pooled.folder), tensors_of(options.output)
    assert before.keys() == after.keys() and not any(
        torch.equal(before[name], after[name]) for name in before
    )
    assert load_worker(options.output)
    train.train(
        options.model_copy(
            update=dict(
                init=options.output, output=tmp_path / "again", work=tmp_path / "work2", steps=1
            )
        )
    )
    assert config_of(tmp_path / "again")["onehead_conversion"]["uptrained_steps"] == 3
    with pytest.raises(
        OptionError, match=r"other options \(init .*pooled then, .*trained now, sha256 of"
    ):
        train.train(options.model_copy(update=dict(init=options.output, output=tmp_path / "other")))


def test_a_state_of_other_weights_in_the_same_folder_is_not_resumed(
    pooled: Pooled, tmp_path: Path
) -> None:
    init = Path(shutil.copytree(pooled.folder, tmp_path / "init"))
    options = pooled.training(tmp_path).model_copy(update=dict(init=init))
    train.train(options)
    written = tensors_of(options.output)
    # The state is done; the same weights come out.
    train.train(options.model_copy(update=dict(output=tmp_path / "again")))
    assert all(
        torch.equal(value, written[name]) for name, value in tensors_of(tmp_path / "again").items()
    )
    (init / "SHA256SUMS").unlink()  # Says nothing that the weights do not.
    train.train(options.model_copy(update=dict(output=tmp_path / "third")))
    change_tensor(init, "transformer.ln_f.bias", torch.ones(48))
    with pytest.raises(
        OptionError,
        match=r"other options \(sha256 of the files of init [0-9a-f]{64} then, [0-9a-f]{64} now\)",
    ):
        train.train(options.model_copy(update=dict(output=tmp_path / "other")))
    shutil.copyfile(pooled.folder / "model.safetensors", init / "model.safetensors")
    change_config(init, layer_norm_epsilon=1e-3)
    with pytest.raises(OptionError, match="sha256 of the files of init"):
        train.train(options.model_copy(update=dict(output=tmp_path / "other")))


def test_losses_of_other_sequences_are_not_compared(
    pooled: Pooled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in pooled.data.iterdir():
        (other / path.name).write_text(path.read_text().replace("function", "method"))
    options = pooled.training(tmp_path, data=(str(other),))
    train.train(options)
    assert "of other sequences than this --data gives" in capsys.readouterr().out
    assert record_of(options.output)["uptrained"] == {"steps": 2, "loss": None}


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3", "gemma3_text", "minicpm3"])
@torch.no_grad()
def test_attention_without_a_cache_knows_windows_and_latents(family: str, tmp_path: Path) -> None:
    checkpoint = make_family_checkpoint(family, 0, tmp_path)
    decoder = load_decoder(tmp_path, read_spec(tmp_path), torch.float32, CPU)
    ids_T = torch.randint(3, 300, (50,), generator=torch.Generator().manual_seed(0))
    assert (
        decoder_logits(decoder)(ids_T) - checkpoint.oracle(ids_T[None]).logits[0]
    ).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3", "gemma3_text", "santacoder"])
def test_any_one_head_family_can_be_trained_further(
    family: str, pooled: Pooled, tmp_path: Path
) -> None:
    source = make_family_checkpoint(family, 0, tmp_path / "source").folder
    options = pooled.training(tmp_path, steps=1).model_copy(
        update=dict(init=source, sequence=40, long_share=0.0)
    )
    train.train(options)
    before, after = tensors_of(source), tensors_of(options.output)
    assert after.keys() == {
        name for name in before if not name.endswith((".attn.bias", ".attn.masked_bias"))
    }
    assert sum(torch.equal(before[name], after[name]) for name in after) <= sum(
        "gate" in name or "experts" in name for name in after
    )
    assert (
        config_of(options.output) == config_of(source) | {"dtype": "float32"}
        and not (options.output / "conversion.json").exists()
    )
    load_decoder(options.output, read_spec(options.output), torch.float32, CPU)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"hidden_size": 48}, "hidden_size 48 applies to a new model only"),
        ({"attention": "multi_head"}, "attention multi_head applies to a new model only"),
        ({"max_positions": 64}, "max_positions 64 applies to a new model only"),
        ({"sequence": 65}, "sequence 65 is longer than the positions of .*; give --sequence 64"),
        ({"fim_rate": 0.1}, "fim_rate 0.1 needs the tokens <fim_prefix>"),
    ],
)
def test_options_that_a_checkpoint_answers_are_refused(
    more: dict[str, Any], message: str, pooled: Pooled, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train.train(pooled.training(tmp_path, **more))
    with pytest.raises(OptionError, match="is the folder of init"):
        train.train(pooled.training(tmp_path).model_copy(update=dict(output=pooled.folder)))
