"""Each extension is a folder and a line of the table: without them the rest generates and
streams.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from server.http.extensions import EXTENSIONS
from tests.support.paths import ROOT

PROGRAM = """
import asyncio, sys
from pathlib import Path
import httpx
from tests.support.fake_engine import serve

async def main():
    served = serve(Path(sys.argv[1]))
    while not served.client.admission.accepting:
        await asyncio.sleep(0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served.app), base_url="http://test") as http:
        for stream in (False, True):
            body = {"inputs": "abc", "parameters": {"max_new_tokens": 5}, "stream": stream}
            answer = await http.post("/generate", json=body)
            assert answer.status_code == 200 and "generated_text" in answer.text, answer.text
            body = {"prompt": "abc", "max_tokens": 5, "stream": stream}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200 and "text_completion" in answer.text, answer.text
        assert (await http.get("/openapi.json")).status_code == 200
        print(*(route.path for route in served.app.table.routes))

asyncio.run(main())
"""  # noqa: E501


def without(extension: str, folder: Path) -> None:
    """Copies the tree, without an extension's folder and its line of the table."""
    for package in ("server", "model", "cache", "tests/support"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "pretrained", "ui")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    (folder / "tests/__init__.py").touch()
    shutil.rmtree(folder / Path(*extension.split(".")))
    table = folder / "server/http/extensions.py"
    lines = table.read_text().splitlines(keepends=True)
    left = [line for line in lines if f'"{extension}"' not in line]
    assert len(left) == len(lines) - 1
    table.write_text("".join(left))


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_rest_serves_without_it(extension: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    without(extension, tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, str(tokenizer_folder)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    gone = {
        "server.http.mistral": "/v1/fim/completions",
        "server.http.ollama": "/api/generate",
        "server.http.anthropic": "/v1/messages",
        "server.http.responses": "/v1/responses",
        "server.http.llama_cpp": "/infill",
        "server.http.decisions": "/v1/decisions",
        "server.http.embeddings": "/v1/embeddings",
        "server.http.render": "/v1/completions/render",
        "server.http.page": "/monitor",
    }
    paths = done.stdout.split()
    assert gone[extension] not in paths and not {*gone.values()} - {gone[extension]} - {*paths}
