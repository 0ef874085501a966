"""A folder without tokenizer.json: its files are converted once to one that tokenizes as `transformers` does, or are refused by name."""

import base64
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.spec import CheckpointError
from server.config import EngineSettings, ServerSection, load
from server.errors import ConfigurationError, ResourceError
from server.hub import conversion, tokenizer_conversion, tokenizer_file
from server.hub.tokenizer_conversion import convert
from server.hub.tokenizer_file import tokenizer_path
from server.service import start_message
from server.text.codec import TextCodec
from tests.support.checkpoints import make_tokenizer
from tests.support.processes import ServerProcess

TEXTS = ("def f(x):\n    return x", "  two spaces, and at the end ", "é 漢字 😀", "12345", "")
GPT2 = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
needs_sentencepiece = pytest.mark.skipif(
    not (importlib.util.find_spec("sentencepiece") and importlib.util.find_spec("google")), reason="takes sentencepiece and protobuf"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


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


def test_it_is_made_once_in_another_process_and_shared(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    code = (
        "import sys, pathlib; from server.text.codec import TextCodec; codec = TextCodec(pathlib.Path(sys.argv[1])); "
        "print(codec.path, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    (made,) = (cache / "onehead" / "tokenizers").glob("*/*")
    assert done.stdout == f"{made} []\n" and made.name == "tokenizer.json"
    monkeypatch.setattr(subprocess, "run", None)
    codec, expected = TextCodec(folder), oracle(folder)
    assert [codec.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
    assert codec.end_token_ids == (0,) and codec.encode("<|endoftext|>") == [0]
    copy = shutil.copytree(folder, tmp_path / "b")
    (copy / "weights.safetensors").write_bytes(b"these count for nothing")
    assert tokenizer_path(copy) == made
    assert start_message(load(EngineSettings, ["--model", str(copy)], "x"), ServerSection()).tokenizer == str(made)
    make_tokenizer().save(str(copy / "tokenizer.json"))
    assert tokenizer_path(copy) == copy / "tokenizer.json"


def test_other_files_make_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(tokenizer_file, "run", lambda module, seen, file: Path(file).write_text(str(made.append(seen))) and "")
    folder = byte_level(tmp_path / "a", "gpt_bigcode", GPT2)
    first = tokenizer_path(folder)
    (folder / "special_tokens_map.json").write_text("{}")
    assert tokenizer_path(folder) != first and len(made) == 2
    (folder / "special_tokens_map.json").unlink()
    assert tokenizer_path(folder) == first and len(made) == 2 and not any(Path(seen).exists() for seen in made)
    for name, value in (("CONVERSION", "of another kind"), ("_version", lambda package: "6.0")):
        monkeypatch.setattr(tokenizer_file, name, value)
        assert tokenizer_path(folder) != first
    assert len(made) == 4


@pytest.mark.parametrize("described", [GPT2, {}, None, GPT2 | {"tokenizer_class": "GPT2TokenizerFast"}])
@pytest.mark.parametrize("model_type", ["gpt_bigcode", "gpt2"])
def test_a_byte_level_vocabulary_is_read_as_it_was_saved(tmp_path: Path, model_type: str, described: dict[str, Any] | None) -> None:
    made = convert(byte_level(tmp_path / "a", model_type, described))
    original = make_tokenizer(vocab_size=280)
    assert [made.encode(text).ids for text in TEXTS] == [original.encode(text).ids for text in TEXTS]


@pytest.fixture(scope="module")
def served(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a checkpoint that has the two files in place of its tokenizer.json."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("served") / "old")
        (folder / "tokenizer.json").unlink()
        make_tokenizer().model.save(str(folder))
        process = ServerProcess(folder)
        yield process
        assert process.stop() == 0


def test_both_processes_read_it(served: ServerProcess) -> None:
    grammar = {"type": "regex", "value": "[a-f]{4}"}
    text = served.text("def f", max_new_tokens=8, grammar=grammar)
    assert len(text) == 4 and set(text) <= set("abcdef")


def sentencepiece_model(folder: Path, kind: str, **more: Any) -> None:
    import sentencepiece

    folder.mkdir()
    given: dict[str, Any] = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    lines = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line.strip()]
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
def test_a_sentencepiece_model_is_read_as_sentencepiece_does(tmp_path: Path, model_type: str) -> None:
    import sentencepiece

    sentencepiece_model(tmp_path / "a", "bpe")
    folder = describe(tmp_path / "a", model_type, LLAMA)
    made = convert(folder)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    texts = [text for text in TEXTS if not text.startswith(" ")]  # There the library has its own way.
    assert [made.encode(text).ids for text in texts] == [[processor.bos_id(), *processor.encode(text)] for text in texts]
    if model_type == "llama":
        codec = TextCodec(folder)
        assert [codec.encode(text) for text in TEXTS] == [oracle(folder).encode(text) for text in TEXTS]
        assert codec.end_token_ids == (processor.eos_id(),) and codec.decode(codec.encode(TEXTS[0])[1:]) == TEXTS[0]


@needs_sentencepiece
@pytest.mark.parametrize(("kind", "described"), [("bpe", None), ("bpe", {"tokenizer_class": "LLaMATokenizer"}), ("unigram", LLAMA)])
def test_one_that_the_library_reads_otherwise_is_refused(tmp_path: Path, kind: str, described: dict[str, Any] | None) -> None:
    sentencepiece_model(tmp_path / "a", kind)
    with pytest.raises(
        ConfigurationError, match=r"does not read tokenizer\.model as SentencePiece does, for example .*; name the right class"
    ):
        convert(describe(tmp_path / "a", "llama", described))


@needs_sentencepiece
@pytest.mark.parametrize(
    ("more", "probe"),
    [
        ({"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}, r'"def f\(\):\\n    return 1\\n"'),
        ({"remove_extra_whitespaces": True}, r'"def f\(\):\\n    return 1\\n"'),
        ({"normalization_rule_name": "nfkc"}, '"\ufb01ne \uff12 \u2460"'),
        ({"byte_fallback": False, "character_coverage": 0.98}, '".*"'),
    ],
)
def test_a_normaliser_that_the_library_drops_is_refused_with_the_text_it_shows_on(tmp_path: Path, more: Any, probe: str) -> None:
    sentencepiece_model(tmp_path / "a", "bpe", **more)
    with pytest.raises(
        ConfigurationError, match=f"as SentencePiece does, for example {probe}; name the right class .* or put a right tokenizer.json"
    ):
        convert(describe(tmp_path / "a", "llama", LLAMA))


def convert_here(module: str, folder: str, made: str) -> str:
    """Runs the child's conversion in this process, which has imported `transformers` already."""
    Path(made).write_text(convert(Path(folder)).to_str())
    return ""


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_no_file_outside_the_folder_is_read(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_file, "run", convert_here)
    folder = byte_level(tmp_path / "a", "gpt2", GPT2)
    expected = tokenizer_path(folder).read_bytes()
    make_tokenizer(vocab_size=270).model.save(str(tmp_path))
    vocabulary, merges = (str(tmp_path / name) for name in ("vocab.json", "merges.txt"))
    named = {"vocab": vocabulary, "merges": merges, "vocab_file": vocabulary, "merges_file": merges}
    (folder / file).write_text(json.dumps((GPT2 if file == "tokenizer_config.json" else {}) | named))
    assert tokenizer_path(folder).read_bytes() == expected


def test_the_child_sees_only_the_keys_that_say_how_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = byte_level(tmp_path / "a", "gpt2", GPT2 | {"vocab": "/x", "image_token": "<i>", "add_bos_token": True, "chat_template": "x"})
    seen: dict[str, Any] = {}

    def run(module: str, place: str, made: str) -> str:
        seen.update({path.name: json.loads(path.read_text()) for path in Path(place).glob("*config.json") if not path.is_symlink()})
        return "enough"

    monkeypatch.setattr(tokenizer_file, "run", run)
    with pytest.raises(ConfigurationError, match="enough"):
        tokenizer_path(folder)
    assert seen == {"config.json": {"model_type": "gpt2"}, "tokenizer_config.json": GPT2 | {"image_token": "<i>", "add_bos_token": True}}
    for text in ("[]", "{", "[" * 100_000):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .* JSON"):
            tokenizer_path(folder)


@pytest.mark.parametrize(
    ("model_type", "described", "reason"),
    [
        ("falcon", {"tokenizer_class": "CTRLTokenizer"}, "CTRLTokenizer cannot be saved"),
        ("falcon", {"tokenizer_class": "LlamaTokenizer"}, r"LlamaTokenizer reads tokenizer\.model, which the folder lacks"),
        ("gemma", None, "GemmaTokenizer reads only 5 tokens from them"),
        ("falcon", {"auto_map": {"AutoTokenizer": ["own.Own", None]}} | GPT2, "auto_map names code .* not run"),
        ("falcon", {"auto_map": ["own.Own", None]}, "auto_map names code .* not run"),
    ],
)
def test_what_cannot_be_read_as_meant_is_refused(tmp_path: Path, model_type: str, described: Any, reason: str) -> None:
    folder = byte_level(tmp_path / "a", model_type, described)
    (folder / "own.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ConfigurationError, match=reason):
        convert(folder)


def test_a_vocabulary_without_its_merges_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    (folder / "merges.txt").unlink()
    with pytest.raises(ConfigurationError) as error:
        tokenizer_path(folder)
    text = str(error.value)
    assert (
        text.startswith(f"{folder}: there is no tokenizer.json, and vocab.json and config.json") and "cannot be converted to one: " in text
    )
    assert "merges.txt" in text and "\n" not in text and "Traceback" not in text


def test_what_the_library_says_is_handed_on_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = byte_level(tmp_path / "a", "falcon", None)
    monkeypatch.setattr(sys, "argv", ["x", str(folder), str(tmp_path / "made")])
    with pytest.raises(SystemExit) as exit:
        tokenizer_conversion.main()
    said = capsys.readouterr().out
    assert exit.value.code == 1 and said.count("\n") == 1 and not (tmp_path / "made").exists()
    assert "transformers does not read them (ValueError: " in said and '{"tokenizer_class": ' in said


def test_a_conversion_that_hangs_or_dies_is_an_error_of_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    monkeypatch.setattr(conversion, "SECONDS", 0.01)
    with pytest.raises(ConfigurationError, match=r"it took more than 0\.01 s"):
        tokenizer_path(folder)
    monkeypatch.setattr(conversion, "SECONDS", 60)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigurationError, match="ended with status 1"):
        tokenizer_path(folder)


@pytest.mark.parametrize("data", [b"\n\x0e\n\x05<unk>", base64.b64encode(b"a") + b" 0\n"], ids=["sentencepiece", "tiktoken"])
def test_packages_that_are_not_installed_are_named(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_file, "_version", lambda package: "5" if package == "transformers" else "")
    (tmp_path / "tokenizer.model").write_bytes(data)
    packages = "sentencepiece protobuf" if data.startswith(b"\n") else "tiktoken"
    with pytest.raises(ConfigurationError, match=f"converting tokenizer.model to one needs {packages}: .* -m pip install {packages}$"):
        tokenizer_path(tmp_path)


def test_without_any_source_and_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json: no such file, nor a tokenizer\.model"):
        tokenizer_path(tmp_path)
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "vocab.json"))
    with pytest.raises(ResourceError, match=r"Not a directory; .* XDG_CACHE_HOME"):
        tokenizer_path(folder)


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    (folder / "vocab.json").unlink()
    (folder / "vocab.json").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"a/vocab\.json: is a link to .*/mem, outside of its folder"):
        tokenizer_path(folder)


def test_a_child_that_cannot_write_is_a_lack_of_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    monkeypatch.setattr(sys, "argv", ["x", str(folder), "/dev/full"])
    with pytest.raises(SystemExit) as exit:
        tokenizer_conversion.main()
    said = capsys.readouterr().out
    assert exit.value.code == ResourceError.exit_code and said == "/: No space left on device\n"
    done = subprocess.CompletedProcess([], ResourceError.exit_code, stdout=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ResourceError, match=r"/: No space left on device; .* XDG_CACHE_HOME"):
        tokenizer_path(folder)


def test_an_interrupt_of_the_child_is_one_of_ours(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -signal.SIGINT, stdout=""))
    with pytest.raises(KeyboardInterrupt):
        tokenizer_path(folder)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def eventually(happened: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_while_it_is_made_ends_the_server_and_the_child(tmp_path: Path, cache: Path, number: int, status: int) -> None:
    folder = byte_level(tmp_path / "a", "falcon", GPT2)
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({"model_type": "falcon"} | sizes))
    slow = tmp_path / "slow" / "transformers"
    slow.mkdir(parents=True)
    (slow / "__init__.py").write_text(f"import time; open({str(tmp_path / 'began')!r}, 'w').close(); time.sleep(100)")
    command = [sys.executable, "-m", "commands.cli", "serve", "--model", str(folder), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(slow.parent), "XDG_CACHE_HOME": str(cache)}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    eventually((tmp_path / "began").exists)
    (child,) = children(server.pid)
    server.send_signal(number)
    said = server.communicate(timeout=20)[1]
    assert server.returncode == status and "Traceback" not in said
    eventually(lambda: not Path(f"/proc/{child}").exists())
    if number != signal.SIGKILL:
        assert not [path for path in cache.rglob("*") if path.is_file() or path.is_symlink()]
