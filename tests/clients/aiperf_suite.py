"""aiperf against the TGI dialect: its huggingface-generate endpoint, streaming."""

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from check import run

FOLDER = Path(__file__).resolve().parents[2] / "model" / "pretrained"


def huggingface_generate(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).parent / "aiperf"),
            "profile",
            "-m",
            "embedded",
            "--url",
            url,
        ]
        command += [
            "--endpoint-type",
            "huggingface-generate",
            "--streaming",
            "--tokenizer",
            str(FOLDER),
        ]
        command += [
            "--synthetic-input-tokens-mean",
            "16",
            "--output-tokens-mean",
            "8",
            "--request-count",
            "16",
            "--concurrency",
            "4",
        ]
        command += ["--ui", "none", "--no-gpu-telemetry", "--artifact-dir", folder]
        done = subprocess.run(
            command, check=False, cwd=folder, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        (report,) = Path(folder).rglob("profile_export_aiperf.json")
        values = json.loads(report.read_text())
        print("requests", values.get("request_count"), "errors", values.get("error_summary"))
        assert not values.get("error_summary") and values["request_count"]["avg"] == 16


run("aiperf", version("aiperf"), [huggingface_generate])
