"""`onehead compare`: counted bytes, measurements on toy sizes, and a report that holds them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from commands.compare import compare, timing, twins
from commands.options import CompareOptions, PlanOptions
from commands.plan import make_plan
from commands.train.twin import MultiHeadDecoder, equal_mlp
from model.checkpoint.families import read_spec
from model.decoder import Decoder
from model.spec import OptionError
from tests.support import families
from tests.support.paths import MODELS


def test_cache_bytes_of_published_models() -> None:
    rows = {row["name"]: row for row in compare.memory_of(None)}
    assert {
        name: (row["mqa_bytes_per_token"], row["mha_bytes_per_token"]) for name, row in rows.items()
    } == {
        "starcoderbase-1b": (12_288, 196_608),
        "starcoder": (20_480, 983_040),
        "falcon-7b": (8_192, 581_632),
        "gemma-2b": (18_432, 147_456),
    }
    assert (
        rows["starcoder"]["mqa_bytes_per_sequence"] == 20_480 * 8192
        and rows["starcoder"]["ratio"] == 48
    )


CONFIGS = {
    f"{family}-{number}": config
    for family, configs in families.CONFIGS.items()
    for number, config in enumerate(configs)
}
CONFIGS |= {path.parent.name: json.loads(path.read_text()) for path in MODELS.glob("*/config.json")}


@pytest.mark.parametrize("name", CONFIGS)
def test_compare_and_plan_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    """For every family, latent attention too, and every published config."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    row = compare.memory_of(tmp_path)[-1]
    planned = make_plan(PlanOptions(model=tmp_path, memory=1e12, device="cuda")).kv_bytes_per_token[
        "bfloat16"
    ]
    assert (row["mqa_bytes_per_token"], row["mha_bytes_per_token"]) == (
        planned["multi_query"],
        planned["multi_head"],
    )


def modules(folder: Path) -> Path:
    """A small corpus, some of whose modules are held out."""
    folder.mkdir()
    for i in range(60):
        (folder / f"module_{i}.py").write_text(f"def function_{i}(x):\n    return x + {i}\n" * 8)
    return folder


@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "mlp"),
    [(192, 6, 768), (128, 8, 512), (48, 3, 100), (1024, 8, 4096)],
)
def test_twins_have_equally_many_parameters(hidden_size: int, num_heads: int, mlp: int) -> None:
    head_dim = hidden_size // num_heads
    spec = replace(read_spec(MODELS / "tiny_starcoder_py"), vocab_size=50, num_layers=2)
    spec = replace(spec, hidden_size=hidden_size, num_query_heads=num_heads, head_dim=head_dim)
    spec = replace(spec, max_positions=8)
    counts = []
    for kind, width in ((MultiHeadDecoder, mlp), (Decoder, equal_mlp(hidden_size, num_heads, mlp))):
        with torch.device("meta"):
            counts.append(
                sum(p.numel() for p in kind(replace(spec, intermediate_size=width)).parameters())
            )
    # Half a unit of width in each layer.
    assert abs(counts[0] - counts[1]) <= spec.num_layers * (hidden_size + 1)


def test_a_cut_twin_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small = twins.TwinSizes(
        hidden_size=16,
        num_layers=1,
        num_heads=4,
        steps=6,
        batch_tokens=64,
        sequence=16,
        num_seeds=1,
    )
    data = modules(tmp_path / "data")
    *_, whole = twins.train_twin(small, "mha", 3, tmp_path / "whole", data)
    for result in twins.train_twin(small, "mha", 3, tmp_path / "cut", data):
        if len(result["losses"]) == 4:
            break
    *_, resumed = twins.train_twin(small, "mha", 3, tmp_path / "cut", data)
    *_, again = twins.train_twin(small, "mha", 3, tmp_path / "cut", data)
    assert resumed == whole == again


@pytest.mark.nightly
def test_the_whole_command_on_toy_sizes(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(timing, "PAPER", {"d": 32, "h": 4, "k": 8, "mha_ff": 64, "mqa_ff": 88})
    small = twins.TwinSizes(
        hidden_size=16,
        num_layers=1,
        num_heads=4,
        steps=6,
        batch_tokens=64,
        sequence=16,
        num_seeds=2,
    )
    monkeypatch.setattr(twins, "QUICK", small)
    options = CompareOptions(
        output=tmp_path / "report", quick=True, model=tiny_folder, data=modules(tmp_path / "data")
    )
    compare.compare(options)
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert results["memory"][-1]["name"] == tiny_folder.name
    for row in results["decode"]:
        most = 2 * row["batch"] * 4 * row["context"] * 8 * 4
        assert row["mha_kv_bytes"] == 4 * row["mqa_kv_bytes"] == most
    quality = results["quality"]
    assert [(run["kind"], run["seed"]) for run in quality["runs"]] == [
        ("mha", 0),
        ("mqa", 0),
        ("mha", 1),
        ("mqa", 1),
    ]
    assert all(len(run["losses"]) == 6 and run["held_out"][-1][0] == 6 for run in quality["runs"])
    last = {(run["kind"], run["seed"]): run["held_out"][-1][1] for run in quality["runs"]}
    assert quality["difference"]["by_seed"] == [
        last["mqa", seed] - last["mha", seed] for seed in (0, 1)
    ]
    printed = capsys.readouterr()
    assert all(title in printed.out for title in ("bytes of a token", "a layer's decode", "twins"))
    told = printed.err
    assert told.count("read 60 files, ") == 1 and "quality: mqa, seed 1, step 6/6" in told


def test_data_without_text_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(compare, "_measure", lambda *_: pytest.fail("it measured"))
    with pytest.raises(OptionError, match="holds no text"):
        compare.compare(CompareOptions(output=tmp_path / "report", data=tmp_path / "data"))


def test_an_output_that_cannot_be_made_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compare, "_measure", lambda *_: pytest.fail("it measured"))
    with pytest.raises(OptionError, match="cannot be made"):
        compare.compare(CompareOptions(output=tmp_path / "file" / "report", quick=True))
