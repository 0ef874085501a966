"""The arguments of a command as a source of settings, and its --help: type words and defaults as they are written on the command line.

It knows the library that parses, and no option.
"""

import inspect
from argparse import ArgumentParser
from typing import Any

from pydantic_settings import BaseSettings, CliSettingsSource

# The library reads "None" and "null" as no value, and a prompt may be just that.
NO_NONE = "\0"
TYPES = {"Path": "PATH", "str": "TEXT", "int": "N", "float": "NUMBER", "bool": "{true,false}", "Size": "SIZE", "tuple[str,...]": "A,B,..."}
TYPES |= {"list[int]": "N,N,...", "list[float]": "NUMBER,..."}
DEFAULTS = {NO_NONE: "none", "": "none", "None": "none", "()": "none", "[]": "none", "True": "true", "False": "false"}


def command_line(cls: type[BaseSettings], argv: list[str], prog: str, implicit_flags: bool = False) -> CliSettingsSource[Any]:
    """The arguments as a source of settings. With `implicit_flags` a boolean is a flag that takes no value. A usage error exits with 2."""
    usage = [prog, "[OPTIONS]"]

    def add_argument(parser: ArgumentParser, *names: str, **kwargs: Any) -> None:
        kwargs = _as_written(kwargs)
        if not names[0].startswith("-"):
            usage.append(kwargs["metavar"])
        elif kwargs.get("required"):
            usage.extend((names[0], kwargs["metavar"]))
        parser.add_argument(*names, **kwargs)

    source: CliSettingsSource[Any] = CliSettingsSource(
        cls,
        cli_prog_name=prog,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_enforce_required=True,
        cli_parse_none_str=NO_NONE,
        cli_implicit_flags=implicit_flags,
        add_argument_method=add_argument,
    )
    source.root_parser.usage = " ".join(usage)
    source.root_parser.description = inspect.getdoc(cls)
    return source(args=argv)


def _as_written(kwargs: dict[str, Any]) -> dict[str, Any]:
    """An argument whose help names Python's types and values -> one that names them as they are typed. A default that the description
    states stands in the place of Python's.
    """
    if "metavar" in kwargs:
        kwargs["metavar"] = TYPES.get(kwargs["metavar"], kwargs["metavar"])
    text, _, default = kwargs["help"].rpartition(" (default: ")
    if text:
        text, _, stated = text.partition("; default: ")
        default = default.removesuffix(")")
        kwargs["help"] = f"{text} (default: {stated or DEFAULTS.get(default, default.strip('[]').replace(', ', ','))})"
    return kwargs
