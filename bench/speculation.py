"""What n-gram speculation is worth where a text repeats itself, and what it costs where nothing does.

    python -m bench.speculation --output DIR [--model FOLDER] [--rounds 5] [-- --engine.threads 2]

Two engines in this process, alike but for engine.speculation, take every prompt in turns, one request at a time: files of code
whose functions are variations of each other, each to be gone on with, greedy; and prompts of random tokens, gone on with by seeded draws
at temperature 1, as even a small model repeats itself when it is greedy. Invariant: both engines must give the same
tokens and log-probabilities, bit for bit, or nothing is reported. Arguments after `--` are options of the engine and the cache. Writes
speculation.json into DIR, an existing folder. Exit status 1 where the code's tokens do not come at least 1.5 times as fast, where on random
prompts more than 3 % of the rows computed are wrong guesses, or where an outcome differs.
"""

import argparse
import random
import statistics
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from commands.bench.offline import OfflineSettings, info_of, load_engine
from server.config import EMBEDDED_MODEL, load
from server.text.codec import TextCodec
from tests.support.report import Check, conclude, progress, show

NUMBERS = count()
LEAST_SPEEDUP, MOST_WASTED = 1.5, 0.03
FIELDS = "name", "length", "count", "index", "total", "start", "offset", "width"
FUNCTION = """
    def set_{field}(self, {field}):
        if {field} is None:
            raise ValueError("{field} is missing")
        self._{field} = int({field})
        self._changed.append("{field}")
        return self
"""


def code_prompt(number: int) -> str:
    """A class with a setter for each of some fields, up to the beginning of the next one."""
    fields = random.Random(number).sample(FIELDS, 5)
    return "class Options:" + "".join(FUNCTION.format(field=field) for field in fields[:-1]) + f"\n    def set_{fields[-1]}(self, "


class Engine:
    """One of the two."""

    def __init__(self, model: Path, arguments: list[str], speculation: str) -> None:
        options = ["--model", str(model), *arguments, "--engine.speculation", speculation]
        self.settings = load(OfflineSettings, options, "bench.speculation")
        self.core, self.ready = load_engine(self.settings)

    def generate(self, id: int, prompt: list[int], num_tokens: int, temperature: float) -> tuple[float, list[tuple[int, str]]]:
        """(seconds a token after the first, tokens with their log-probabilities to the last bit)."""
        from model.step import SampledToken, Sampling
        from server.engine.scheduler import TokenEvent

        self.core.scheduler.submit(id, prompt, num_tokens, Sampling(temperature=temperature, seed=id), salt=f"{id}")
        drawn: list[tuple[int, str]] = []
        began = 0.0
        while self.core.scheduler.has_work:
            for news in self.core.step():
                if isinstance(news, TokenEvent) and isinstance(news.drawn, SampledToken):
                    drawn.append((news.drawn.token, news.drawn.logprob.hex()))
            if drawn and not began:
                began = time.perf_counter()
        return (time.perf_counter() - began) / (num_tokens - 1), drawn


def run_kind(
    plain: Engine, guessing: Engine, prompts: list[list[int]], temperature: float, options: argparse.Namespace, task: Any
) -> dict[str, Any]:
    """Every prompt on both, in turns."""
    scheduler, same, tokens = guessing.core.scheduler, True, 0
    drafted, accepted = scheduler.num_drafted_tokens, scheduler.num_accepted_tokens
    ratios: list[float] = []
    rates: list[tuple[float, float]] = []
    for _ in range(options.rounds):
        for prompt in prompts:
            id = next(NUMBERS)
            slow, expected = plain.generate(id, prompt, options.output_tokens, temperature)
            fast, found = guessing.generate(id, prompt, options.output_tokens, temperature)
            same &= expected == found
            ratios.append(slow / fast)
            rates.append((1 / slow, 1 / fast))
            tokens += len(found)
            task()
    drafted, accepted = scheduler.num_drafted_tokens - drafted, scheduler.num_accepted_tokens - accepted
    return {
        "speedup": statistics.median(ratios),
        "tokens_per_second": statistics.median(rate for rate, _ in rates),
        "tokens_per_second_guessing": statistics.median(rate for _, rate in rates),
        "drafted": drafted,
        "accepted": accepted,
        "wasted_share_of_rows": (drafted - accepted) / (tokens + drafted - accepted),
        "tokens_from_guesses": accepted / tokens,
        "same": same,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="an existing folder")
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--output_tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("engine", nargs="*", help="options of engine and cache, after --")
    options = parser.parse_args()
    engines = [Engine(options.model, options.engine, kind) for kind in ("none", "ngram")]
    codec, rng = TextCodec(options.model), random.Random(0)
    code = [codec.encode(code_prompt(number)) for number in range(options.prompts)]
    noise = [rng.choices(range(engines[0].ready.vocab_size), k=len(code[0])) for _ in range(options.prompts)]
    info = info_of(engines[0].settings, engines[0].ready)
    found: dict[str, Any] = {}
    with progress() as bar:
        for name, prompts, temperature in (("code", code, 0.0), ("random", noise, 1.0)):
            task = bar.add_task(name, total=options.rounds * len(prompts))
            found[name] = run_kind(engines[0], engines[1], prompts, temperature, options, lambda task=task: bar.advance(task))
    show(("", "code", "random"), [(key, found["code"][key], found["random"][key]) for key in found["code"]])
    speedup, wasted = found["code"]["speedup"], found["random"]["wasted_share_of_rows"]
    same = found["code"]["same"] and found["random"]["same"]
    checks = [
        Check("code's tokens come at least 1.5 times as fast", speedup >= LEAST_SPEEDUP, f"{speedup:.2f}"),
        Check("random prompts: at most 3 % of the rows are wrong guesses", wasted <= MOST_WASTED, f"{wasted:.2%}"),
        Check("the same tokens and log-probabilities, bit for bit", same, "all" if same else "not all"),
    ]
    return conclude("speculation", options.output, info, found, checks)


if __name__ == "__main__":
    sys.exit(main())
