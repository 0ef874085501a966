"""The progress of a command, on standard error: a bar on a terminal, elsewhere a line now and
then.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS = 10.0
"""From one line to the next."""


@contextmanager
def progress(*columns: ProgressColumn, transient: bool = False) -> Iterator[Progress]:
    """rich's Progress, with further columns before the times. A file or pipe gets its lines of the
    tasks that have not ended.
    """
    parts = TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn()
    times = TimeElapsedColumn(), TimeRemainingColumn()
    console, over = Console(stderr=True), threading.Event()

    def tell() -> None:
        while not over.wait(SECONDS):
            open_tasks = [task for task in shown.tasks if not task.finished]
            console.print(shown.make_tasks_table(open_tasks))

    shown = Progress(*parts, *columns, *times, console=console, transient=transient, expand=True)
    with shown:
        if not console.is_terminal or console.is_dumb_terminal:
            threading.Thread(target=tell, daemon=True).start()
        try:
            yield shown
        finally:
            over.set()
