"""Rules: which fault strikes where and how often. JSON on a launcher's command line, an environment
variable for its children.

Knows nothing of what a fault does: faulty_server and faulty_worker each carry out those of their
own process. Strikes are counted in files, because the process that is struck seldom lives to
remember it.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "FAULT_RULES"
FOLDER_VARIABLE = "FAULT_FOLDER"


@dataclass(frozen=True, slots=True)
class Rule:
    """One fault. In an engine it needs a step with a sequence whose prompt holds `marker` (any
    sequence, where that is empty).
    """

    do: str
    marker: str = ""
    after: int = 0
    """The sequence has so many tokens of output, or so many frames have gone through the pipe."""
    times: int | None = None
    """At most so often, in all engines of a server together."""
    from_engine: int = 1
    """Not in engines before this one, counted from 1."""
    rows: int = 0
    """Steps of more rows than this."""
    seconds: float = 0.0
    token: int = -1
    error: str = ""


class Rules:
    """The rules of this process, and what has become of them so far."""

    def __init__(self, rules: list[Rule], folder: Path) -> None:
        self.rules = rules
        self.folder = folder
        self.engine = 0

    @classmethod
    def of_environment(cls) -> "Rules":
        return cls(
            [Rule(**values) for values in json.loads(os.environ[VARIABLE])],
            Path(os.environ[FOLDER_VARIABLE]),
        )

    def count_engine(self) -> None:
        """Called once by every engine: it is the n-th from now on."""
        self.engine = self._count("engines")

    def named(self, *names: str) -> Iterator[Rule]:
        """Those that say what to do by one of these words, and hold in this engine."""
        return (
            rule
            for rule in self.rules
            if rule.do in names and rule.from_engine <= max(1, self.engine)
        )

    def strike(self, rule: Rule) -> bool:
        """Whether the fault happens now; if so it is counted, and on disk before anything else."""
        count = self._count(f"rule-{self.rules.index(rule)}")
        return rule.times is None or count <= rule.times

    def _count(self, name: str) -> int:
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, b".")
            return os.fstat(file).st_size
        finally:
            os.close(file)


def never_struck(rules: tuple[Rule, ...], folder: Path) -> list[Rule]:
    """Rules that a server was given and that did nothing: its case has shown nothing."""
    return [rule for number, rule in enumerate(rules) if not (folder / f"rule-{number}").exists()]


def as_json(rules: tuple[Rule, ...]) -> str:
    return json.dumps([asdict(rule) for rule in rules])
