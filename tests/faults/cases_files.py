"""F29: the files of the model are replaced, broken or deleted while it is served, or the working
directory is, and then the engine dies with the process that holds the weights.

Streams go on in the same model, or end with an error that says why; never in another one.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.faults.clients import Exchange
from tests.faults.rules import Rule
from tests.faults.scene import Case, Scene, recovery_within
from tests.support.processes import wait_until

STREAMS = 96
PACE = Rule("pace", seconds=0.01)
WEIGHTS = "model.safetensors"
CONFIGURATION = 78
Damage = Callable[[Path], None]


def other_weights(folder: Path) -> None:
    """Another model of the same shapes, put in the place of the first as a deployment does it."""
    tensors = {
        name: tensor.flip(0).contiguous() for name, tensor in load_file(folder / WEIGHTS).items()
    }
    save_file(tensors, folder / "new")
    os.replace(folder / "new", folder / WEIGHTS)


def one_bit(folder: Path) -> None:
    """The smallest change, written into the file itself."""
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def other_config(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"layer_norm_epsilon": 1e-2}))


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)


OTHER = "are not those that the server began with"
DAMAGES: tuple[tuple[Damage, str], ...] = (
    (other_weights, OTHER),
    (one_bit, OTHER),
    (other_config, OTHER),
    (broken_config, "config.json: cannot be read as JSON"),
    (no_weights, "model.safetensors: no such file"),
    (nothing, "no such folder"),
)


def under_streams(scene: Scene, recovery: float) -> tuple[Path, list[Exchange]]:
    """The folder that is served, and streams of which each has begun."""
    scene.folder = Path(shutil.copytree(scene.folder, scene.files / "served"))
    scene.start(
        "--engine.max_running", str(STREAMS), rules=(PACE,), constants=recovery_within(recovery)
    )
    exchanges = scene.ask_all(scene.asks(STREAMS, 100, stream=True))
    for exchange in exchanges:
        exchange.reach(3)
    return scene.folder, exchanges


def ends(scene: Scene, damage: Damage, reason: str) -> None:
    """Every stream ends with an error that says why, /ready says it, and so does the last line of
    the server.
    """
    folder, exchanges = under_streams(scene, 4.0)
    damage(folder)
    scene.kill_holder()
    wait_until(lambda: reason in scene.server.get("/ready")[1], "/ready says why", 10.0)
    for exchange in exchanges:
        exchange.join()
        told = json.dumps(exchange.error)
        assert exchange.error is not None and reason in told and str(folder) not in told, (
            f"request {exchange.number}: {told}"
        )
    scene.ended(scene.server.process.wait(30), CONFIGURATION)
    assert reason in scene.server.log.splitlines()[-1]


def is_put_back(scene: Scene, damage: Damage, reason: str) -> None:
    """With the same files in place again in time, every stream is finished as if nothing had
    happened.
    """
    folder, _ = under_streams(scene, 30.0)
    whole = Path(shutil.copytree(folder, scene.files / "whole"))
    damage(folder)
    scene.kill_holder()
    wait_until(lambda: reason in scene.server.get("/ready")[1], "/ready says why", 10.0)
    for path in whole.iterdir():
        folder.mkdir(exist_ok=True)
        shutil.copy(path, scene.files / "copy")
        os.replace(scene.files / "copy", folder / path.name)
    scene.all_finished()


def no_working_directory(scene: Scene) -> None:
    gone = scene.files / "gone"
    gone.mkdir()
    scene.start(rules=(PACE,), prepare=lambda: os.chdir(gone))
    exchanges = scene.ask_all(scene.asks(STREAMS, 40))
    gone.rmdir()
    exchanges[0].reach(3)
    scene.kill_holder()
    scene.all_finished()


def a_link_moves_on(scene: Scene) -> None:
    """The folder is named by a link that is pointed to the next model: the one that is served
    stays.
    """
    link = scene.files / "current"
    following = Path(shutil.copytree(scene.folder, scene.files / "next"))
    other_weights(following)
    link.symlink_to(scene.folder)
    scene.folder = link
    scene.start(rules=(PACE,))
    exchanges = scene.ask_all(scene.asks(STREAMS, 40))
    link.unlink()
    link.symlink_to(following)
    exchanges[0].reach(3)
    scene.kill_holder()
    scene.all_finished()


CASES = [
    *(
        Case("F29", f"{damage.__name__}, and the engine dies", ends, (damage, reason))
        for damage, reason in DAMAGES
    ),
    *(
        Case("F29", f"{damage.__name__}, and all is put back", is_put_back, (damage, reason))
        for damage, reason in DAMAGES
    ),
    Case("F29", "no working directory", no_working_directory),
    Case("F29", "a link moves on", a_link_moves_on),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(scene: Scene, case: Case) -> None:
    scene.play(case)
