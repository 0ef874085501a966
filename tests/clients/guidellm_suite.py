"""guidellm's load, as its users run it: synthetic chat requests over /v1/chat/completions."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from check import run

FOLDER = Path(__file__).resolve().parents[2] / "model" / "pretrained"


def poisson_load(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).parent / "guidellm"),
            "run",
            "--backend",
            f"kind=openai_http,target={url},model=embedded",
        ]
        command += [
            "--profile",
            "kind=poisson,rate=5",
            "--constraint",
            "kind=max_duration,seconds=8",
        ]
        command += [
            "--constraint",
            "kind=max_requests,count=20",
            "--tokenizer",
            f"kind=huggingface_auto,model={FOLDER}",
        ]
        command += [
            "--data",
            "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "--output",
            "kind=json",
            "--disable-console-interactive",
        ]
        done = subprocess.run(
            command, check=False, cwd=folder, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        (report,) = Path(folder).glob("*.json")
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        print("requests", totals)
        assert totals["successful"] >= 15 and totals["errored"] == 0


run("guidellm", version("guidellm"), [poisson_load])
