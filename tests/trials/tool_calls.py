"""Random functions and prompts for servers with every format of calls: every call has to parse and
to satisfy its schema.

    python -m tests.trials.tool_calls [--count 1000] [--first 0] [--format NAME ...] [--kills 0]
    python -m tests.trials.tool_calls --schemas [--format NAME ...] [--kills 0]

`--schemas`: those of tests.support.tool_schemas, as five libraries publish them, each under `auto`,
required and named, and on the model without a format in loops of three turns; prints what is not
followed of them. The models are random, with the marks of a format in their vocabularies, and with
logit_bias for the opening and for what closes something. Each request is sent whole and streamed,
which has to give the same; under `auto` a third time without tools, from the same prompt: the
tokens up to the opening have to be the same. The KV cache holds less than the requests at once
need, so that sequences are preempted. `--kills`: times that each server's engine is killed
meanwhile. Exit status 1 where something is wrong.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from server.text.calls.formats import format_of
from server.text.calls.rules import CallRules
from server.text.codec import TextCodec
from tests.support.drawn_calls import Draws
from tests.support.processes import ServerProcess, engines
from tests.support.tool_checkpoints import TOOL_MODELS, make_tool_checkpoint, make_tool_tokenizer
from tests.support.tool_requests import Findings, SchemaRequests, ToolRequests
from tests.support.tool_schemas import schemas

PAGES = "70"
"""Fewer than AT_ONCE requests need, so that sequences are preempted."""
PATIENT = dict.fromkeys(
    ("server.http.connection.HEAD_SECONDS", "server.http.connection.BODY_SECONDS"), 600.0
)
"""On a busy machine this process may not get to send what it has begun for longer than servers wait
by default, which close the connection then.
"""
LOG_CHARS = 4000
"""Characters of the log of a server that has ended that are shown, from its end."""


async def _findings(
    server: ServerProcess, folder: Path, seeds: range, kills: int, kind: type[ToolRequests]
) -> Findings:
    codec = TextCodec(folder)
    due = {len(seeds) * (number + 1) // (kills + 1) for number in range(kills)}
    num_done = 0

    def report() -> None:
        nonlocal num_done
        num_done += 1
        if num_done % 100 == 0:
            print(f"{num_done} of {len(seeds)} requests", file=sys.stderr, flush=True)
        if num_done in due:
            for pid in engines(server.process.pid):
                os.kill(pid, signal.SIGKILL)

    return await kind(f"http://127.0.0.1:{server.port}", codec, format_of(codec)).run(seeds, report)


def run(name: str, seeds: range, kills: int, kind: type[ToolRequests] = ToolRequests) -> Findings:
    """The requests of these seeds to a server of a format. A server that ends meanwhile is a
    finding.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "server.log").open("w+") as log:
        path = make_tool_checkpoint(name, Path(folder))
        options = ("--cache.pages", PAGES, "--engine.max_running", "16")
        server = ServerProcess(path, *options, constants=PATIENT, stderr=log)
        try:
            findings = asyncio.run(_findings(server, path, seeds, kills, kind))
            status = server.process.poll()
            if status is None:
                counts = {
                    "preemptions": "onehead_preemptions_total",
                    "engines replaced": "onehead_engine_restarts_total",
                }
                findings.counts |= {key: int(server.metric(of)) for key, of in counts.items()}
            else:
                log.seek(0)
                end = log.read()[-LOG_CHARS:]
                findings.wrong.insert(0, f"the server ended with status {status}: {end}")
            return findings
        finally:
            server.stop()


async def relaxed() -> list[str]:
    """What is not followed of each schema, in JSON and in Gemma's syntax."""
    lines = []
    for name in ("plain", "gemma4"):
        with tempfile.TemporaryDirectory() as folder:
            draws = Draws(TextCodec(make_tool_tokenizer(name, Path(folder))))
            for title, schema in schemas():
                rules = CallRules(draws.form, [(title, schema)], False, False)
                lines += [
                    f"{name}: {place or title}" for place in (await draws.compile(rules)).relaxed
                ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="requests of each format")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--format", choices=sorted(TOOL_MODELS), nargs="*", default=[])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--schemas", action="store_true")
    options = parser.parse_args()
    total = Counter[str]()
    for name in options.format or TOOL_MODELS:
        seeds = range(options.first, options.first + options.count)
        kind = SchemaRequests if options.schemas else ToolRequests
        seeds = range(3 * len([*schemas()])) if options.schemas else seeds
        findings = run(name, seeds, options.kills, kind)
        print(
            name,
            json.dumps({**findings.counts, "wrong": len(findings.wrong)}),
            *findings.wrong[:20],
            sep="\n  ",
            flush=True,
        )
        total += findings.counts + Counter(wrong=len(findings.wrong))
    if options.schemas:
        print(*asyncio.run(relaxed()), sep="\n")
    print("total", json.dumps(dict(total)))
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
