"""`--model FILE.gguf` is served as the folder it was made of; the folder made of it is cached, and
every mistake is one line.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from commands import cli
from model.checkpoint.families import read_spec
from model.checkpoint.gguf.header import GGUFFile
from model.checkpoint.gguf.tokenizer import CONTROL, NORMAL
from model.checkpoint.weights import load_decoder
from model.spec import CheckpointError
from server.errors import OneheadError, ResourceError
from server.hub import download, gguf_file
from server.hub.gguf_file import checkpoint_folder
from server.text.codec import TextCodec
from tests.model.checkpoint.test_files import POINTER
from tests.server.hub.test_download import resolved
from tests.support.checkpoints import N_POSITIONS, SHAPES, make_tokenizer
from tests.support.fake_hub import REPOSITORY, FakeHub, serving
from tests.support.gguf_files import write_file
from tests.support.processes import ServerProcess

SHAPE = SHAPES[0]
NAMES = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
BLOCK_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The name of a gpt_bigcode tensor in a GGUF file."""
    module, _, leaf = name.removeprefix("transformer.").rpartition(".")
    if not module.startswith("h."):
        return f"{NAMES[module]}.{leaf}"
    _, number, inner = module.split(".", 2)
    return f"blk.{number}.{BLOCK_NAMES[inner]}.{leaf}"


