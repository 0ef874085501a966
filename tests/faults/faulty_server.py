"""`onehead` with faults: `python -m tests.faults.faulty_server RULES FOLDER serve ...`.

The server is the production one; its engines run tests.faults.faulty_worker, and the rules of this
process are patched into what they name before the command begins.
"""

import os
import random
import sys
import time

from commands import cli
from server.supervision import transport
from server.text import worker_process
from tests.faults import faulty_texts
from tests.faults.rules import FOLDER_VARIABLE, VARIABLE, Rule, Rules
from tests.support.paths import ROOT

HOUR = 3600.0


def time_jumps() -> None:
    """The wall clock leaps by up to an hour, either way, whenever it is read."""
    true, rng = time.time, random.Random(0)
    time.time = lambda: true() + rng.uniform(-HOUR, HOUR)


def detokenizer_fails(rules: Rules, rule: Rule) -> None:
    """A token that cannot be turned into text."""
    from server.text.codec import Detokenizer

    sound = Detokenizer.push

    def push(detokenizer: Detokenizer, token: int) -> str:
        if token == rule.token and rules.strike(rule):
            raise RuntimeError("a fault of the suite's: no text for this token")
        return sound(detokenizer, token)

    Detokenizer.push = push  # type: ignore[method-assign, assignment]


def main() -> int:
    os.environ[VARIABLE], os.environ[FOLDER_VARIABLE] = sys.argv[1:3]
    # Engines are started with -P, which keeps them from finding this package by themselves.
    os.environ["PYTHONPATH"] = str(ROOT)
    transport.ENGINE_MODULE = "tests.faults.faulty_worker"
    worker_process.run = faulty_texts.run  # type: ignore[assignment]
    rules = Rules.of_environment()
    for rule in rules.named("time_jumps"):
        if rules.strike(rule):
            time_jumps()
    for rule in rules.named("detokenizer_fails"):
        detokenizer_fails(rules, rule)
    return cli.main(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
