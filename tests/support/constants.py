"""A command with other values of named constants, for tests that start it as a process:

    python -m tests.support.constants '{"server.http.connection.HEAD_SECONDS": 1}' MODULE serve ...

They are set in the modules and classes that hold them before the command begins, and its forks
inherit them; an engine, which is a program of its own, has the product's.
"""

import json
import pkgutil
import runpy
import sys


def launcher(values: dict[str, float], *command: str) -> tuple[str, ...]:
    """Module and arguments that run another module, and arguments of its own, so."""
    return "tests.support.constants", json.dumps(values), *command


def main() -> None:
    values, module, *arguments = sys.argv[1:]
    for name, value in json.loads(values).items():
        owner, _, constant = name.rpartition(".")
        holder = pkgutil.resolve_name(owner)
        assert hasattr(holder, constant), name
        setattr(holder, constant, value)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