def write_tiny(folder: Path, path: Path, more: dict[str, str], heads: int = 1) -> None:
    """Writes the tiny checkpoint of a folder as a GGUF file, as llama.cpp's converter would.
    `more`: further keys of its metadata.
    """
    described = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    tokens += [f"<extra{number}>" for number in range(SHAPE.vocab_size - len(tokens))]
    tokenizer: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in described["merges"]
        ],
        "token_type": [
            CONTROL,
            *[NORMAL] * (len(described["vocab"]) - 1),
            *[CONTROL] * (len(tokens) - len(described["vocab"])),
        ],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    width = SHAPE.n_head * SHAPE.head_dim
    sizes: dict[str, Any] = {
        "context_length": N_POSITIONS,
        "embedding_length": width,
        "feed_forward_length": 4 * width,
        "block_count": SHAPE.n_layer,
        "attention.head_count": SHAPE.n_head,
        "attention.head_count_kv": heads,
        "attention.layer_norm_epsilon": 1e-5,
    }
    metadata = {f"starcoder.{key}": value for key, value in sizes.items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()} | more
    tensors = {
        gguf_name(name): value
        for name, value in load_file(folder / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    write_file(path, "starcoder", metadata, tensors)


@pytest.fixture(scope="module")
def merging_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a tokenizer that merges, as every real one does."""
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("merging") / "tiny")
    make_tokenizer(vocab_size=290).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def file(merging_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-f32.gguf"
    write_tiny(
        merging_folder,
        path,
        {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
    )
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of caches, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "onehead" / "gguf"


@pytest.fixture(scope="module")
def from_folder(merging_folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(merging_folder) as server:
        yield server


def test_a_file_is_served_as_the_folder_it_was_made_of(
    file: Path, from_folder: ServerProcess
) -> None:
    with ServerProcess(file) as server:
        for prompt in ("def f(x):", "a  b\n\n\tc é", "\n"):
            asked = {"max_new_tokens": 12, "ignore_eos": True}
            assert server.text(prompt, **asked) == from_folder.text(prompt, **asked)
        assert [model["id"] for model in json.loads(server.get("/v1/models")[1])["data"]] == [
            "tiny-f32"
        ]
        for name in ("tiny-f32", "tiny-f32.gguf", str(file)):
            status, answer = server.post(
                "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}
            )
            assert (status, answer["model"]) == (200, "tiny-f32")
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", chat)[0] == 200


def test_the_folder_is_made_once_of_each_state_of_the_file(
    file: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, opened = GGUFFile.open, []
    monkeypatch.setattr(GGUFFile, "open", lambda path: opened.append(path) or read(path))
    folder = checkpoint_folder(file)
    assert len(opened) == 1  # The header is parsed once for all that is made of it.
    assert (
        folder.parent.parent == cache
        and folder.name == "tiny-f32"
        and download.model_id(folder) == "tiny-f32"
    )
    made = ["config.json", "generation_config.json", "tiny-f32.gguf", "tokenizer.json"]
    assert sorted(path.name for path in folder.iterdir()) == [*made, "tokenizer_config.json"]
    assert (folder / "tiny-f32.gguf").resolve() == file
    assert TextCodec(folder).encode("<|endoftext|>") == [0]
    assert not [left for left in cache.rglob("tmp*")]
    monkeypatch.setattr(gguf_file, "write", lambda *_: pytest.fail("converted again"))
    # The file, its folder, a link to it, and the folder that was made of it.
    (tmp_path / "link").symlink_to(file.parent)
    for model in (file, file.parent, folder):
        assert checkpoint_folder(model) == folder
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    os.utime(file)
    assert checkpoint_folder(file) not in (folder, file)


def test_other_folders_stay_as_they_are(tiny_folder: Path, tmp_path: Path) -> None:
    for model in (tiny_folder, tmp_path, Path("org/name"), tmp_path / "none"):
        assert checkpoint_folder(model) == model


def refused(model: Path) -> str:
    """The message with which a model is refused."""
    with pytest.raises((OneheadError, CheckpointError)) as error:
        checkpoint_folder(model)
    assert not isinstance(error.value, ResourceError) and "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_meant_is_refused_by_name(file: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGML" + bytes(100))
    assert (
        refused(tmp_path / "none.gguf")
        == f"{tmp_path / 'none.gguf'}: no such file; {tmp_path} has a.gguf"
    )
    assert refused(tmp_path / "empty" / "x.gguf").endswith("has no .gguf file")
    assert refused(tmp_path / "a.gguf").startswith(f"{tmp_path / 'a.gguf'}: begins with b'GGML'")
    assert refused(tmp_path) == refused(tmp_path / "a.gguf")
    (tmp_path / "b.txt").write_text("no weights")
    assert refused(tmp_path / "b.txt").startswith(f"{tmp_path / 'b.txt'}: begins with b'no w'")
    (tmp_path / "short.gguf").write_bytes(file.read_bytes()[:5000])
    assert refused(tmp_path / "short.gguf").startswith(f"{tmp_path / 'short.gguf'}: ")
    assert (
        refused(tmp_path)
        == f"{tmp_path}: has 2 GGUF files; expected one, or the name of the file: a.gguf, "
        "short.gguf"
    )
    (tmp_path / "m-00002-of-00003.gguf").write_bytes(b"GGUF")
    assert refused(tmp_path / "m-00002-of-00003.gguf").startswith(
        f"{tmp_path / 'm-00002-of-00003.gguf'}: is one of 3 parts"
    )
    assert not [left for left in cache.rglob("*") if left.is_file()]


def test_a_files_kind_is_in_its_first_bytes(
    file: Path, tiny_folder: Path, tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").touch()
    for name in ("model.bin", "sha256-0123"):  # The second as Ollama stores it.
        path = Path(shutil.copy(file, folder / name))
        made = checkpoint_folder(path)
        assert checkpoint_folder(folder) == made and made.name == name
        assert (
            load_decoder(made, read_spec(made), torch.float32, torch.device("cpu")).spec.num_layers
            == SHAPE.n_layer
        )
        assert TextCodec(made).encode("<|endoftext|>") == [0]
        path.unlink()
    assert refused(tiny_folder / "model.safetensors").endswith(
        "/model.safetensors: is a safetensors file; --model takes the folder that it is in, with "
        "its config.json"
    )
    for name, data, words in (
        ("a.gguf", POINTER, "is a pointer of git-lfs"),
        ("b.bin", b"PK\x03\x04", "is a zip archive"),
        ("c.bin", b"<html>", "is a web page"),
    ):
        (folder / name).write_bytes(data)
        assert refused(folder / name).startswith(f"{folder / name}: {words}")


def test_several_heads_are_refused_by_the_file_before_its_tokenizer_is_read(
    merging_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "heads.gguf"
    write_tiny(merging_folder, path, {"tokenizer.ggml.pre": "unknown"}, heads=2)
    done = subprocess.run(
        [sys.executable, "-m", "commands.cli", "serve", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert (
        done.returncode == 78
        and f"{path}" in last
        and "head_count_kv" in last
        and "Traceback" not in done.stderr
    ), done.stderr


def test_a_tokenizer_that_is_not_supported_is_refused_by_its_key(
    merging_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "pre.gguf"
    write_tiny(merging_folder, path, {"tokenizer.ggml.pre": "unknown"})
    with pytest.raises(
        CheckpointError, match=rf"^{path}: tokenizer\.ggml\.pre must be one of default, "
    ):
        checkpoint_folder(path)


def test_a_cache_that_cannot_be_written_is_a_resource(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    with pytest.raises(
        ResourceError,
        match=r"Not a directory; what is made of GGUF files is cached in XDG_",
    ):
        checkpoint_folder(file)


def test_a_plan_of_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(file), "--memory", "1GiB", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == SHAPE.n_layer


def test_training_goes_on_from_a_file(file: Path, tmp_path: Path) -> None:
    data, output = tmp_path / "data", tmp_path / "output"
    data.mkdir()
    for number in range(60):
        (data / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    sizes = [
        "--steps",
        "1",
        "--batch-tokens",
        "64",
        "--sequence",
        "16",
        "--threads",
        "1",
        "--device",
        "cpu",
    ]
    argv = [
        "--init",
        str(file),
        "--data",
        str(data),
        "--output",
        str(output),
        "--work",
        str(tmp_path / "work"),
        *sizes,
    ]
    assert cli.main(["train", *argv]) == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in output.iterdir()
    }


def test_one_part_is_refused_before_it_is_downloaded() -> None:
    with pytest.raises(CheckpointError, match="is one of 3 parts; `llama-gguf-split --merge"):
        download.resolve(Path(f"{REPOSITORY}:m-00001-of-00003.gguf"))


def test_a_file_of_the_hub_is_fetched_alone_and_used_again_without_the_hub(
    file: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    (repository).mkdir()
    for name in ("tiny-f32.gguf", "tiny-f16.gguf", "README.md"):
        (repository / name).write_bytes(file.read_bytes())
    named, home = f"{REPOSITORY}:tiny-f32.gguf", tmp_path / "home"
    with serving(FakeHub(repository)) as hub:
        several, missing, folder, again = resolved(
            home,
            hub.endpoint,
            REPOSITORY,
            f"{REPOSITORY}:other.gguf",
            named,
            f"{REPOSITORY}@main:tiny-f32.gguf",
        )
        assert not [
            request for request in hub.requests if "f16" in request and "/resolve/" in request
        ]
    assert (
        several == f"78 {REPOSITORY}: has several GGUF files; name one as {REPOSITORY}:FILE, of "
        "tiny-f16.gguf, tiny-f32.gguf"
    )
    assert (
        missing
        == f"78 {REPOSITORY}:other.gguf: no such file; there is tiny-f16.gguf, tiny-f32.gguf"
    )
    assert Path(folder).name == "tiny-f32" and again == folder
    offline = resolved(home, "http://127.0.0.1:9", named, REPOSITORY, HF_HUB_OFFLINE="1")
    assert offline == [folder, folder]  # Of what is cached, the only file.
    (repository / "tiny-f16.gguf").unlink()
    with serving(FakeHub(repository)) as hub:
        (only,) = resolved(tmp_path / "other", hub.endpoint, REPOSITORY)
    assert Path(only).name == "tiny-f32"
