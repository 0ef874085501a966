"""Random JSON schemas under the check and the engine's masks: every finished output is validated
from its raw text.

    python -m tests.trials.random_schemas [--count 2000] [--first 0] [--model FOLDER] [--output
    FILE]

The model is one of random logits at temperature 0.6, with what closes a text, an array or an object
made likelier. Validation is by `jsonschema` with formats, numbers as they are written, and a key
that occurs twice read both ways. Exit status 1 where one is invalid.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from rich.progress import track

from server.config import EMBEDDED_MODEL
from tests.support.random_schemas import Trial, faults, has_key_twice


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    refused, counts = Counter[str](), Counter[str]()
    invalid: list[dict[str, Any]] = []
    with Trial(options.model) as trial:
        results = [
            trial.run(seed)
            for seed in track(range(options.first, options.first + options.count), "schemas")
        ]
    for seed, result in enumerate(track(results, "validation"), start=options.first):
        if result.refused:
            named = re.search(r"has ([a-zA-Z$]+) .* at |supported: ([a-zA-Z, ]+)", result.refused)
            refused[(named[1] or named[2]) if named else result.refused] += 1
            continue
        counts["accepted"] += 1
        if result.failed:
            counts["failed"] += 1
            invalid.append({"seed": seed, "failed": result.failed, "schema": result.schema})
        elif result.text is None:
            counts["not finished"] += 1
        else:
            counts["finished"] += 1
            counts["finished with a key twice"] += has_key_twice(result.text)
            if found := faults(result.text, result.schema):
                invalid.append(
                    {"seed": seed, "text": result.text, "faults": found, "schema": result.schema}
                )
    report = {
        "schemas": options.count,
        **counts,
        "invalid": len(invalid),
        "refused": dict(refused.most_common()),
        "first invalid": invalid[:20],
    }
    print(json.dumps(report, indent=1, ensure_ascii=False))
    if options.output is not None:
        options.output.write_text(
            json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return 1 if invalid else 0


if __name__ == "__main__":
    raise SystemExit(main())
