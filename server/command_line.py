"""The arguments of a command as a source of settings, and its --help: type words and defaults as they are written on the command line.

Names of options are taken with hyphens as with underscores. It knows the library that parses, and no option.
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
}
TYPES |= {"list[int]": "N,N,...", "list[float]": "NUMBER,..."}
DEFAULTS = {NO_NONE: "none", "": "none", "None": "none", "()": "none", "[]": "none", "True": "true", "False": "false"}
EXIT_USAGE = 2


def command_line(cls: type[BaseSettings], argv: list[str], prog: str) -> CliSettingsSource[Any]:
    """The arguments as a source of settings. A usage error exits with 2.

    An option whose name is in the class variable `by_position` may be given as the first argument without its name too.
    """
    usage, names = [prog, "[OPTIONS]"], dict[str, str]()

    def add_argument(parser: Any, *flags: str, **kwargs: Any) -> None:
        kwargs = _as_written(kwargs)
        if flags == (f"--{getattr(cls, 'by_position', '')}",):
            dest = flags[0][2:]
            required = kwargs.pop("required")
            usage.append(dest.upper() if required else f"[{dest.upper()}]")
            either = parser.add_mutually_exclusive_group(required=required)
            either.add_argument(dest, metavar=dest.upper(), nargs="?", default=SUPPRESS, help=f"the same as {flags[0]}")
            parser = either
        elif not flags[0].startswith("-"):
            usage.append(kwargs["metavar"])
        elif kwargs.get("required"):
            usage.extend((flags[0], kwargs["metavar"]))
        names.update({flag.lstrip("-").replace("-", "_"): flag for flag in parser.add_argument(*flags, **kwargs).option_strings})

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
    """The arguments with every option spelt as it was declared (--log-level and --log_level alike). An unknown option exits with 2, in a
    line that names the nearest one.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    return [_option(argument, names, prog) if argument.startswith("--") else argument for argument in argv[:end]] + argv[end:]


def _option(argument: str, names: dict[str, str], prog: str) -> str:
    name, equals, value = argument.partition("=")
    key = name[2:].replace("-", "_")
    if " " in name:  # A text, such as a prompt.
        return argument
    if key in names:
        return names[key] + equals + value
    print(f"{prog}: no such option {name}{nearest(key, names) or '; --help lists all'}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


def nearest(key: str, known: dict[str, str]) -> str:
    """Words that suggest the known name nearest to `key`, by its whole or its last part; empty if none is near. `known`: name -> how it is
    written.
    """
    near = {name.rpartition(".")[2]: written for name, written in known.items()} | known
    close = get_close_matches(key, near, 1)
    return f"; did you mean {near[close[0]]}?" if close else ""


def _as_written(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Rewrites the help of an argument: types and defaults as they are typed on a command line, not as Python shows them. `; default: X` in
    the description of an option replaces the default that the library shows.
    """
    if "metavar" in kwargs:
        kwargs["metavar"] = TYPES.get(kwargs["metavar"], kwargs["metavar"])
    text, _, default = kwargs["help"].rpartition(" (default: ")
    if text:
        text, _, stated = text.partition("; default: ")
        default = default.removesuffix(")")
        kwargs["help"] = f"{text} (default: {stated or DEFAULTS.get(default, default.strip('[]').replace(', ', ','))})"
    return kwargs
