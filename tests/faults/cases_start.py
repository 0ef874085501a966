"""F11-F13, F21 and F25: what cannot be served is refused at the start, by name, before the weights
are read where those are not at fault.

Where a fault must be found before the weights are read, the weights are a pipe without a writer:
reading it never ends.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scene import Case, Scene
from tests.support.checkpoints import make_tokenizer

CONFIGURATION, RESOURCE, USAGE = 78, 71, 2
SECONDS = 5.0
"""Most of it is the start of Python on a machine that does other things too."""
WEIGHTS = "model.safetensors"
CAPBSET_DROP, NET_BIND_SERVICE = 24, 10
Damage = Callable[[Path], None]


def header(
    change: Callable[[dict[str, Any], list[str]], str | bytes], length: int | None = None
) -> Damage:
    """Damage of the weights' header: of its JSON and the names in it, or of the length that stands
    before it.
    """

    def damage(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        values = json.loads(data[8 : 8 + size])
        text = change(values, [name for name in values if name != "__metadata__"])
        encoded = text.encode() if isinstance(text, str) else text
        (folder / WEIGHTS).write_bytes(
            struct.pack("<Q", len(encoded) if length is None else length)
            + encoded
            + data[8 + size :]
        )

    return damage


def duplicate(values: dict[str, Any], names: list[str]) -> str:
    return (
        json.dumps(values)[:-1] + f", {json.dumps(names[0])}: {json.dumps(values[names[0]])}" + "}"
    )


def overlap(values: dict[str, Any], names: list[str]) -> str:
    """The last tensor begins within the one before it."""
    *_, before, last = sorted(names, key=lambda name: values[name]["data_offsets"])
    begin, end = values[last]["data_offsets"]
    values[last]["data_offsets"] = [begin - 4, end - 4]
    assert values[before]["data_offsets"][1] == begin
    return json.dumps(values)


def unchanged(values: dict[str, Any], names: list[str]) -> str:
    return json.dumps(values)


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 12)


def flip(folder: Path) -> None:
    """One bit of the weights, under a manifest of what they were."""
    sums = subprocess.run(
        ["sha256sum", WEIGHTS], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    (folder / "SHA256SUMS").write_text(sums)
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1000] ^= 4
    (folder / WEIGHTS).write_bytes(data)


def unreadable_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def config(values: dict[str, Any], weights: bool = False) -> Damage:
    """Keys of config.json as given; None takes one away."""

    def damage(folder: Path) -> None:
        known = json.loads((folder / "config.json").read_text())
        changed = {key: value for key, value in (known | values).items() if value is not None}
        (folder / "config.json").write_text(json.dumps(changed))
        if not weights:
            unreadable_weights(folder)

    return damage


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    unreadable_weights(folder)


def large_tokenizer(folder: Path) -> None:
    """Of more tokens than the model has logits."""
    make_tokenizer(tuple(f"<{number}>" for number in range(100)), 400).save(
        str(folder / "tokenizer.json")
    )
    unreadable_weights(folder)


def no_end(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    config({"eos_token_id": None})(folder)


def refused(
    scene: Scene,
    damage: Damage,
    status: int,
    words: tuple[str, ...],
    options: tuple[str, ...] = (),
    **more: Any,
) -> None:
    """The server ends at once with this status and one line that says what is wrong."""
    scene.folder = Path(shutil.copytree(scene.folder, scene.files / "model"))
    damage(scene.folder)
    began = time.monotonic()
    server = scene.start(*options, wait=False, **more)
    scene.ended(server.process.wait(SECONDS * 2), status)
    took = time.monotonic() - began
    assert took < SECONDS, f"it took {took:.1f} s"
    last = server.log.strip().splitlines()[-1]
    assert last.startswith("onehead serve: ") and all(word in last for word in words), server.log
    assert server.process.stdout is not None and not server.process.stdout.read(), (
        "it said that it serves"
    )


def port_in_use(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(scene, unreadable_weights, RESOURCE, (str(port), "in use", "--port"), port=port)


def without_privilege() -> None:
    """Even root may not have ports below 1024 then."""
    ctypes.CDLL(None).prctl(CAPBSET_DROP, NET_BIND_SERVICE, 0, 0, 0)


def no_permission(scene: Scene) -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 80:
        pytest.skip("every port is open to everybody on this machine")
    refused(
        scene, unreadable_weights, RESOURCE, ("80", "--port"), port=80, prepare=without_privilege
    )


def second_server(scene: Scene) -> None:
    """The first goes on as if nothing had been."""
    first = scene.start()
    refused(scene, unreadable_weights, RESOURCE, (str(first.port), "in use"), port=first.port)
    scene.servers.reverse()
    scene.canary()
    scene.end(signal.SIGINT)


def two_workers(scene: Scene) -> None:
    """There is no such thing, so there are no two schedulers on one device."""
    server = scene.start("--workers", "2", wait=False)
    scene.ended(server.process.wait(SECONDS), USAGE)
    assert "--workers" in server.log


SHORT = ("model.safetensors", "truncated or damaged")
CASES = [
    Case("F11", "weights cut short", refused, (cut, CONFIGURATION, SHORT)),
    Case(
        "F11",
        "a bit of the weights flipped",
        refused,
        (flip, CONFIGURATION, (WEIGHTS, "SHA256SUMS")),
    ),
    Case("F11", "a name twice", refused, (header(duplicate), CONFIGURATION, (WEIGHTS, "twice"))),
    Case(
        "F11",
        "a header of 2^63 bytes",
        refused,
        (header(unchanged, 2**63), CONFIGURATION, (WEIGHTS, "header")),
    ),
    Case("F11", "tensors that overlap", refused, (header(overlap), CONFIGURATION, (WEIGHTS,))),
    Case("F12", "no config", refused, (no_config, CONFIGURATION, ("config.json", "no such file"))),
    Case(
        "F12",
        "a key of the wrong type",
        refused,
        (config({"n_embd": "wide"}), CONFIGURATION, ("config.json", "n_embd")),
    ),
    Case(
        "F12",
        "more than one key value head",
        refused,
        (config({"multi_query": False}), CONFIGURATION, ("config.json", "multi_query")),
    ),
    Case(
        "F12",
        "a vocabulary of another size",
        refused,
        (config({"vocab_size": 301}, True), CONFIGURATION, ("301", "300")),
    ),
    Case(
        "F12",
        "an unknown architecture",
        refused,
        (config({"model_type": "bert"}), CONFIGURATION, ("config.json", "bert")),
    ),
    Case(
        "F13",
        "no tokenizer",
        refused,
        (no_tokenizer, CONFIGURATION, ("tokenizer.json", "no such file")),
    ),
    Case(
        "F13",
        "more tokens than logits",
        refused,
        (large_tokenizer, CONFIGURATION, ("tokenizer.json", "300")),
    ),
    Case("F13", "no token that ends a text", refused, (no_end, CONFIGURATION, ("eos_token_id",))),
    Case("F21", "port in use", port_in_use),
    Case("F21", "no permission for the port", no_permission),
    Case(
        "F21",
        "a host that is not ours",
        refused,
        (unreadable_weights, RESOURCE, ("192.0.2.1", "--host"), ("--host", "192.0.2.1")),
    ),
    Case(
        "F21",
        "no host at all",
        refused,
        (unreadable_weights, RESOURCE, ("nowhere.invalid",), ("--host", "nowhere.invalid")),
    ),
    Case("F25", "a second server on the port", second_server),
    Case("F25", "two workers", two_workers),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(scene: Scene, case: Case) -> None:
    scene.play(case)
