"""Loads a checkpoint's settings and tokenizer as the API and engine processes do, within limits of
time and memory.

server/child_process.py starts it with the folder as argument. Invariant: it ends with status 0 only
if everything could be loaded; else its last line of output is the reason, also if a limit ends it.
It compiles no chat template and prepares no grammars: the forking process does
(server/text/worker_process.py), under limits.
"""

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from model.spec import CheckpointError
from server.errors import ConfigurationError, one_line
from server.text.checkpoint_settings import CheckpointFiles
from server.text.codec import TextCodec

SECONDS, MEMORY_BYTES = 8, 2**30
"""Limits of the processor time and the address space. A vocabulary of 262,144 tokens takes 1 s, and
a quarter of that memory."""
MAX_TOKENS = 100
"""Bound on the tokens of a prompt of one letter: a normalizer can put any text before every
prompt."""


def main() -> None:
    # Each thread of a Rust library would reserve 64 MiB of address space.
    os.putenv("RAYON_NUM_THREADS", "1")
    for kind, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(
            kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )
    folder = place = Path(sys.argv[1])
    try:
        for place in _load(folder):
            print(
                f"{place}: cannot be loaded within {SECONDS} s of processor time and "
                f"{MEMORY_BYTES >> 20} MiB of memory",
                flush=True,
            )
        return
    except MemoryError:
        pass  # What was printed last is the reason.
    except (CheckpointError, ConfigurationError) as error:
        print(one_line(error))
    except BaseException as error:  # A panic of a Rust library is not an Exception.
        print(f"{place}: cannot be used ({type(error).__name__})")
    sys.exit(1)


def _load(folder: Path) -> Iterator[Path]:
    """Yields a file before it is loaded. Raises CheckpointError, ConfigurationError, or an error of
    a library.
    """
    yield folder / "tokenizer_config.json"
    CheckpointFiles(folder)
    yield folder / "tokenizer.json"
    codec = TextCodec(folder)
    if (num_tokens := len(codec.encode("a"))) > MAX_TOKENS:
        raise CheckpointError(
            f"{codec.path}: makes {num_tokens} tokens of one letter; at most {MAX_TOKENS} are "
            "expected"
        )


if __name__ == "__main__":
    main()
