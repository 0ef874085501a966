"""`onehead serve` beside `transformers`' generate on one checkpoint: the same prompts, threads and dtype, in turns on one machine.

    python -m bench.against_transformers --make 164m /tmp/bigcode-164m
    python -m bench.against_transformers --model /tmp/bigcode-164m --output against-transformers.json

Both sides are processes of their own that wait while the other computes, and they swap places from repetition to repetition, so that a
drift of the machine's speed affects both. onehead is measured over HTTP, with everything that belongs to it; transformers in its process,
as one static left-padded batch. Prints a Markdown table of medians (min - max), and in how many of the requests both gave the same tokens.
Arguments after `--` go to `onehead serve`.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from commands.bench.bench import Ask, Load, run
from commands.bench.client import Endpoint, Outcome, fetch_info
from commands.bench.figures import circumstances, figures
from tests.support.paths import MODELS
from tests.support.processes import ServerProcess

SHAPES = {"164m": "tiny_starcoder_py", "1b": "starcoderbase-1b"}
"""Name of a shape -> the published checkpoint whose config.json has it."""
WARMUP_TOKENS = 4
VERSIONS = ("onehead", "torch", "transformers", "tokenizers")


# --- the checkpoint


def make(shape: str, folder: Path) -> None:
    """Writes a gpt_bigcode checkpoint of random float32 weights, with a tokenizer trained on the standard library."""
    import torch

    from commands import corpus
    from commands.train.train import initialise
    from model.checkpoint.families import gpt_bigcode, read_spec
    from model.checkpoint.saving import save_decoder
    from model.decoder import Decoder

    published = read_spec(MODELS / SHAPES[shape])
    tokenizer = corpus.train_tokenizer((document.text for document in corpus.read_documents(None)), published.vocab_size)
    spec = replace(published, end_token_ids=(corpus.token_id(tokenizer, corpus.END),))
    decoder = Decoder(spec)
    initialise(decoder, seed=0)
    save_decoder(folder, decoder, torch.float32, gpt_bigcode.config_from_spec(spec))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": corpus.END, "eos_token": corpus.END}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    millions = sum(parameter.numel() for parameter in decoder.parameters()) / 1e6
    print(
        f"{folder}: {millions:.1f}M parameters, a vocabulary of {spec.vocab_size} of which the tokenizer uses {tokenizer.get_vocab_size()}"
    )


# --- transformers, in a child process that is told what to do on standard input


def serve_transformers(folder: Path, threads: int) -> None:
    """The child: one JSON line in (prompts, new_tokens), one out (token_times of the batch, tokens of each row, end)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no answer.
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()  # type: ignore[no-untyped-call]
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        begin = time.perf_counter()
        times: list[float] = []

        def stamp(ids: Any, scores: Any, begin: float = begin, times: list[float] = times, **_: Any) -> Any:
            times.append(time.perf_counter() - begin)
            return torch.zeros(len(ids), dtype=torch.bool)

        longest = max(map(len, question["prompts"]))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in question["prompts"]])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in question["prompts"]])
        count = question["new_tokens"]
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([stamp]),
            )
        end = time.perf_counter() - begin
        print(json.dumps({"token_times": times, "tokens": output[:, longest:].tolist(), "end": end}), file=answers, flush=True)


class TransformersPeer:
    """The parent's end of that child."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the transformers process has ended; see its error output above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, prompts: list[list[int]], new_tokens: int) -> list[Outcome]:
        """Every row of the batch as a request of its own, all meant to be sent at 0."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return [Outcome(0.0, end=answer["end"], token_times=answer["token_times"], token_ids=row) for row in answer["tokens"]]


# --- both sides as processes


