"""History: what was sent, what came back and what was broken meanwhile, as JSON lines in the order
in which it happened.

Invariant: a record is on disk when `add` returns, so the history of a case that crashes is whole up
to the crash. Judging is tests.faults.checker's; this knows only time and order.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any


class History:
    """One case's records; `add` may be called from any thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._requests = 0

    def add(self, kind: str, **what: Any) -> None:
        """Notes something that happened now."""
        with self._lock:
            record = {"t": round(time.monotonic(), 6), "kind": kind, **what}
            self.records.append(record)
            if not self._file.closed:
                self._file.write(json.dumps(record) + "\n")

    def act(self, act: str, **what: Any) -> None:
        """Notes something that the nemesis did."""
        self.add("act", act=act, **what)

    def new_request(self) -> int:
        with self._lock:
            self._requests += 1
            return self._requests

    def of(self, kind: str) -> list[dict[str, Any]]:
        with self._lock:
            return [record for record in self.records if record["kind"] == kind]

    def close(self) -> None:
        with self._lock:
            self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a history that was written."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
