"""200 requests over 40 grammars, at random over 64 streams of one engine core: each must get what
it gets alone, token by token.

    python -m tests.trials.grammar_isolation [--model FOLDER] [--output FILE]

Without --model it runs on the embedded model's tokenizer and on one of 262,144 words that it makes.
The model is a hash, the engine core, the scheduler and the grammars are the server's own; the
engine is replaced four times on the way. No times are measured.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.progress import track

from server.config import EMBEDDED_MODEL
from server.text.codec import TextCodec
from tests.support.guided import alone, compiled, fresh, read_grammars, requests, together
from tests.support.large_vocabulary import write_large_tokenizer

REQUESTS, TOKENS, CRASHES, ROUNDS = 200, 150, 4, 3


def measure(folder: Path) -> dict[str, Any]:
    codec = TextCodec(folder)
    vocab_size, ends = codec.largest_id + 1, list(codec.end_token_ids)
    grammars, refused = compiled(codec)
    served = read_grammars(codec.path, ends)
    differing, ended, num_tokens = [], Counter[str](), 0
    for seed in range(ROUNDS):
        asked = requests(grammars, REQUESTS, TOKENS, seed)
        outcomes = together(asked, served, ends, seed, CRASHES)
        for number, request in enumerate(
            track(asked, f"{vocab_size} words, round {seed + 1} of {ROUNDS}: each alone")
        ):
            num_tokens += len(outcomes[number][0])
            ended[outcomes[number][1]] += 1
            if alone(request, fresh(served), ends) != outcomes[number]:
                differing.append(f"round {seed}, request {number}")
    return {
        "vocab_size": vocab_size,
        "grammars": len(set(grammars)),
        "refused by the check": refused,
        "requests": REQUESTS * ROUNDS,
        "tokens": num_tokens,
        "ended": dict(ended),
        "differing": differing,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder with a tokenizer.json")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folders = (
            [EMBEDDED_MODEL, write_large_tokenizer(Path(made))]
            if options.model is None
            else [options.model]
        )
        results = [measure(folder) for folder in folders]
    print(json.dumps(results, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any(result["differing"] for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
