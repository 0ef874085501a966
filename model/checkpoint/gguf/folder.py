"""Writes the small files that a checkpoint folder has beside its weights, from the header of a GGUF
file.

server/child_process.py runs it with the arguments FILE FOLDER. Invariant: it ends with status 0
only if every file was written, within limits of time and memory; else its last line of output is
the reason. It imports no torch.
"""

import json
import resource
import sys
from pathlib import Path

from model.checkpoint.config import Config
from model.checkpoint.families import spec_of
from model.checkpoint.gguf.config import config_of
from model.checkpoint.gguf.split import GGUF
from model.checkpoint.gguf.tokenizer import generation_config, tokenizer_config, tokenizer_json
from model.spec import CheckpointError

SECONDS, MEMORY_BYTES = 60, 3 * 2**29
"""Limits of the processor time and the address space. A vocabulary of 262,144 tokens takes 2 s and
a third of that memory.
"""
NOT_WRITTEN = 71
"""Exit status if a file could not be written, which is not the checkpoint's fault."""
TOKENIZER = {
    "generation_config.json": generation_config,
    "tokenizer_config.json": tokenizer_config,
    "tokenizer.json": tokenizer_json,
}


def write(file: Path, folder: Path) -> None:
    """Writes config.json and what is made of the tokenizer's metadata. Raises CheckpointError
    naming the GGUF file and the key, or OSError.
    """
    gguf = GGUF.open(file)
    contents = {"config.json": config_of(gguf)}
    try:
        spec_of(file, contents["config.json"], warn=False)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None  # Of the family, which knows no file.
    metadata = Config(gguf.metadata, str(gguf.path))
    for name, content in (contents | {k: make(metadata) for k, make in TOKENIZER.items()}).items():
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        (folder / name).write_text(text, encoding="utf-8")


def main() -> None:
    """Writes the files within the limits."""
    limits = (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        lower = hard == resource.RLIM_INFINITY or most < hard
        resource.setrlimit(kind, (most if lower else hard, hard))
    file, folder = sys.argv[1:]
    bounds = f"{SECONDS} s of processor time and {MEMORY_BYTES >> 20} MiB of memory"
    print(f"{file}: its header cannot be read within {bounds}", flush=True)
    try:
        write(Path(file), Path(folder))
    except CheckpointError as error:
        print(" ".join(str(error).split()))
        sys.exit(1)
    except MemoryError:
        sys.exit(1)  # The line that was printed first is the reason.
    except OSError as error:
        print(f"{error.filename or folder}: {error.strerror}")
        sys.exit(NOT_WRITTEN)


if __name__ == "__main__":
    main()
