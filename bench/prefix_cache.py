"""What kept prefixes are worth and what they cost: a first token after a known prefix, hits in conversations, bookkeeping for nothing.

    python -m bench.prefix_cache --output DIR [--model FOLDER] [--parts first_token,trace,bookkeeping] [-- --engine.threads 2]

first_token   on a real server, in turns: a new prefix of 1,500 tokens, and the same with another end; medians and their ratio
trace         on a real server: 500 conversations of 2 to 6 turns, interleaved, under five system prompts; tokens that were hit over
              tokens that were queried by /metrics, beside what a cache would hit that forgets nothing
bookkeeping   in this process, on prompts that have nothing in common: the time in everything that only prefixes need, over all steps

Arguments after `--` are options of the engine and the cache (--cache.pages bounds what is kept). Writes prefix_cache.json into DIR, an
existing folder. Exit status 1 where a hit's first token comes less than 8 times as soon as a miss's, where the trace hits more than there
is or less than 95 % of what whole pages allow, where bookkeeping takes 1 % of the steps or more, or where the server does not end with 0.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.conversations import Conversation, Ideal, make_conversations
from server.config import EMBEDDED_MODEL, load
from tests.support.live import Answer, Ask, Server, ask
from tests.support.report import Check, Found, conclude, progress, show

PARTS = "first_token", "trace", "bookkeeping"
LEAST_RATIO = 8.0
LEAST_OF_IDEAL = 0.95
MOST_BOOKKEEPING = 0.01
QUERIES, HITS = "onehead_prefix_cache_queries_total", "onehead_prefix_cache_hits_total"
ROOM = 1.5
"""Of the pages that bookkeeping's requests hold at once, those that the cache has: few enough that prefixes are evicted."""


async def answered(port: int, prompt: list[int], tokens: int) -> Answer:
    """Raises SystemExit where it fails."""
    answer = await ask(port, Ask("openai", prompt, tokens))
    if answer.failure is not None:
        raise SystemExit(f"a request of {len(prompt)} tokens failed: {answer.failure}")
    return answer


# --- the first token


async def first_tokens(server: Server, options: argparse.Namespace) -> Found:
    """Seconds to the end of requests for one token, and how much of their prompts was hit: the first round is not counted."""
    rng = random.Random(options.seed)
    words = partial(rng.choices, range(options.vocab_size))
    found: Found = {"miss": [], "hit": [], "hit_tokens": {"miss": [], "hit": []}}
    with progress() as bar:
        task = bar.add_task("first token", total=options.rounds)
        for number in range(options.rounds + 1):
            prefix = words(k=options.prefix)
            for kind in ("miss", "hit"):
                before = (await server.metrics())[HITS]
                answer = await answered(server.port, prefix + words(k=options.suffix), tokens=1)
                await server.until_idle()
                if number:
                    found[kind].append(answer.end - answer.sent)
                    found["hit_tokens"][kind].append((await server.metrics())[HITS] - before)
            bar.update(task, completed=number)
    medians = {kind: statistics.median(found[kind]) for kind in ("miss", "hit")}
    return found | {"median": medians, "ratio": medians["miss"] / medians["hit"]}


def first_token_checks(found: Found, options: argparse.Namespace, page_size: int) -> list[Check]:
    rows = [
        (kind, found["median"][kind] * 1e3, min(found[kind]) * 1e3, max(found[kind]) * 1e3, str(set(found["hit_tokens"][kind])))
        for kind in ("miss", "hit")
    ]
    show(("first token", "median, ms", "least", "most", "tokens hit"), rows)
    whole = options.prefix // page_size * page_size
    as_meant = set(found["hit_tokens"]["miss"]) == {0} and set(found["hit_tokens"]["hit"]) == {whole}
    words = f"{found['median']['miss'] * 1e3:.1f} ms to {found['median']['hit'] * 1e3:.1f} ms: {found['ratio']:.1f} times"
    return [
        Check("misses hit nothing, hits every whole page of the prefix", as_meant, f"{whole} tokens"),
        Check(f"a hit's first token comes {LEAST_RATIO:g} times as soon", found["ratio"] >= LEAST_RATIO, words),
    ]


# --- the conversations


