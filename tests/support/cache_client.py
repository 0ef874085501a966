"""A viewer's state of the KV cache, from the events of /monitor, and its comparison with the
engine's own.

Invariant: it takes events as a browser does, one after the other, and raises ValueError for one
that cannot follow the one before. It imports nothing of the server but the numbers of kinds.
"""

from collections.abc import Sequence
from typing import Any

from server.protocol import CACHED, FREE, OWNED, SHARED

UNOWNED = (-1, 0)
ROW = (
    "id",
    "request",
    "state",
    "num_prompt",
    "num_cached",
    "num_computed",
    "num_output",
    "num_pages",
    "num_preemptions",
)
MOST_WAITING = 1000


class CacheClient:
    """What one viewer knows. `cells`: for each page its kind, owner and position."""

    def __init__(self) -> None:
        self.engine = self.view = self.step = -1
        self.cells: list[tuple[int, int, int]] = []
        self.sequences: dict[int, dict[str, Any]] = {}
        self.num_events = 0

    def take(self, event: dict[str, Any]) -> None:
        """The data of a cache event."""
        self.num_events += 1
        if event["engine"] == self.engine and (
            event["view"] <= self.view or event["step"] < self.step
        ):
            raise ValueError(f"view {event['view']} after view {self.view} of engine {self.engine}")
        self.engine, self.view, self.step = event["engine"], event["view"], event["step"]
        self.cells = [(FREE, *UNOWNED)] * event["num_pages"]
        for first, count, kind, owner, position in zip(*[iter(event["cells"])] * 5, strict=True):
            if not 0 <= first < first + count <= len(self.cells):
                raise ValueError(f"a run of {count} pages from {first} on, of {len(self.cells)}")
            self.cells[first : first + count] = [(kind, owner, position)] * count
        self.sequences = {row[0]: dict(zip(ROW, row, strict=True)) for row in event["sequences"]}

    def problems(self, dump: dict[str, Any], stacks: Sequence[int] = (1,)) -> list[str]:
        """How its state differs from a dump of the same view, in words. `stacks`: pages for a block
        of tokens in each group of layers.
        """
        listed = {int(id): sequence for id, sequence in dump["sequences"].items()}
        expected = self._expected(dump, listed, stacks)
        found = [
            f"page {page} is {cell}, not {right}"
            for page, (cell, right) in enumerate(zip(self.cells, expected, strict=True))
            if cell != right
        ]
        if self.sequences.keys() != listed.keys() and len(listed) <= MOST_WAITING:
            found.append(f"sequences {sorted(self.sequences)} are known, {sorted(listed)} open")
        for id, known in self.sequences.items():
            sequence = listed.get(id, {})
            right = {name: sequence.get(name) for name in ("num_computed", "num_output")}
            right["num_pages"] = sum(
                page >= 0 for group in sequence.get("pages", ()) for page in group
            )
            if right != {name: known[name] for name in right} or (
                sequence.get("running") and known["state"] != "running"
            ):
                found.append(f"sequence {id} is {known}, not {sequence}")
        return found

    def _expected(
        self, dump: dict[str, Any], listed: dict[int, Any], stacks: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        holders: dict[int, tuple[int, int]] = {}
        for id in sorted(listed, reverse=True):
            for group, count in zip(listed[id]["pages"], stacks, strict=True):
                for place, page in enumerate(group):
                    if page >= 0:
                        holders[page] = id, place // count * dump["page_size"]
        cached = set(dump["cached"])
        return [
            (SHARED if owners > 1 else OWNED, *holders.get(page, UNOWNED))
            if owners
            else (CACHED if page in cached else FREE, *UNOWNED)
            for page, owners in enumerate(dump["owners"])
        ]
