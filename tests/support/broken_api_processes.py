"""`onehead` whose API processes end before they serve: `python -m tests.support.broken_api_processes serve ...`."""

import sys

from commands import cli
from server.api_processes import processes

if __name__ == "__main__":
    processes.MODULE = "platform"  # Prints a line, and ends.
    sys.exit(cli.main(sys.argv[1:]))