async def play(port: int, conversations: list[Conversation], ideal: Ideal, options: argparse.Namespace) -> None:
    """Every turn of every conversation: `open` of them are begun and not ended, and of those `clients` wait for a reply."""
    rng = random.Random(options.seed + 1)
    fresh = iter(conversations)
    idle = [conversation for _, conversation in zip(range(options.open), fresh, strict=False)]
    with progress() as bar:
        task = bar.add_task("turns", total=sum(len(conversation.to_come) for conversation in conversations))

        async def client() -> None:
            while idle:
                conversation = idle.pop(rng.randrange(len(idle)))
                prompt = conversation.next_prompt()
                ideal.ask(prompt)
                answer = await answered(port, prompt, options.reply)
                conversation.tokens = prompt + answer.ids
                ideal.cache.add(conversation.tokens[:-1])  # The last one was drawn and never computed.
                if successor := conversation if conversation.to_come else next(fresh, None):
                    idle.append(successor)
                bar.advance(task)

        async with asyncio.TaskGroup() as group:
            for _ in range(options.clients):
                group.create_task(client())


async def trace(server: Server, options: argparse.Namespace) -> Found:
    """The hit rate beside the ideal ones."""
    info = await server.info()
    longest = info["max_total_tokens"]
    conversations = make_conversations(options.conversations, options.vocab_size, options.reply, longest, options.seed)
    ideal, before, began = Ideal(info["kv_page_size"]), await server.metrics(), time.perf_counter()
    await play(server.port, conversations, ideal, options)
    seconds = time.perf_counter() - began
    await server.until_idle()
    after = await server.metrics()
    queried, hit = after[QUERIES] - before[QUERIES], after[HITS] - before[HITS]
    counts = {"conversations": len(conversations), "metrics_queried_tokens": queried, "hit_tokens": hit, "rate": hit / queried}
    peak = {"pages_cached": after["onehead_kv_pages_cached"], "pages": after["onehead_kv_pages_total"], "seconds": seconds}
    return ideal.told() | counts | peak


def trace_checks(found: Found) -> list[Check]:
    rates = found["rate"], found["ideal_rate_of_pages"], found["ideal_rate"]
    headings = "conversations", "prompts", "queried tokens", "hit rate", "of whole pages at best", "at best"
    counts = str(found["conversations"]), found["prompts"], f"{found['queried_tokens']:,}"
    show(headings, [(*counts, *(f"{rate:.2%}" for rate in rates))])
    words = f"{rates[0]:.2%} of {rates[1]:.2%} ({rates[0] / rates[1]:.2%}); by tokens {rates[2]:.2%}"
    same = found["queried_tokens"] == found["metrics_queried_tokens"]
    return [
        Check("/metrics has counted every token of every prompt once", same, f"{found['metrics_queried_tokens']:,.0f}"),
        Check("hits are no more than there is to hit", rates[0] <= rates[1], words),
        Check(f"hits are {LEAST_OF_IDEAL:.0%} of what whole pages allow", rates[0] >= LEAST_OF_IDEAL * rates[1], words),
    ]


# --- the bookkeeping


