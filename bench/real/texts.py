"""The text that perplexity is measured on: 10,000 tokens of a book and 10,000 of code, which come
with every Python.

The book is Python's language reference as `help()` shows it, the code modules of the standard
library. The text differs between versions of Python, so figures are compared within one.
"""

from commands.perplexity import WINDOW, language_reference, modules, windows_of
from server.text.codec import TextCodec

TOKENS = 10_000
"""Of each half."""
MODULES = "argparse.py", "heapq.py", "textwrap.py", "json/decoder.py", "statistics.py"
CHARACTERS = 8 * TOKENS
"""Encoded of each half: more than TOKENS."""


def scored_windows(codec: TextCodec) -> list[list[int]]:
    """Both halves in windows of WINDOW tokens, each opened as a prompt is."""
    halves = language_reference(), "\n".join(modules(MODULES))
    return [
        window for text in halves for window in windows_of(codec, text[:CHARACTERS], WINDOW, TOKENS)
    ]
