"""Decisions beside completions that ask for the same log-probabilities, on a real server.

    python -m bench.decisions --output DIR [--model FOLDER] [--rounds 30] [--questions 400] [-- --engine.threads 2]

one    in turns, over a state that is new each time: a request of one question, and a completion of one token with `logprobs` over the same
       prompt; medians of the seconds to the whole answer
many   once, over one state of about 1,000 tokens: all questions in one request, and a completion of one token for each of them, one after
       the other and 16 at once; seconds, and the prompt tokens that were computed

Arguments after `--` are options of the server. Writes decisions.json into DIR, an existing folder. Exit status 1 where a request fails,
where one question takes more than 1.5 times a completion's time, or where the state was read more than once.
"""

import argparse
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.processes import ServerProcess
from tests.support.report import Check, Found, conclude, show

MOST_RATIO = 1.5
PAGE = 64
ASKED = "Question: Is it {number}?\nAnswer with yes or no, and nothing else."
WORDS = ["value", "=", "compute(first,", "second)\n", "return", "total", "if", "ready", "else", "None\n", "for", "item", "in", "items:\n"]


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds to the whole answer, and it. Raises SystemExit where it is none."""
    began = time.perf_counter()
    status, answer = server.post(path, body)
    if status != 200:
        raise SystemExit(f"{path}: {status} {answer}")
    return time.perf_counter() - began, answer


def asked(state: str, numbers: range) -> dict[str, Any]:
    return {"input": state, "questions": [{"type": "predicate", "instructions": f"Is it {number}?"} for number in numbers]}


def completed(state: str, number: int) -> dict[str, Any]:
    prompt = f"{state}\n\n{ASKED.format(number=number)}\nAnswer:"
    return {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 20}


def one(server: ServerProcess, options: argparse.Namespace) -> Found:
    rng, found = random.Random(0), {"decision": list[float](), "completion": list[float]()}
    for number in range(options.rounds + 1):
        for kind in found:
            state = " ".join(rng.choices(WORDS, k=200))
            body = asked(state, range(1)) if kind == "decision" else completed(state, 0)
            seconds, _ = post(server, "/v1/decisions" if kind == "decision" else "/v1/completions", body)
            if number:  # The first are not counted.
                found[kind].append(seconds)
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    return found | {"median": medians, "ratio": medians["decision"] / medians["completion"]}


def many(server: ServerProcess, options: argparse.Namespace) -> list[Found]:
    rng, rows = random.Random(1), []
    state = " ".join(rng.choices(WORDS, k=420))
    seconds, answer = post(server, "/v1/decisions", asked(state, range(options.questions)))
    usage = answer["usage"]
    cached, computed = usage["input_tokens_details"].values()
    num_tokens = server.post("/tokenize", {"prompt": state})[1]["count"]
    least = (options.questions - 1) * (num_tokens // PAGE * PAGE)
    rows.append({"how": "one request", "seconds": seconds, "computed": computed, "cached": cached, "least_cached": least})
    for at_once in (1, 16):
        began = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            # The salt keeps what one way has computed from the next.
            bodies = [completed(state, number) | {"cache_salt": str(at_once)} for number in range(options.questions)]
            usages = [answer["usage"] for _, answer in pool.map(lambda body: post(server, "/v1/completions", body), bodies)]
        computed = sum(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        rows.append({"how": f"completions, {at_once} at once", "seconds": time.perf_counter() - began, "computed": computed})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    server = ServerProcess(options.model, *options.arguments)
    try:
        single, rows = one(server, options), many(server, options)
    finally:
        status = server.stop()
    kinds = [(kind, single["median"][kind], min(single[kind]), max(single[kind])) for kind in ("decision", "completion")]
    show(("one question", "median s", "least", "most"), kinds)
    show((f"{options.questions} questions", "s", "tokens computed"), [(row["how"], row["seconds"], row["computed"]) for row in rows])
    cached, least = rows[0]["cached"], rows[0]["least_cached"]
    checks = [
        Check("one question is as soon as a completion", single["ratio"] < MOST_RATIO, f"{single['ratio']:.2f} times"),
        Check("the state is read once", cached >= least, f"{cached} tokens cached, at least {least} are the state's"),
        Check("the exit status is 0", status == 0, str(status)),
    ]
    info = {"model": str(options.model), "arguments": options.arguments, "questions": options.questions, "rounds": options.rounds}
    return conclude("decisions", options.output, info, {"one": single, "many": rows}, checks)


if __name__ == "__main__":
    sys.exit(main())