def environment(threads: int) -> dict[str, str]:
    """Environment variables of both processes."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "ONEHEAD_ENGINE__THREADS": str(threads),
        "ONEHEAD_ENGINE__DTYPE": "float32",
        "ONEHEAD_SERVER__LOG_LEVEL": "warning",
    }


@contextmanager
def child(command: list[str], threads: int) -> Iterator["subprocess.Popen[str]"]:
    """A process with `threads` threads, ended with the block."""
    told = os.environ | environment(threads)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=told)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- the measurement


@dataclass(frozen=True)
class Bench:
    """Two peers and what they share."""

    onehead: Endpoint
    transformers: TransformersPeer
    tokenizer: Tokenizer
    rng: random.Random

    def turn(self, concurrency: int, ask: Ask, onehead_first: bool) -> dict[str, Any]:
        """One measurement of each peer on the same new prompts."""
        bodies = [ask.body(self.rng) for _ in range(concurrency)]
        prompts = [self.tokenizer.encode(json.loads(body)["inputs"]).ids[-ask.prompt_tokens :] for body in bodies]
        outcomes: dict[str, list[Outcome]] = {}
        load_average = os.getloadavg()[0]
        for name in ("onehead", "transformers") if onehead_first else ("transformers", "onehead"):
            if name == "onehead":
                outcomes[name] = asyncio.run(run(self.onehead, ask, Load.closed(concurrency), bodies, lambda: None))
            else:
                outcomes[name] = self.transformers.measure(prompts, ask.output_tokens)
        failures = [o.failure or ask.problem(o) for both in outcomes.values() for o in both if o.failure or ask.problem(o)]
        if failures:
            raise SystemExit(f"{len(failures)} of {2 * concurrency} requests failed: {failures[0]}")
        same = sum(a.token_ids == b.token_ids for a, b in zip(*outcomes.values(), strict=True))
        measured = {name: figures(each) for name, each in outcomes.items()}
        ratio = measured["onehead"]["output_tokens_per_second"] / measured["transformers"]["output_tokens_per_second"]
        return {"onehead_first": onehead_first, "load_average": load_average, "same_tokens": same, "ratio": ratio, **measured}

    def measure(self, concurrencies: list[int], ask: Ask, repetitions: int) -> dict[int, list[dict[str, Any]]]:
        """Every case once, then every case again, and so on; concurrency -> its repetitions."""
        for concurrency in concurrencies:
            self.turn(concurrency, Ask(ask.prompt_tokens, min(WARMUP_TOKENS, ask.output_tokens)), onehead_first=True)
        cases: dict[int, list[dict[str, Any]]] = {concurrency: [] for concurrency in concurrencies}
        for repetition in range(repetitions):
            for concurrency in concurrencies:
                turn = self.turn(concurrency, ask, onehead_first=repetition % 2 == 0)
                cases[concurrency].append(turn)
                rates = " ".join(f"{name} {turn[name]['output_tokens_per_second']:.1f} tokens/s" for name in ("onehead", "transformers"))
                print(f"repetition {repetition + 1}, {concurrency} at once: {rates}, ratio {turn['ratio']:.2f}", file=sys.stderr)
        return cases


def summary(values: list[float], digits: int = 1) -> str:
    """'median (min - max)'."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def markdown(cases: dict[int, list[dict[str, Any]]]) -> str:
    """The table: one row for each case and peer."""
    headings = ("at once", "", "output tokens/s", "first token p50, ms", "between tokens p50, ms", "onehead / transformers", "same tokens")
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for concurrency, turns in cases.items():
        same = f"{sum(turn['same_tokens'] for turn in turns)} of {concurrency * len(turns)}"
        for name, extra in (("onehead", (summary([turn["ratio"] for turn in turns], 2), same)), ("transformers", ("", ""))):
            rates = summary([turn[name]["output_tokens_per_second"] for turn in turns])
            latencies = []
            for key in ("time_to_first_token", "inter_token_latency"):
                medians = [1e3 * turn[name][key]["p50"] for turn in turns if turn[name][key]]
                latencies.append(summary(medians) if medians else "-")
            lines.append("| " + " | ".join((str(concurrency), name, rates, *latencies, *extra)) + " |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, help="checkpoint folder to measure on")
    what.add_argument("--make", nargs=2, metavar=("SHAPE", "FOLDER"), help=f"write a random checkpoint of a shape: {', '.join(SHAPES)}")
    parser.add_argument("--concurrency", default="1,8,32", help="cases: requests at once (default: %(default)s)")
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--output_tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--output", type=Path, help="JSON file to write the result to")
    parser.add_argument("--as_transformers", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("serve_options", nargs="*", help="options of onehead serve, after --")
    options = parser.parse_args()
    if options.make and options.make[0] not in SHAPES:
        parser.error(f"--make: no shape {options.make[0]!r}; there are: {', '.join(SHAPES)}")
    return options


def compare(options: argparse.Namespace) -> None:
    """Starts both peers, measures, reports."""
    folder = str(options.model)
    peer = [sys.executable, "-m", "bench.against_transformers", "--model", folder, "--threads", str(options.threads), "--as_transformers"]
    serve = ServerProcess(options.model, *options.serve_options, stderr=None, environment=environment(options.threads))
    with serve as server, child(peer, options.threads) as batcher:
        onehead = Endpoint.parse(f"http://127.0.0.1:{server.port}")
        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        bench = Bench(onehead, TransformersPeer(batcher), tokenizer, random.Random(options.seed))
        result = circumstances(asyncio.run(fetch_info(onehead, timeout=60)))
        ask = Ask(options.prompt_tokens, options.output_tokens)
        cases = bench.measure([int(each) for each in options.concurrency.split(",")], ask, options.repetitions)
    print(markdown(cases))
    result["versions"] = {name: version(name) for name in VERSIONS}
    result["settings"] = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    result["cases"] = [{"concurrency": concurrency, "repetitions": turns} for concurrency, turns in cases.items()]
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    options = arguments()
    if options.make:
        make(options.make[0], Path(options.make[1]))
    elif options.as_transformers:
        serve_transformers(options.model, options.threads)
    else:
        compare(options)


if __name__ == "__main__":
    main()
