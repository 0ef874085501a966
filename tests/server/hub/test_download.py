"""`--model org/name`: downloaded once, served later without the hub; every failure is reported in
one line, without long waits.
"""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.config import EngineSettings, load
from server.errors import ConfigurationError, ResourceError
from server.hub import download as hub
from tests.support.embedders import WIDTH, make_embedder
from tests.support.fake_hub import COMMIT, GATED, REPOSITORY, FakeHub, serving
from tests.support.families import make_family_checkpoint
from tests.support.processes import ServerProcess

DEAD = "http://127.0.0.1:9"
RESOLVE = """
import sys
from pathlib import Path
from commands import cli
from server.hub import download as hub
from server.errors import OneheadError
hub.TIMEOUT_SECONDS = 0.5
checks = {"weights": cli._check}
for name in sys.argv[2:]:
    try:
        print(hub.resolve(Path(name), weights=sys.argv[1] != "none", pickles=sys.argv[1] == "any", check=checks.get(sys.argv[1])))
    except OneheadError as error:
        print(error.exit_code, error)
"""  # noqa: E501


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository, also some that are never downloaded."""
    folder = make_family_checkpoint("llama", 0, tmp_path_factory.mktemp("repository")).folder
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "modeling_own.py"):
        (folder / name).write_bytes(b"not read")
    return folder


@pytest.fixture(scope="module")
def fake(repository: Path) -> Iterator[FakeHub]:
    with serving(FakeHub(repository)) as running:
        yield running


@pytest.fixture(scope="module")
def filled(fake: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a complete copy of the repository."""
    home = tmp_path_factory.mktemp("filled")
    (line,) = resolved(home, fake.endpoint, REPOSITORY)
    assert Path(line).is_dir(), line
    return home


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    return {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def resolved(
    home: Path, endpoint: str, *names: str, files: str = "weights", **more: str
) -> list[str]:
    """A line for each model: its folder, or the exit status and the message."""
    command = [sys.executable, "-c", RESOLVE, files, *names]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | environment(home, endpoint, **more),
        check=True,
    )
    return done.stdout.splitlines()


