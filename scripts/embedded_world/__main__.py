"""What the embedded model is trained on, and how it is examined.

python -m scripts.embedded_world start FOLDER            the checkpoint to train: random weights
python -m scripts.embedded_world corpus FOLDER           the world's training documents
python -m scripts.embedded_world examine [--url URL]     held-out questions to a running server
python -m scripts.embedded_world show                    some lessons of each kind
"""

import argparse
import random
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start")
    start.add_argument("folder", type=Path)
    start.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: trained anew")
    corpus = commands.add_parser("corpus")
    corpus.add_argument("folder", type=Path)
    corpus.add_argument("--documents", type=int, default=960_000)
    corpus.add_argument("--seed", type=int, default=0)
    examine = commands.add_parser("examine")
    examine.add_argument("--url", default="http://localhost:8000")
    examine.add_argument("--questions", type=int, default=500, help="of each kind")
    examine.add_argument("--failures", type=int, default=10, help="shown of each kind")
    show = commands.add_parser("show")
    show.add_argument("--each", type=int, default=3)
    options = parser.parse_args(argv)
    # Each command imports what it needs: an examination needs no torch.
    if options.command == "start":
        from scripts.embedded_world import start as starting

        starting.write(options.folder, options.tokenizer)
    elif options.command == "corpus":
        from scripts.embedded_world import mix

        mix.write(options.folder, options.documents, options.seed)
    elif options.command == "examine":
        from scripts.embedded_world import examine as examination

        return examination.run(options.url, options.questions, options.failures)
    else:
        from scripts.embedded_world import mix

        rng, template = random.Random(), mix.template()
        for generator in mix.MIX:
            for _ in range(options.each):
                print(mix.text_of(generator(rng), template), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
