"""A server that begins with the pages and streams of one that was killed goes on as that one."""

import json
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.processes import ServerProcess, wait_until
from tests.support.wire import Wire, http_request

PROMPTS = [
    "".join(f"def function_{number}(argument):\n    return {start}\n" for number in range(30))
    for start in range(3)
]


def _ask(server: ServerProcess) -> list[Any]:
    answers = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 2}
        status, answer = server.post("/v1/completions", body)
        assert status == 200, answer
        answers.append((answer["choices"], answer["usage"]["prompt_tokens_details"]))
    return answers


def _texts(answers: list[Any]) -> list[Any]:
    return [choices for choices, _ in answers]


def test_a_server_finds_what_one_before_it_computed(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    options = "--cache.disk", str(disk)
    with ServerProcess(None, *options) as server:
        computed = _ask(server)
        num_files = sum(details["cached_tokens"] == 0 for _, details in computed)
        wait_until(lambda: len([*disk.glob("*/*")]) > num_files, "files of blocks")
        wait_until(lambda: not [*disk.glob("*/*.*")], "the last block to be written")
        assert server.metric("onehead_prefix_cache_loads_total") == 0
        server.stop(signal.SIGKILL)
    with ServerProcess(None, *options) as server:
        found = _ask(server)
        assert all(details["cached_tokens"] >= 64 for _, details in found)
        assert server.metric("onehead_prefix_cache_loads_total") > 0
    assert _texts(found) == _texts(computed)
    # Another form of the weights has other pages.
    (folder,) = disk.iterdir()
    with ServerProcess(None, *options, "--engine.quantization", "int8") as server:
        assert _ask(server)[0][1]["cached_tokens"] == 0
        shutil.rmtree(disk)  # It goes on without what it kept.
        assert _texts(_ask(server)) == _texts(_ask(server))
    assert not folder.exists()


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = ServerProcess(None, "--cache.disk", str(tmp_path / "file" / "disk"), wait=False)
    _, log = server.process.communicate(timeout=60)
    assert server.process.returncode == 78
    assert f"cache.disk {tmp_path}/file/disk: Not a directory" in log


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {"prompt": "def f(", "max_tokens": 300, "ignore_eos": True, "logprobs": 1, "seed": 8},
    ),
    (
        "/v1/completions",
        {"prompt": "def g(", "max_tokens": 250, "n": 2, "temperature": 1, "seed": 3},
    ),
    ("/v1/completions", {"prompt": "x = ", "max_tokens": 300, "stop": ["never"], "seed": 5}),
    ("/generate", {"inputs": "def h(", "parameters": {"max_new_tokens": 200, "details": True}}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Say something."}],
            "max_tokens": 200,
            "seed": 1,
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
    ),
]


class Reader(threading.Thread):
    """A client that reads a stream to its end, and comes back whenever its connection is lost."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.request = http_request("POST", path, body | {"stream": True, "resumable": True})
        self.port, self.id, self.last, self.num_connections = port, "", 0, 0
        self.data: list[str] = []

    def run(self) -> None:
        while not self._read():
            time.sleep(0.05)

    def _read(self) -> bool:
        """Whether the stream has been read to its end."""
        if self.id:
            headers = {"last-event-id": f"{self.id}.{self.last}"} if self.last else {}
            self.request = http_request("GET", f"/v1/streams/{self.id}", None, headers)
        try:
            with socket.create_connection(("127.0.0.1", self.port), 60) as connection:
                connection.sendall(self.request)
                response = Wire(connection).response()
                self.num_connections += 1
                if response.status == 204:
                    return True
                if response.status == 503 and not self.id:
                    return False  # It was killed before it had the request; the next one loads.
                assert response.status == 200, response.body()
                self.id = response.header("x-stream-id") or self.id
                for event in response.events():
                    if event.data is not None:
                        self.last += 1
                        assert event.id == f"{self.id}.{self.last}", "each event once, in order"
                        self.data.append(event.data)
        except (OSError, EOFError):
            return False
        return True

    @property
    def answer(self) -> list[Any]:
        """What came, without names and dates, by the choice that it belongs to."""
        values = [json.loads(data) for data in self.data if data != "[DONE]"]
        named = [{k: v for k, v in value.items() if k not in ("id", "created")} for value in values]
        return sorted(named, key=lambda v: v["choices"][0]["index"] if v.get("choices") else 9)


def test_streams_go_on_in_the_next_server(tmp_path: Path) -> None:
    options = "--server.journal", str(tmp_path / "journal"), "--cache.disk", str(tmp_path / "disk")
    server = ServerProcess(None, *options)
    port = server.port
    alone = [Reader(port, *stream) for stream in STREAMS]
    cut = [Reader(port, *stream) for stream in STREAMS]
    for reader in alone:
        reader.start()
        reader.join(60)
    for reader in cut:
        reader.start()
    for _ in range(2):
        wait_until(lambda: any(reader.data for reader in cut), "the first events")
        server.stop(signal.SIGKILL)
        server = ServerProcess(None, *options, port=port)
    with server:
        for reader in cut:
            reader.join(60)
            assert not reader.is_alive()
        assert max(reader.num_connections for reader in cut) > 1
        for one, other in zip(alone, cut, strict=True):
            assert one.answer == other.answer