def test_it_is_downloaded_and_served_and_served_again_without_the_hub(
    fake: FakeHub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in environment(tmp_path, fake.endpoint).items():
        monkeypatch.setenv(key, value)
    texts = []
    for offline in ("0", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        asked = len(fake.requests)
        server = ServerProcess(Path(REPOSITORY))
        assert [model["id"] for model in json.loads(server.get("/v1/models")[1])["data"]] == [
            REPOSITORY
        ]
        for name in (REPOSITORY, REPOSITORY.partition("/")[2]):
            status, answer = server.post(
                "/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1}
            )
            assert (status, answer["model"]) == (200, REPOSITORY)
        texts.append(server.text("def f", max_new_tokens=8, ignore_eos=True))
        assert server.stop() == 0
        assert (len(fake.requests) > asked) == (offline == "0")
    assert texts[0] == texts[1]
    (snapshot,) = tmp_path.glob("hub/models--*/snapshots/*")
    assert snapshot.name == COMMIT and hub.model_id(snapshot) == REPOSITORY
    read = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in snapshot.iterdir()} == read
    assert re.fullmatch("[0-9a-f]{64}", (snapshot / "model.safetensors").resolve().name)


def test_the_layers_of_an_embedder_are_downloaded_and_no_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_embedder(tmp_path_of(tmp_path, "repository")).folder
    for name in ("2024-01/model.safetensors", "4_Normalize/x.bin", "onnx/model.safetensors"):
        (made / name).parent.mkdir()
        (made / name).write_bytes(b"not read")
    with serving(FakeHub(made)) as hub_of_it:
        for key, value in environment(tmp_path / "home", hub_of_it.endpoint).items():
            monkeypatch.setenv(key, value)
        for offline in ("0", "1"):
            monkeypatch.setenv("HF_HUB_OFFLINE", offline)
            server = ServerProcess(Path(REPOSITORY))
            status, answer = server.post("/v1/embeddings", {"input": "a", "prompt_name": "query"})
            assert status == 200 and len(answer["data"][0]["embedding"]) == WIDTH
            assert server.stop() == 0
    (snapshot,) = (tmp_path / "home").glob("hub/models--*/snapshots/*")
    folders = {path.name for path in snapshot.iterdir() if path.is_dir()}
    assert folders == {"1_Pooling", "2_Dense", "3_Dense"}


def tmp_path_of(folder: Path, name: str) -> Path:
    """A new folder in another."""
    (folder / name).mkdir()
    return folder / name


def test_without_the_hub_what_is_cached_serves_and_what_is_not_is_refused(
    filled: Path, fake: FakeHub
) -> None:
    (folder,) = resolved(filled, DEAD, REPOSITORY)
    assert Path(folder).parent.name == "snapshots"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert resolved(filled, f"http://127.0.0.1:{silent.getsockname()[1]}", REPOSITORY) == [
            folder
        ]
        assert time.monotonic() - began < 20
    fake.status = 503
    try:
        cached, other = resolved(filled, fake.endpoint, REPOSITORY, "org/other")
    finally:
        fake.status = None
    assert cached == folder
    assert "cannot be reached or used (" in other and "503" in other
    cached, other = resolved(filled, DEAD, REPOSITORY, "org/other", HF_HUB_OFFLINE="1")
    assert cached == folder
    assert other.startswith("78 org/other: no such folder, and the Hugging Face hub cannot be")
    assert "no complete copy in its cache" in other
    assert other.endswith("HF_HUB_OFFLINE forbids downloads")


def test_what_the_hub_refuses_is_named_with_what_to_do(filled: Path, fake: FakeHub) -> None:
    names = ("org/none", GATED, f"{REPOSITORY}@v9", f"{REPOSITORY}@main", REPOSITORY)
    none, gated, revision, main, whole = resolved(filled, fake.endpoint, *names)
    assert (
        none.startswith(
            "78 org/none: no such folder, and no such repository on the Hugging Face hub"
        )
        and "HF_TOKEN" in none
    )
    assert gated.startswith(f"78 {GATED}: is gated: accept its conditions") and "HF_TOKEN" in gated
    assert revision.startswith(f"78 {REPOSITORY}@v9: ") and "RevisionNotFoundError" in revision
    assert main == whole and Path(main).is_dir()


def test_a_hub_that_cannot_be_reached_is_an_exit_of_78_in_seconds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "commands.cli", "serve", "--model", "org/none", "--port", "0"]
    began = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | environment(tmp_path, DEAD),
        timeout=60,
        check=False,
    )
    assert (
        done.returncode == 78 and time.monotonic() - began < 20 and "Traceback" not in done.stderr
    )
    last = done.stderr.splitlines()[-1]
    assert (
        "org/none: no such folder, and the Hugging Face hub cannot be reached" in last
        and "HF_ENDPOINT" in last
    )


def test_a_description_alone_leaves_out_the_weights_and_is_no_whole_copy(
    fake: FakeHub, tmp_path: Path
) -> None:
    (folder,) = resolved(tmp_path, fake.endpoint, REPOSITORY, files="none")
    assert (Path(folder) / "config.json").is_file() and not [*Path(folder).glob("*.safetensors")]
    (refused,) = resolved(tmp_path, fake.endpoint, REPOSITORY, HF_HUB_OFFLINE="1")
    assert refused.startswith(f"78 {REPOSITORY}: ") and "no complete copy" in refused
    assert resolved(tmp_path, DEAD, REPOSITORY, files="none") == [folder]


