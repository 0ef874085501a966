"""What the programs beside this one share: a list of named checks, run one by one, and a last line
that says how many hold.

Imports nothing that a client's environment may lack.
"""

import sys
import traceback
from collections.abc import Callable


def run(client: str, version: str, checks: list[Callable[[str], None]]) -> None:
    """Runs every check with the server's URL, the program's only argument. Exits with 1 where one
    fails.
    """
    url, failed = sys.argv[1], []
    for check in checks:
        try:
            check(url)
        except Exception:
            traceback.print_exc()
            failed.append(check.__name__)
    names = ", ".join(check.__name__.replace("_", " ") for check in checks)
    print(
        f"{client} {version}: {names}: {'failed: ' + ', '.join(failed) if failed else 'all hold'}"
    )
    sys.exit(bool(failed))
