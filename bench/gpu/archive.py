"""Archive: one zip file with everything a run has found, rewritten as it grows.

Invariant: at any moment the file is a whole archive, and it holds what was put in before; a process
that is killed while it writes leaves the file as it was. One process writes at a time: a part's
while it runs, else the run's. It knows nothing of what is measured.
"""

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.checks import Found

RECORD = "gpu.json"
"""The member that holds the figures."""


class Archive:
    """The archive at a path, as this process has read and written it. `record` is the member
    gpu.json.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._members = read(path) if path.exists() else {}
        self.record: Found = json.loads(self._members.get(RECORD, "{}"))

    def write(self, members: Mapping[str, bytes] | None = None) -> None:
        """Adds or replaces these members, and the record as it is now."""
        self._members |= members or {}
        self._members[RECORD] = (json.dumps(self.record, indent=1) + "\n").encode()
        unfinished = self.path.with_name(f"{self.path.name}.new")
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in self._members.items():
                file.writestr(name, content)
        os.replace(unfinished, self.path)


def read(path: Path) -> dict[str, bytes]:
    """Every member; raises zipfile.BadZipFile where one is not as it was written."""
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}
