"""What a live test or a bench asks of its figures. Plain data, for machines that have no package to
print it with.
"""

from dataclasses import dataclass
from typing import Any

Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """A requirement: whether it holds, and what was found."""

    what: str
    holds: bool
    found: str
