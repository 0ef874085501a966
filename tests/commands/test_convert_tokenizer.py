"""`onehead convert` without --output: older tokenizer files become a tokenizer.json that reads text
as they do.
"""

import base64
import errno
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from commands import cli
from commands.convert import tokenizer
from commands.convert.tokenizer import convert, tokenizer_json, write_tokenizer
from model.spec import CheckpointError
from server.errors import ConfigurationError
from server.hub.tokenizer_file import tokenizer_path
from server.text.codec import TextCodec
from tests.support.checkpoints import make_tokenizer

TEXTS = ("def f(x):\n    return x", "  two spaces, and at the end ", "é 漢字 😀", "12345", "")
GPT2 = {
    "tokenizer_class": "GPT2Tokenizer",
    "eos_token": "<|endoftext|>",
    "bos_token": "<|endoftext|>",
}
LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
}
needs_sentencepiece = pytest.mark.skipif(
    not (importlib.util.find_spec("sentencepiece") and importlib.util.find_spec("google")),
    reason="takes sentencepiece and protobuf",
)


def byte_level(folder: Path, model_type: str, described: dict[str, Any] | None = None) -> Path:
    """A folder with the vocab.json and merges.txt of the tests' tokenizer."""
    folder.mkdir()
    make_tokenizer(vocab_size=280).model.save(str(folder))
    return describe(folder, model_type, described)


def describe(folder: Path, model_type: str, described: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if described is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_the_command_writes_it_into_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    expected = oracle(folder)  # Of the older files.
    assert cli.main(["convert", "--model", str(folder)]) == 0
    assert (
        f"{folder / 'tokenizer.json'}: made of merges.txt and vocab.json" in capsys.readouterr().out
    )
    assert tokenizer_path(folder) == folder / "tokenizer.json"
    codec = TextCodec(folder)
    assert [codec.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
    assert codec.end_token_ids == (0,) and codec.encode("<|endoftext|>") == [0]
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.json")
    }
    assert cli.main(["convert", "--model", str(folder)]) == 78
    assert "is there already; give --output" in capsys.readouterr().err


def test_a_folder_that_nothing_can_be_made_in_or_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["convert", "--model", str(tmp_path)]) == 78
    assert "expected a tokenizer.model, or a vocab.json" in capsys.readouterr().err
    assert cli.main(["convert", "--model", str(tmp_path / "nowhere")]) == 78
    assert "no such folder" in capsys.readouterr().err
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    assert cli.main(["convert", "--model", str(folder), "--threads", "2"]) == 2
    assert "have no effect without --output" in capsys.readouterr().err

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cli.main(["convert", "--model", str(folder)]) == 2
    assert "tokenizer.json cannot be written: No space left on device" in capsys.readouterr().err
    assert not [path for path in folder.iterdir() if "tokenizer.json" in path.name]