class Meter:
    """Seconds in each wrapped function, by name. A wrapped function that another one calls counts towards that one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inside = False

    def wrap(self, owner: type, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)
        label = f"{owner.__name__}.{name}"

        def timed(*arguments: Any) -> Any:
            if self._inside:
                return inner(*arguments)
            self._inside = True
            began = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                self.seconds[label] += time.perf_counter() - began
                self.calls[label] += 1
                self._inside = False

        setattr(owner, name, timed)


def bookkeeping(options: argparse.Namespace) -> Found:
    """The share of all steps that goes into prefixes where no two prompts have one in common."""
    from cache.prefix import PrefixCache
    from commands.bench.closed_loop import ClosedLoop
    from commands.bench.offline import OfflineSettings, load_engine
    from server.engine.scheduler import Scheduler
    from server.engine.sequence import Sequence

    meter = Meter()
    for owner, names in (
        (Scheduler, ("_begin", "_publish", "_unclaim")),
        (PrefixCache, ("match", "prefix", "publish", "retract", "_evicted")),
        (Sequence, ("links",)),
    ):
        for name in names:
            meter.wrap(owner, name)
    settings = load(OfflineSettings, ["--model", str(options.model), *options.engine], "bench.prefix_cache")
    pages = int(ROOM * options.clients * (1 + (options.prompt + options.tokens) / settings.cache.page_size))
    cache = settings.cache.model_copy(update={"pages": pages, "memory": None})
    core, ready = load_engine(settings.model_copy(update={"cache": cache}))
    rng = random.Random(options.seed)
    prompts = [rng.choices(range(ready.vocab_size), k=options.prompt) for _ in range(options.clients * options.rounds)]
    with progress() as bar:
        task = bar.add_task("bookkeeping", total=len(prompts))
        ClosedLoop(core, 2, lambda: None).run(1, [prompts[0][::-1]])
        meter.seconds.clear()
        meter.calls.clear()
        outcomes, steps = ClosedLoop(core, options.tokens, partial(bar.advance, task)).run(options.clients, prompts)
    total = sum(steps.host) + sum(steps.compute)
    return {
        "requests": len(outcomes),
        "failed": sum(outcome.failure is not None for outcome in outcomes),
        "hit_tokens": core.scheduler.num_hit_tokens,
        "evicted_pages": meter.calls["PrefixCache._evicted"],
        "step": steps.figures(),
        "seconds": dict(meter.seconds),
        "calls": dict(meter.calls),
        "share": sum(meter.seconds.values()) / total,
        "share_of_host": sum(meter.seconds.values()) / sum(steps.host),
    }


def bookkeeping_checks(found: Found) -> list[Check]:
    each = sorted(found["seconds"].items(), key=lambda item: -item[1])
    rows = [(name, f"{found['calls'][name]:,}", seconds * 1e3, seconds / found["calls"][name] * 1e6) for name, seconds in each]
    show(("only for prefixes", "calls", "ms", "us a call"), rows, f"{found['step']['count']} steps, {found['evicted_pages']} pages evicted")
    nothing = found["hit_tokens"] == 0 and found["failed"] == 0
    words = f"{found['share']:.3%} of all seconds of all steps, {found['share_of_host']:.1%} of the host's"
    return [
        Check("no prompt has anything in common with another", nothing, f"{found['hit_tokens']} tokens hit, {found['failed']} failed"),
        Check(f"bookkeeping takes less than {MOST_BOOKKEEPING:.0%} of the steps", found["share"] < MOST_BOOKKEEPING, words),
    ]


# --- the command


async def on_server(options: argparse.Namespace, log: Path) -> tuple[dict[str, Any], Found, list[Check]]:
    """The parts that need a server, on one."""
    result: Found = {}
    checks: list[Check] = []
    server = await Server.start(log, "--model", str(options.model), "--server.log_level", "warning", *options.engine)
    try:
        info = await server.info()
        if "first_token" in options.parts:
            if info["max_total_tokens"] < options.prefix + options.suffix + 1:
                raise SystemExit(f"the model holds {info['max_total_tokens']} tokens; --prefix and --suffix are more")
            result["first_token"] = await first_tokens(server, options)
            checks += first_token_checks(result["first_token"], options, info["kv_page_size"])
        if "trace" in options.parts:
            result["trace"] = await trace(server, options)
            checks += trace_checks(result["trace"])
    finally:
        status = await server.stop()
    return info, result, [*checks, Check("the server ends with 0", status == 0, str(status))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="an existing folder")
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL, help="checkpoint folder of 2,048 positions or more")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of first_token; and requests of each client of bookkeeping")
    parser.add_argument("--prefix", type=int, default=1500, help="tokens that a hit has in common with the miss before it")
    parser.add_argument("--suffix", type=int, default=20, help="tokens after that")
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--open", type=int, default=64, help="conversations that are begun and not ended at any time")
    parser.add_argument("--clients", type=int, default=16, help="requests at once, of trace and bookkeeping")
    parser.add_argument("--reply", type=int, default=16, help="tokens of each reply in a conversation")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt of bookkeeping")
    parser.add_argument("--tokens", type=int, default=64, help="and tokens generated after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("engine", nargs="*", help="options of engine and cache, after --")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: there are {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    if options.clients > options.open:
        parser.error(f"--open {options.open} conversations do not keep {options.clients} clients busy")
    if not options.output.is_dir():
        parser.error(f"--output: {options.output} is no folder")
    options.vocab_size = Tokenizer.from_file(str(options.model / "tokenizer.json")).get_vocab_size()
    return options


def main() -> int:
    options = arguments()
    info: dict[str, Any] = {}
    result: Found = {}
    checks: list[Check] = []
    if options.parts != ["bookkeeping"]:
        with tempfile.TemporaryDirectory() as scratch:
            info, result, checks = asyncio.run(on_server(options, Path(scratch) / "server.log"))
    if "bookkeeping" in options.parts:
        result["bookkeeping"] = bookkeeping(options)
        checks += bookkeeping_checks(result["bookkeeping"])
    told = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return conclude("prefix_cache", options.output, info, {"settings": told} | result, checks)


if __name__ == "__main__":
    sys.exit(main())