def test_a_repository_without_safetensors_is_refused(repository: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(repository, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with serving(FakeHub(bare)) as other:
        (line,) = resolved(tmp_path / "home", other.endpoint, REPOSITORY)
    assert line.startswith(
        f"78 {REPOSITORY}: has no weights in safetensors files, and others are not served; if it "
        "has a pytorch_model.bin"
    )
    assert f"`onehead convert --model {REPOSITORY} --output NEW`" in line


def test_weights_of_what_is_not_served_are_not_fetched(repository: Path, tmp_path: Path) -> None:
    several = shutil.copytree(repository, tmp_path / "several")
    config = json.loads((several / "config.json").read_text())
    (several / "config.json").write_text(
        json.dumps(config | {"num_key_value_heads": config["num_attention_heads"]})
    )
    with serving(FakeHub(several)) as other:
        (line,) = resolved(tmp_path / "home", other.endpoint, REPOSITORY)
        assert (
            line.startswith(f"78 {REPOSITORY}: ")
            and "config.json: num_key_value_heads is " in line
            and "`onehead convert" in line
        )
        assert not [request for request in other.requests if "model.safetensors" in request]
        (folder,) = resolved(tmp_path / "home", other.endpoint, REPOSITORY, files="any")
    assert (Path(folder) / "model.safetensors").is_file() and not (
        Path(folder) / "pytorch_model.bin"
    ).exists()


@pytest.mark.nightly
def test_a_pickle_is_fetched_where_there_is_nothing_else_and_converted(
    repository: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    bare = shutil.copytree(repository, tmp_path / "bare")
    tensors = load_file(bare / "model.safetensors")
    (bare / "model.safetensors").unlink()
    torch.save(tensors, bare / "pytorch_model.bin")
    output = tmp_path / "made"
    with serving(FakeHub(bare)) as other:
        command = [
            sys.executable,
            "-m",
            "commands.cli",
            "convert",
            "--model",
            REPOSITORY,
            "--output",
            str(output),
            "--no-evaluate",
        ]
        more = environment(tmp_path / "home", other.endpoint)
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | more, check=False
        )
        assert done.returncode == 0, done.stderr
        (bare / "pytorch_model.bin").unlink()
    with serving(FakeHub(bare)) as neither:
        (line,) = resolved(tmp_path / "empty", neither.endpoint, REPOSITORY, files="any")
    assert line == f"78 {REPOSITORY}: has neither safetensors files nor a pytorch_model.bin"
    made = load_file(output / "model.safetensors")
    assert made.keys() == tensors.keys() and all(
        torch.equal(made[name], tensors[name]) for name in tensors
    )


def test_training_goes_on_from_a_repository(
    fake: FakeHub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commands import cli
    from commands.convert import convert
    from commands.train import train

    asked: list[tuple[Path, bool, Any]] = []

    def resolve(
        model: Path, weights: bool = True, pickles: bool = False, check: Any = None
    ) -> Path:
        asked.append((model, pickles, check))
        return repository

    given: list[Any] = []
    monkeypatch.setattr(hub, "resolve", resolve)
    monkeypatch.setattr(train, "train", given.append)
    monkeypatch.setattr(convert, "convert", given.append)
    assert cli.main(["train", "--init", "org/name", "--output", str(tmp_path / "a")]) == 0
    assert cli.main(["convert", "--model", "org/name", "--output", str(tmp_path / "b")]) == 0
    assert cli.main(["train", "--output", str(tmp_path / "c")]) == 0
    assert asked == [
        (Path("org/name"), False, cli._check),
        (Path("org/name"), True, convert.make_plan),
    ]
    assert (given[0].init, given[1].model, given[2].init) == (repository, repository, None)


def test_the_tokenizer_is_found_before_there_is_an_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(hub, "tokenizer_path", asked.append)
    assert (
        hub.resolved(load(EngineSettings, ["--model", str(tmp_path)], "x"), asked.append).model
        == tmp_path
    )
    assert asked == [tmp_path, tmp_path]  # The check, then the tokenizer.
    asked.clear()
    monkeypatch.setattr(
        hub.Repository, "fetch", lambda _, files: [asked.append(files), tmp_path][1]
    )
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="no weights in safetensors files"):
        hub.resolved(load(EngineSettings, ["--model", "org/name"], "x"), asked.append)
    assert asked == [hub.SMALL_FILES, tmp_path, tmp_path, hub.SMALL_FILES + hub.WEIGHTS]


def test_a_full_disk_is_a_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=[])
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(
        ResourceError, match="org/name: cannot be stored: No space left on device; HF_HOME"
    ):
        hub.resolve(Path("org/name"))


def test_what_is_there_or_cannot_be_a_repository_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub.Repository, "fetch", lambda *_: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for name in (
        "org/name",
        "/org/name",
        "name",
        "a/b/c",
        "../name",
        "org/na me",
        "~/name",
        "org/name/",
    ):
        assert hub.resolve(Path(name)) == Path(name)
    assert hub.model_id(Path("org/name")) == "name" and hub.model_id(tmp_path / "org") == "org"


@pytest.mark.parametrize(
    ("name", "revision"),
    [("org/name", None), ("a-b/c_d.e@v1.0", "v1.0"), ("org/name@refs/pr/3", "refs/pr/3")],
)
def test_names_and_revisions(
    name: str, revision: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch(repository: hub.Repository, files: list[str]) -> Path:
        asked.append((repository.name, repository.revision))
        return tmp_path

    monkeypatch.setattr(hub.Repository, "fetch", fetch)
    assert hub.resolve(Path(name), weights=False) == tmp_path
    assert asked == [(name.partition("@")[0], revision)]