def test_weights_of_a_pickle_come_with_it(tiny_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    for name in ("config.json", "generation_config.json"):
        if (tiny_folder / name).exists():
            shutil.copy(tiny_folder / name, source)
    torch.save(load_file(tiny_folder / "model.safetensors"), source / "pytorch_model.bin")
    make_tokenizer().model.save(str(source))
    assert cli.main(["convert", "--model", str(source), "--output", str(output)]) == 0
    expected = make_tokenizer()
    codec = TextCodec(output)
    assert [codec.encode(text) for text in TEXTS] == [expected.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize(
    "described", [GPT2, {}, None, GPT2 | {"tokenizer_class": "GPT2TokenizerFast"}]
)
@pytest.mark.parametrize("model_type", ["gpt_bigcode", "gpt2"])
def test_a_byte_level_vocabulary_is_read_as_it_was_saved(
    tmp_path: Path, model_type: str, described: dict[str, Any] | None
) -> None:
    made = convert(byte_level(tmp_path / "a", model_type, described))
    original = make_tokenizer(vocab_size=280)
    assert [made.encode(text).ids for text in TEXTS] == [
        original.encode(text).ids for text in TEXTS
    ]


def sentencepiece_model(folder: Path, kind: str, **more: Any) -> None:
    import sentencepiece

    folder.mkdir()
    given: dict[str, Any] = {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    }
    lines = [
        line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line.strip()
    ]
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            model_type=kind,
            vocab_size=500,
            minloglevel=2,
            **given | more,
        )


@needs_sentencepiece
@pytest.mark.parametrize("model_type", ["llama", "mistral", "minicpm3"])
def test_a_sentencepiece_model_is_read_as_sentencepiece_does(
    tmp_path: Path, model_type: str
) -> None:
    import sentencepiece

    sentencepiece_model(tmp_path / "a", "bpe")
    folder = describe(tmp_path / "a", model_type, LLAMA)
    made = convert(folder)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    # There the library has its own way.
    texts = [text for text in TEXTS if not text.startswith(" ")]
    assert [made.encode(text).ids for text in texts] == [
        [processor.bos_id(), *processor.encode(text)] for text in texts
    ]
    if model_type == "llama":
        expected = oracle(folder)
        write_tokenizer(folder)
        codec = TextCodec(folder)
        assert [codec.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
        assert (
            codec.end_token_ids == (processor.eos_id(),)
            and codec.decode(codec.encode(TEXTS[0])[1:]) == TEXTS[0]
        )


@needs_sentencepiece
@pytest.mark.parametrize(
    ("kind", "described"),
    [("bpe", None), ("bpe", {"tokenizer_class": "LLaMATokenizer"}), ("unigram", LLAMA)],
)
def test_one_that_the_library_reads_otherwise_is_refused(
    tmp_path: Path, kind: str, described: dict[str, Any] | None
) -> None:
    sentencepiece_model(tmp_path / "a", kind)
    with pytest.raises(
        ConfigurationError,
        match=r"does not read tokenizer\.model as SentencePiece does, for example .*; name the "
        r"right class",
    ):
        convert(describe(tmp_path / "a", "llama", described))


@needs_sentencepiece
@pytest.mark.parametrize(
    ("more", "probe"),
    [
        (
            {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
            r'"def f\(\):\\n    return 1\\n"',
        ),
        ({"remove_extra_whitespaces": True}, r'"def f\(\):\\n    return 1\\n"'),
        ({"normalization_rule_name": "nfkc"}, '"\ufb01ne \uff12 \u2460"'),
        ({"byte_fallback": False, "character_coverage": 0.98}, '".*"'),
    ],
)
def test_a_normaliser_that_the_library_drops_is_refused_with_the_text_it_shows_on(
    tmp_path: Path, more: Any, probe: str
) -> None:
    sentencepiece_model(tmp_path / "a", "bpe", **more)
    with pytest.raises(
        ConfigurationError,
        match=f"as SentencePiece does, for example {probe}; name the right class .* or put a "
        "right tokenizer.json",
    ):
        convert(describe(tmp_path / "a", "llama", LLAMA))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_no_file_outside_the_folder_is_read(tmp_path: Path, file: str) -> None:
    folder = byte_level(tmp_path / "a", "gpt2", GPT2)
    expected = tokenizer_json(folder)
    make_tokenizer(vocab_size=270).model.save(str(tmp_path))
    vocabulary, merges = (str(tmp_path / name) for name in ("vocab.json", "merges.txt"))
    named = {"vocab": vocabulary, "merges": merges, "vocab_file": vocabulary, "merges_file": merges}
    (folder / file).write_text(
        json.dumps((GPT2 if file == "tokenizer_config.json" else {}) | named)
    )
    assert tokenizer_json(folder) == expected


def test_only_the_keys_that_say_how_text_is_read_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"vocab": "/x", "image_token": "<i>", "add_bos_token": True, "chat_template": "x"}
    folder = byte_level(tmp_path / "a", "gpt2", GPT2 | more)
    seen: dict[str, Any] = {}

    def noted(place: Path) -> None:
        seen.update(
            {path.name: json.loads(path.read_text()) for path in place.glob("*config.json")}
        )
        raise ConfigurationError("enough")

    monkeypatch.setattr(tokenizer, "convert", noted)
    with pytest.raises(ConfigurationError, match="enough"):
        tokenizer_json(folder)
    described = GPT2 | {"image_token": "<i>", "add_bos_token": True}
    assert seen == {"config.json": {"model_type": "gpt2"}, "tokenizer_config.json": described}
    for text in ("[]", "{", "[" * 100_000):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .* JSON"):
            tokenizer_json(folder)


@pytest.mark.parametrize(
    ("model_type", "described", "reason"),
    [
        ("falcon", {"tokenizer_class": "CTRLTokenizer"}, "CTRLTokenizer cannot be saved"),
        (
            "falcon",
            {"tokenizer_class": "LlamaTokenizer"},
            r"LlamaTokenizer reads tokenizer\.model, which the folder lacks",
        ),
        ("gemma", None, "GemmaTokenizer reads only 5 tokens from them"),
        (
            "falcon",
            {"auto_map": {"AutoTokenizer": ["own.Own", None]}} | GPT2,
            "auto_map names code .* not run",
        ),
        ("falcon", {"auto_map": ["own.Own", None]}, "auto_map names code .* not run"),
    ],
)
def test_what_cannot_be_read_as_meant_is_refused(
    tmp_path: Path, model_type: str, described: Any, reason: str
) -> None:
    folder = byte_level(tmp_path / "a", model_type, described)
    (folder / "own.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ConfigurationError, match=reason):
        convert(folder)


def test_a_vocabulary_without_its_merges_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    (folder / "merges.txt").unlink()
    with pytest.raises(ConfigurationError) as error:
        tokenizer_json(folder)
    text = str(error.value)
    assert text.startswith(
        f"{folder}: vocab.json and config.json and tokenizer_config.json cannot be converted to a "
    )
    assert "merges.txt" in text and "\n" not in text and "Traceback" not in text


def test_what_the_library_says_is_handed_on_with_advice(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "a", "falcon", None)
    with pytest.raises(
        ConfigurationError,
        match=r"does not read them \(ValueError: .*\); .*\{\"tokenizer_class\": ",
    ):
        tokenizer_json(folder)


@pytest.mark.parametrize(
    "data",
    [b"\n\x0e\n\x05<unk>", base64.b64encode(b"a") + b" 0\n"],
    ids=["sentencepiece", "tiktoken"],
)
def test_packages_that_are_not_installed_are_named(
    tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_is_installed", lambda package: package == "transformers")
    (tmp_path / "tokenizer.model").write_bytes(data)
    packages = "sentencepiece protobuf" if data.startswith(b"\n") else "tiktoken"
    found = (
        f"converting tokenizer.model to a tokenizer.json needs {packages}: .* -m pip install "
        f"{packages}$"
    )
    with pytest.raises(ConfigurationError, match=found):
        tokenizer_json(tmp_path)


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    (folder / "vocab.json").unlink()
    (folder / "vocab.json").symlink_to("/proc/self/mem")
    with pytest.raises(
        CheckpointError, match=r"a/vocab\.json: is a link to .*/mem, outside of its folder"
    ):
        tokenizer_json(folder)
