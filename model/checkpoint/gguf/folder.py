"""Writes the small files that a checkpoint folder has beside its weights, from the header of a GGUF file.

server/child_process.py runs it with the arguments FILE FOLDER NAME... Invariant: it ends with status 0 only if every named file of FOLDER
was written, within limits of time and memory; else its last line of output is the reason. It imports no torch.
"""

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model.checkpoint.families import spec_of
from model.checkpoint.gguf.config import config_of
from model.checkpoint.gguf.split import GGUF
from model.checkpoint.gguf.tokenizer import generation_config, tokenizer_config, tokenizer_json
from model.spec import CheckpointError

SECONDS, MEMORY_BYTES = 60, 3 * 2**29
"""Limits of the processor time and the address space. A vocabulary of 262,144 tokens takes 2 s and a third of that memory."""
NOT_WRITTEN = 71
"""Exit status if a file could not be written, which is not the checkpoint's fault."""
CONTENTS: dict[str, Callable[[GGUF], dict[str, Any]]] = {
    "config.json": config_of,
    "generation_config.json": lambda gguf: generation_config(gguf.metadata),
    "tokenizer_config.json": lambda gguf: tokenizer_config(gguf.metadata),
    "tokenizer.json": lambda gguf: tokenizer_json(gguf.metadata),
}


def write(file: Path, folder: Path, names: list[str]) -> None:
    """Writes the files of these names. Raises CheckpointError naming the GGUF file and the key, or OSError."""
    gguf = GGUF.open(file)
    for name in names:
        try:
            content = CONTENTS[name](gguf)
            if name == "config.json":
                spec_of(file, content, warn=False)  # What the family refuses is refused by the name of the file.
        except CheckpointError as error:
            raise CheckpointError(str(error) if str(error).startswith(str(file)) else f"{file}: {error}") from None
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def main() -> None:
    """Writes what the arguments name, within the limits."""
    for kind, most in ((resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    file, folder, *names = sys.argv[1:]
    print(f"{file}: its header cannot be read within {SECONDS} s of processor time and {MEMORY_BYTES >> 20} MiB of memory", flush=True)
    try:
        write(Path(file), Path(folder), names)
    except CheckpointError as error:
        print(" ".join(str(error).split()))
        sys.exit(1)
    except MemoryError:
        sys.exit(1)  # What was printed first is the reason.
    except OSError as error:
        print(f"{error.filename or folder}: {error.strerror}")
        sys.exit(NOT_WRITTEN)


if __name__ == "__main__":
    main()
