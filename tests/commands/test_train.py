"""The trainer: it learns, resumes to the same bits, splits by name, rearranges without losing a
character; its folder serves anywhere.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from commands import corpus
from commands.held_out import decoder_logits
from commands.options import OF_A_NEW_MODEL, TrainOptions, data_folder, load_options
from commands.pictures import MISSING
from commands.train import train
from commands.train.data import Corpus, Data
from commands.train.export import export
from commands.train.state import TrainState
from model.checkpoint.families import read_spec
from model.spec import CheckpointError, OptionError
from server.errors import UsageError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small modules, some of which are held out."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for i in range(60):
        names = [rng.choice(["alpha", "beta", "gamma"]) for _ in range(12)]
        (folder / f"module_{i}.py").write_text(
            "".join(f"def {name}(x):\n    return x + {k}\n\n\n" for k, name in enumerate(names))
        )
    return folder


@pytest.fixture
def options(data: Path, tmp_path: Path) -> TrainOptions:
    return TrainOptions(
        output=tmp_path / "out",
        data=(str(data),),
        work=tmp_path / "work",
        vocab_size=300,
        hidden_size=32,
        num_layers=2,
        num_query_heads=2,
        max_positions=128,
        steps=24,
        batch_tokens=256,
        sequence=32,
        long_share=0.25,
        warmup_steps=4,
        threads=1,
        save_every=8,
    )


PREPARING = "onehead train: preparing the corpus, the tokenizer and the model\n"
KEPT = "; the state of step {} is kept in {}, and the same command continues from it\n"


def interrupted_after(count: int) -> Callable[..., None]:
    """take_step, under Ctrl-C in place of its step number `count` + 1."""
    take_step, taken = train.take_step, 0

    def take_one(*arguments: object) -> None:
        nonlocal taken
        if taken == count:
            raise KeyboardInterrupt
        taken += 1
        take_step(*arguments)  # type: ignore[arg-type]

    return take_one


def test_the_bar_shows_losses_from_when_there_are_any() -> None:
    shown = [
        train.figures(state)
        for state in (
            TrainState(0, [], []),
            TrainState(1, [5.0], []),
            TrainState(8, [4.0], [(8, 4.5)]),
        )
    ]
    assert shown == ["", "loss 5.000 nats/token", "loss 4.000, held-out 4.500 nats/token"]


def test_it_learns_and_a_resumed_run_is_the_run_that_was_not_stopped(
    options: TrainOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train.train(options)
    whole = load_file(options.output / "model.safetensors")
    stopped = options.model_copy(update=dict(output=tmp_path / "resumed", work=tmp_path / "work2"))
    for steps, words in (
        (5, "before the first save at step 8: nothing is kept\n"),
        (20, KEPT),
        (1, KEPT),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(train, "take_step", interrupted_after(steps))
            with pytest.raises(KeyboardInterrupt):
                train.train(stopped)
        assert words.format(16, stopped.work) in capsys.readouterr().err
    train.train(stopped)
    resumed = load_file(stopped.output / "model.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    with pytest.raises(
        ValueError, match=r"belongs to a run of other options \(seed 0 then, 1 now\)"
    ):
        train.train(stopped.model_copy(update=dict(seed=1)))
    state = json.loads(_metadata(options.work / "state.safetensors")["state"])
    assert state["losses"][-1] < 0.8 * state["losses"][0] and [
        step for step, _ in state["held_out"]
    ] == [8, 16, 24]
    assert (options.output / "loss.svg").read_text().count("<svg") == 1


def test_an_interruption_before_the_first_step_says_so(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "commands.corpus.read_documents", lambda _: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        train.train(options)
    assert (
        capsys.readouterr().err
        == f"{PREPARING}onehead train: interrupted before the first step: nothing is kept\n"
    )


def test_a_missing_folder_of_data_is_named(options: TrainOptions, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"^data {tmp_path}/none: no such folder or file$"):
        train.train(options.model_copy(update=dict(data=(str(tmp_path / "none"),))))


def test_without_matplotlib_everything_but_the_picture_is_written(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train.train(options.model_copy(update=dict(steps=8)))
    whole = {path.name for path in options.output.iterdir()}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    other = options.model_copy(
        update=dict(
            steps=8, output=options.output.parent / "bare", work=options.work.parent / "bare work"
        )
    )
    capsys.readouterr()
    train.train(other)
    assert whole - {path.name for path in other.output.iterdir()} == {"loss.svg"}
    assert f"onehead train: loss.svg will not be written: {MISSING}\n" in capsys.readouterr().err
    sizes = {name: TrainOptions.model_fields[name].default for name in OF_A_NEW_MODEL}
    train.train(
        options.model_copy(
            update=dict(
                init=other.output,
                output=options.output.parent / "further",
                work=options.work.parent / "w",
                **sizes,
            )
        )
    )
    assert (options.output.parent / "further" / "model.safetensors").exists()


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def test_the_folder_is_an_ordinary_checkpoint(options: TrainOptions) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train.train(options.model_copy(update=dict(steps=8)))
    spec = read_spec(options.output)
    tokenizer = AutoTokenizer.from_pretrained(options.output)
    assert tokenizer.eos_token_id in spec.end_token_ids and tokenizer.eos_token == corpus.END
    model = AutoModelForCausalLM.from_pretrained(options.output)
    assert model.config.n_positions == 128 and model.dtype is torch.bfloat16
    ids = tokenizer("<fim_prefix>def a<fim_suffix>x<fim_middle>")["input_ids"]
    assert len(set(tokenizer.all_special_ids) & set(ids)) == 3
    assert (
        tokenizer.decode(tokenizer("def f(x):\n    return 10")["input_ids"])
        == "def f(x):\n    return 10"
    )


def test_the_multi_head_twin_is_transformers_and_is_refused_by_name(options: TrainOptions) -> None:
    from transformers import AutoModelForCausalLM

    options = options.model_copy(update=dict(steps=8, attention="multi_head", intermediate_size=40))
    training = train.Training(options)
    for _ in training.run():
        pass
    export(options, training.decoder, training.tokenizer, training.state)
    model = AutoModelForCausalLM.from_pretrained(options.output, dtype=torch.float32)
    assert model.config.multi_query is False
    decoder = training.decoder.to(torch.bfloat16).float()
    ids_T = torch.randint(
        0, decoder.spec.vocab_size, (40,), generator=torch.Generator().manual_seed(0)
    )
    with torch.inference_mode():
        ours_TV = decoder_logits(decoder)(ids_T)
        theirs_TV = model(ids_T[None]).logits[0]
    assert torch.allclose(ours_TV, theirs_TV, atol=1e-5)
    with pytest.raises(
        CheckpointError, match=r"multi_query is False, so there are 2 key/value heads"
    ):
        read_spec(options.output)


def test_unusable_options_are_refused(options: TrainOptions) -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        train.train(options.model_copy(update=dict(num_query_heads=3)))
    with pytest.raises(ValueError, match="fewer than one batch"):
        train.train(options.model_copy(update=dict(batch_tokens=10**7)))


def test_an_output_that_cannot_be_made_is_known_before_the_first_step(
    options: TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "take_step", None)
    (options.output.parent / "file").write_text("")
    for output in (
        Path("/proc/x"),
        options.output.parent / "file",
        options.output.parent / "file" / "x",
    ):
        with pytest.raises(OptionError, match=f"{output} cannot be made: "):
            train.train(options.model_copy(update=dict(output=output)))


def test_the_learning_rate_of_a_trained_model_is_lower(tmp_path: Path) -> None:
    assert (
        TrainOptions(output=tmp_path).learning_rate
        == TrainOptions(output=tmp_path, learning_rate=2e-3).learning_rate
        == 2e-3
    )
    assert TrainOptions(output=tmp_path, init=tmp_path).learning_rate == 5e-4
    assert TrainOptions(output=tmp_path, init=tmp_path, learning_rate=1e-3).learning_rate == 1e-3
    with pytest.raises(ValueError, match="learning_rate"):
        TrainOptions(output=tmp_path, learning_rate=-1.0)


def test_the_split_is_by_name_alone(data: Path) -> None:
    documents = corpus.read_documents(data)
    held_out = {document.name for document in documents if document.held_out}
    assert 0 < len(held_out) < 15
    assert held_out == {d.name for d in (replace(d, text="other") for d in documents) if d.held_out}


def test_the_standard_library_without_packages_and_machine_paths() -> None:
    names = {document.name for document in corpus.read_documents(None)}
    assert {"asyncio", "asyncio.base_events", "argparse"} <= names
    assert not any("site-packages" in name or "_sysconfigdata" in name for name in names)


def test_fim_pieces_hold_every_character_once() -> None:
    rng = random.Random(0)
    for seed in range(200):
        text = "".join(rng.choice("ab\n") for _ in range(rng.choice([1, 5, 3000, 9000])))
        rebuilt = ""
        for piece in corpus.fim_pieces(text, random.Random(seed)):
            assert len(piece) <= corpus.FIM_PIECE_CHARS + 60
            prefix, rest = piece.removeprefix(corpus.FIM_PREFIX).split(corpus.FIM_SUFFIX)
            suffix, middle = rest.split(corpus.FIM_MIDDLE)
            rebuilt += prefix + middle + suffix
        assert rebuilt == text


def test_sequences_overlap_by_one_and_cover_the_stream() -> None:
    stream = np.arange(1000, dtype=np.uint16)
    rows = corpus.sequences(stream, 32, seed=3)
    assert rows.shape[1] == 33 and (np.diff(rows.astype(int), axis=1) == 1).all()
    starts = sorted(int(row[0]) for row in rows)
    assert (
        np.diff(starts).tolist() == [32] * (len(starts) - 1)
        and starts[0] < 32
        and starts[-1] > 1000 - 66
    )


def test_rows_begin_with_documents_that_begin_in_their_first_quarter() -> None:
    stream, ends = np.arange(1000), np.array([40, 335, 900])
    stream[ends] = -9
    moved = 0
    for seed in range(20):
        plain, rows = corpus.sequences(stream, 64, seed), corpus.sequences(stream, 64, seed, -9)
        for start, begin in zip(plain[:, 0], rows[:, 0], strict=True):
            near = [end + 1 for end in ends if start <= end + 1 < start + 16]
            assert start == -9 or begin == (near or [start])[0]
            moved += bool(near)
    assert moved > 10


def test_digits_stand_alone_and_nothing_is_unknown(data: Path) -> None:
    tokenizer: Tokenizer = corpus.train_tokenizer(iter(["return 1234 + x\n"] * 50), 400)
    assert [tokenizer.decode([id]) for id in tokenizer.encode("1234").ids] == ["1", "2", "3", "4"]
    assert tokenizer.decode(tokenizer.encode("∑ 漢\x00").ids) == "∑ 漢\x00"
    with pytest.raises(ValueError, match="no token"):
        corpus.token_id(tokenizer, "<nothing>")


def test_every_position_is_trained_from_the_start(options: TrainOptions, data: Path) -> None:
    documents = Corpus(options)
    tokenizer = corpus.train_tokenizer((d.text for d in documents.training), 300)
    options.work.mkdir()
    first, lengths = [], []
    for step in Data(options, train.build_spec(options, tokenizer), documents, tokenizer).steps(0):
        first += step.first_position_B.tolist()
        lengths.append(step.rows_BU.shape[1] - 1)
        assert (step.first_position_B + lengths[-1] <= 128).all()
    assert lengths == [32] * 18 + [128] * 6
    assert first.count(0) > 50 and max(first) > 60


def test_folders_are_weighted_and_learn_nothing_that_is_held_out(
    options: TrainOptions, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    held_out = next(document for document in corpus.read_documents(data) if document.held_out)
    for name, text in (("a", "x = 1\n"), ("b", "x = 2\n"), ("copy", held_out.text)):
        (tmp_path / "more" / f"{name}.py").write_text(text)
    documents = Corpus(
        options.model_copy(update=dict(data=(f"{tmp_path / 'more'}=2.5", f"{data}=1")))
    )
    (more, plain), epoch = documents.sources, documents.epoch(seed=7)
    assert {document.name for document in more.documents} == {
        "a",
        "b",
    } and held_out in documents.held_out
    assert len(epoch) == 5 + len(plain.documents) and {
        epoch.count(document) for document in more.documents
    } == {2, 3}
    assert epoch == documents.epoch(seed=7)


def test_answers_that_repeat_are_learnt(options: TrainOptions, tmp_path: Path) -> None:
    lines = [{"prompt": f"question {i}: ", "completion": "yes"} for i in range(200)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    documents = Corpus(options.model_copy(update=dict(data=(str(tmp_path / "asked.jsonl"),))))
    assert len(documents.held_out) + len(documents.training) == 200 and documents.held_out


@pytest.mark.parametrize("text", ["folder=", "folder=much", "folder=0", "folder=nan", "a=b"])
def test_a_weight_that_is_no_weight_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=f"^data {text}: the weight '.*' is not a number from 0.01 to 1000$"
    ):
        data_folder(text)
    with pytest.raises(UsageError, match=f"data {text}: the weight"):
        load_options(
            TrainOptions, ["--output", str(tmp_path), "--data", f"stdlib,{text}"], "onehead train"
        )


def test_the_table_of_data_names_licences(
    options: TrainOptions, data: Path, tmp_path: Path
) -> None:
    listed = tmp_path / "listed"
    (listed / "one").mkdir(parents=True)
    (listed / "one" / "a.py").write_text("x = 1\n")
    (data / "LICENSE.md").write_text("as you like\n")
    Corpus(options.model_copy(update=dict(data=(f"{listed}=3", str(data))))).write_table(tmp_path)
    Corpus(options.model_copy(update=dict(data=(str(listed), str(data))))).write_table(
        options.work.parent, tmp_path
    )
    text = (tmp_path / "DATA.md").read_text()
    assert "| listed | 3 | 1 | 6 | not stated: no licence file at the top of the folder |\n" in text
    assert "| LICENSE.md |\n" in text and text.count("| data |") == 2


def test_tokens_are_made_once(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, made = Corpus(options), []
    tokenizer = corpus.train_tokenizer((d.text for d in documents.training), 300)
    options.work.mkdir()
    token_stream = corpus.token_stream
    monkeypatch.setattr(
        "commands.corpus.token_stream",
        lambda *arguments: made.append(0) or token_stream(*arguments),
    )
    spec = train.build_spec(options, tokenizer)
    long_run = options.model_copy(update=dict(steps=600))
    first, second = (list(Data(long_run, spec, documents, tokenizer).steps(0)) for _ in range(2))
    assert len(made) == len(list(options.work.glob("tokens-*.npy"))) == 4
    assert all(
        np.array_equal(one.rows_BU, other.rows_BU) for one, other in zip(first, second, strict=True)
    )
    list(
        Data(
            options,
            spec,
            documents,
            corpus.train_tokenizer((d.text for d in documents.training), 265),
        ).steps(0)
    )
    assert len(made) > 4
