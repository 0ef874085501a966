"""The `onehead` command. Finds the subcommand and imports what that one needs; `--help` imports no
torch and nothing heavy.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from pathlib import Path

from model.spec import CheckpointError, OptionError
from server.errors import ConfigurationError, OneheadError, one_line

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
REFUSALS = (OneheadError, CheckpointError, OptionError)
"""Errors whose messages are for the user."""


def _status(error: Exception) -> int:
    if isinstance(error, OptionError):
        return EXIT_USAGE
    return error.exit_code if isinstance(error, OneheadError) else ConfigurationError.exit_code


def _check(folder: Path, drafts: bool = False, pools: bool = False) -> None:
    """Raises CheckpointError for a folder that would be refused by its config.json, weights or not.
    `drafts`: it is to draft tokens for another model; `pools`: it may make vectors of texts.
    """
    from model.checkpoint.families import read_spec

    read_spec(folder, False, drafts, pools)  # The engine reads the same again, and warns then.


def _serve(argv: list[str]) -> int:
    # It reads the file of keys again, which is not read yet.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from server.config import ServeSettings, load

    settings = load(ServeSettings, argv, "onehead serve")
    from server import logs

    sink = logs.configure(settings.server.log_level, settings.server.log_format)
    from server.hub.download import resolved

    try:
        found = resolved(settings, partial(_check, pools=True))
        from server.serve import serve

        return asyncio.run(serve(found, sink))
    except REFUSALS as error:
        if settings.server.log_format == "text":
            raise
        # As the rest of this output: JSON.
        logging.getLogger("onehead").error("%s", one_line(error))
        return _status(error)


def _generate(argv: list[str]) -> int:
    from commands.generate import GenerateSettings, generate
    from server.config import load
    from server.hub.download import resolved

    return asyncio.run(generate(resolved(load(GenerateSettings, argv, "onehead generate"), _check)))


def _batch(argv: list[str]) -> int:
    from commands.batch import BatchSettings, batch, check_files
    from server.config import load
    from server.hub.download import resolved

    settings = load(BatchSettings, argv, "onehead batch")
    lines = check_files(settings)
    return asyncio.run(batch(resolved(settings, _check), lines))


def _bench(argv: list[str]) -> int:
    from server.config import load

    if "--offline" in argv:
        from commands.bench import offline
        from server.hub.download import resolved

        rest = [argument for argument in argv if argument != "--offline"]
        return offline.bench(
            resolved(load(offline.OfflineSettings, rest, "onehead bench --offline"), _check)
        )
    from commands.bench.bench import BenchSettings, bench

    return asyncio.run(bench(load(BenchSettings, argv, "onehead bench")))


def _top(argv: list[str]) -> int:
    from commands.top import TopSettings, top
    from server.config import load

    return top(load(TopSettings, argv, "onehead top"))


def _train(argv: list[str]) -> int:
    from commands.options import TrainOptions, load_options

    options = load_options(TrainOptions, argv, "onehead train")
    from commands.train.train import train
    from server.hub.download import resolve

    init = options.init and resolve(options.init, check=_check)
    train(options.model_copy(update={"init": init}))
    return 0


def _compare(argv: list[str]) -> int:
    from commands.options import CompareOptions, load_options

    options = load_options(CompareOptions, argv, "onehead compare")
    from commands.compare.compare import compare

    compare(options)
    return 0


def _convert(argv: list[str]) -> int:
    from commands.options import ConvertOptions, load_options

    options = load_options(ConvertOptions, argv, "onehead convert")
    from commands.convert.convert import convert, make_plan
    from server.hub.download import resolve

    # A tokenizer.json is made without weights.
    weights = options.output is not None
    model = resolve(options.model, weights=weights, pickles=True, check=make_plan)
    convert(options.model_copy(update={"model": model}))
    return 0


def _plan(argv: list[str]) -> int:
    from commands.options import PlanOptions, load_options

    options = load_options(PlanOptions, argv, "onehead plan")
    from commands.plan import plan
    from server.hub.download import resolve

    plan(options.model_copy(update={"model": resolve(options.model, weights=False)}))
    return 0


COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "serve": ("serve a checkpoint over HTTP", _serve),
    "generate": ("stream the continuation of a prompt to the terminal", _generate),
    "batch": ("answer a file of requests, in OpenAI's batch format", _batch),
    "bench": (
        "put load on a running server, or an engine without one, and report rates and latencies",
        _bench,
    ),
    "top": ("watch a running server's requests, tokens, KV cache pages and latencies", _top),
    "plan": ("what a checkpoint takes, and how many sequences fit", _plan),
    "convert": (
        "make a one-head checkpoint of one with several heads, or a tokenizer.json",
        _convert,
    ),
    "train": ("train a small checkpoint, or an existing one further", _train),
    "compare": ("multi-head against multi-query attention, in bytes and seconds", _compare),
}


def usage() -> str:
    lines = [f"  {name:10} {summary}" for name, (summary, _) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: onehead COMMAND [OPTIONS]",
            "",
            "Text generation with Multi-Query Attention.",
            "",
            *lines,
            "",
            "onehead COMMAND --help lists the options of one; onehead --version prints "
            "the version.",
        ]
    )


def _without_command(argv: list[str]) -> int:
    """Handles --help, --version, no command and unknown commands; returns the exit status."""
    first = argv[0] if argv else ""
    if first in ("", "-h", "--help", "help"):
        print(usage(), file=sys.stdout if first else sys.stderr)
    elif first == "--version":
        print(f"onehead {version('onehead')}")
    else:
        close = get_close_matches(first, COMMANDS, 1)
        print(
            f"onehead: no command {first!r}; "
            f"{f'did you mean {close[0]}?' if close else 'onehead --help lists all'}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return 0 if first else EXIT_USAGE


def main(argv: list[str] | None = None) -> int:
    """Runs one command; its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in COMMANDS:
        return _without_command(argv)
    try:
        return COMMANDS[argv[0]][1](argv[1:])
    except REFUSALS as error:
        print(f"onehead {argv[0]}: {one_line(error)}", file=sys.stderr)
        return _status(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The program that read our output has closed it. Python would complain once more when it
        # flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
