"""`onehead` as where the token writer was not compiled: Python writes all tokens. `python -m tests.support.python_streams serve ...`"""

import sys

from commands import cli
from server.supervision import token_writer

if __name__ == "__main__":
    token_writer.library = lambda: None  # type: ignore[assignment]
    sys.exit(cli.main(sys.argv[1:]))
