"""The arguments of a command as a source of settings, and its --help: type words and defaults as
they are written on the command line.

Names of options are taken with hyphens as with underscores. It knows the library that parses, and
no option.
"""

import inspect
import sys
from argparse import SUPPRESS
from difflib import get_close_matches
from typing import Any

from pydantic_settings import BaseSettings, CliSettingsSource

# By default pydantic-settings reads "None" and "null" as None; a prompt may be one of these words.
NO_NONE = "\0"
TYPES = {
    "Path": "PATH",
    "str": "TEXT",
    "int": "N",
    "float": "NUMBER",
    "bool": "{true,false}",
    "Size": "SIZE",
    "tuple[str,...]": "A,B,...",
    "tuple[{IPv4Network,IPv6Network},...]": "A,B,...",
    "list[int]": "N,N,...",
    "list[float]": "NUMBER,...",
}
DEFAULTS = {
    NO_NONE: "none",
    "": "none",
    "None": "none",
    "()": "none",
    "[]": "none",
    "True": "true",
    "False": "false",
}
EXIT_USAGE = 2
OTHER_NAMES = """
--model = model_id m hf hf_repo
--model ORG/NAME@REVISION = revision
--model ORG/NAME:FILE.gguf = hf_file hff
--host = hostname
--server.model_name = served_model_name alias a
--engine.max_context = max_model_len max_total_tokens max_input_length max_input_tokens
--engine.max_context = ctx_size c context_length
--engine.max_running = max_num_seqs max_batch_size parallel np max_running_requests
--engine.step_tokens = max_num_batched_tokens max_batch_prefill_tokens batch_size b ubatch_size ub
--engine.dtype = dtype
--engine.quantization = quantization quantize
--engine.threads = threads t threads_batch tb
--engine.device cuda = n_gpu_layers gpu_layers ngl
--engine.device = device dev
--engine.speculation ngram = speculative_config speculate spec_type
--engine.speculation draft --engine.draft = model_draft md hf_repo_draft hfrd
--cache.memory = gpu_memory_utilization cuda_memory_fraction max_batch_total_tokens
--cache.memory = mem_fraction_static kv_cache_memory_bytes
--cache.page_size = block_size
--cache.pages = num_gpu_blocks_override
--cache.dtype fp8 = kv_cache_dtype cache_type_k cache_type_v ctk ctv
--server.api_keys, of digests = api_key
--server.max_waiting = max_concurrent_requests
--server.cors_origins = allowed_origins cors_allow_origin
--server.root_path = root_path api_prefix
--server.drain_timeout = shutdown_timeout
--server.chat_template = chat_template chat_template_file
--server.tls_certificate = ssl_certfile ssl_cert_file
--server.tls_key = ssl_keyfile ssl_key_file
--server.tracing_endpoint = otlp_traces_endpoint otlp_endpoint
--server.log_format json = json_output
--server.log_level = uvicorn_log_level
always 16 = max_stop_sequences
always on = enable_prefix_caching enable_chunked_prefill cont_batching cb flash_attn fa
never done: code of a checkpoint is not run = trust_remote_code
a server for each GPU = tensor_parallel_size tp pipeline_parallel_size data_parallel_size num_shard
not served: no LoRA adapters = enable_lora lora lora_adapters
"""
"""Options as they are called here = by vLLM, text-generation-inference, llama.cpp and SGLang.
scripts/serve reads this table too.
"""


def command_line(cls: type[BaseSettings], argv: list[str], prog: str) -> CliSettingsSource[Any]:
    """The arguments as a source of settings. A usage error exits with 2.

    An option whose name is in the class variable `by_position` may be given as the first argument
    without its name too.
    """
    usage, names = [prog, "[OPTIONS]"], dict[str, str]()

    def add_argument(parser: Any, *flags: str, **kwargs: Any) -> None:
        kwargs = _as_written(kwargs)
        if flags == (f"--{getattr(cls, 'by_position', '')}",):
            dest = flags[0][2:]
            required = kwargs.pop("required")
            usage.append(dest.upper() if required else f"[{dest.upper()}]")
            either = parser.add_mutually_exclusive_group(required=required)
            either.add_argument(
                dest,
                metavar=dest.upper(),
                nargs="?",
                default=SUPPRESS,
                help=f"the same as {flags[0]}",
            )
            parser = either
        elif not flags[0].startswith("-"):
            usage.append(kwargs["metavar"])
        elif kwargs.get("required"):
            usage.extend((flags[0], kwargs["metavar"]))
        names.update(
            {
                flag.lstrip("-").replace("-", "_"): flag
                for flag in parser.add_argument(*flags, **kwargs).option_strings
            }
        )

    source: CliSettingsSource[Any] = CliSettingsSource(
        cls,
        cli_prog_name=prog,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_enforce_required=True,
        cli_parse_none_str=NO_NONE,
        add_argument_method=add_argument,
    )
    source.root_parser.usage = " ".join(usage)
    source.root_parser.description = inspect.getdoc(cls)
    return source(args=_as_declared(argv, names, prog))


def _as_declared(argv: list[str], names: dict[str, str], prog: str) -> list[str]:
    """The arguments with every option spelt as it was declared (--log-level and --log_level alike).
    An unknown option exits with 2, in a line that names the nearest one.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    return [
        _option(argument, names, prog) if argument.startswith("-") else argument
        for argument in argv[:end]
    ] + argv[end:]


def _option(argument: str, names: dict[str, str], prog: str) -> str:
    name, equals, value = argument.partition("=")
    key = name.lstrip("-").replace("-", "_")
    # A text, such as a prompt; or a short name, which is the library's business or another
    # server's.
    if " " in name or not (name.startswith("--") or _elsewhere(key, names)):
        return argument
    if key in names:
        return names[key] + equals + value
    print(
        f"{prog}: no such option {name}{nearest(key, names) or '; --help lists all'}",
        file=sys.stderr,
    )
    raise SystemExit(EXIT_USAGE)


def nearest(key: str, known: dict[str, str]) -> str:
    """Words that suggest the known name that is meant by `key`: that of an option of another
    server, or the nearest one, by its whole or its last part; empty if there is none. `known`: name
    -> how it is written.
    """
    if ours := _elsewhere(key.rpartition(".")[2], known):
        return f"; here it is {ours}"
    near = {name.rpartition(".")[2]: written for name, written in known.items()} | known
    close = get_close_matches(key, near, 1)
    return f"; did you mean {near[close[0]]}?" if close else ""


def _elsewhere(key: str, known: dict[str, str]) -> str:
    """An option of another server as it is called here; empty if it is no such, or not known."""
    for line in OTHER_NAMES.split("\n"):
        ours, _, theirs = line.partition(" = ")
        option = ours.replace(",", "").split(" ")[0]
        if key in theirs.split() and (not option.startswith("--") or option[2:] in known):
            return ours
    return ""


def _as_written(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Rewrites the help of an argument: types and defaults as they are typed on a command line, not
    as Python shows them. `; default: X` in the description of an option replaces the default that
    the library shows.
    """
    if "metavar" in kwargs:
        kwargs["metavar"] = TYPES.get(kwargs["metavar"], kwargs["metavar"])
    text, _, default = kwargs["help"].rpartition(" (default: ")
    if text:
        text, _, stated = text.partition("; default: ")
        default = default.removesuffix(")")
        kwargs["help"] = (
            f"{text} (default: "
            f"{stated or DEFAULTS.get(default, default.strip('[]').replace(', ', ','))})"
        )
    return kwargs
