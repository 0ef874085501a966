"""Log lines: whole, one each, and no matter of life and death."""

import io
import json
import logging
import subprocess
import sys
import threading
from typing import Any

import pytest

from server import logs
from tests.support.paths import ROOT
from tests.support.processes import wait_until


def record(message: str, *arguments: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("onehead.test", logging.WARNING, __file__, 1, message, arguments, None)
    made.__dict__.update(extra)
    return made


def test_a_json_line_has_the_request_and_its_fields() -> None:
    logs.request_id.set("abc")
    line = json.loads(logs.JsonFormatter().format(record("took %d", 3, fields={"status": 200})))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "onehead.test",
        "message": "took 3",
        "request_id": "abc",
        "status": 200,
    }
    logs.request_id.set("")


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()])
def test_what_a_client_wrote_forges_no_line(formatter: logging.Formatter) -> None:
    line = formatter.format(record("path %s", "x\n2026 ERROR forged\x1b[31m\u2028\u202e"))
    assert "\n" not in line and "\x1b" not in line and line.isprintable()


class Disk(io.StringIO):
    """Writes only while there is room."""

    room = True

    def write(self, text: str) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    disk = Disk()
    sink = logs.Sink(disk)
    sink.emit(record("first"))
    wait_until(lambda: "first" in disk.getvalue(), "the first line")
    disk.room = False
    sink.emit(record("second"))
    wait_until(lambda: sink.num_dropped == 1, "the second line's loss")
    disk.room = True
    sink.emit(record("third"))
    wait_until(lambda: "third" in disk.getvalue(), "the third line")
    assert "second" not in disk.getvalue()


def test_a_pipe_that_nobody_reads_holds_up_nobody() -> None:
    open_again = threading.Event()

    class Pipe(io.StringIO):
        def write(self, text: str) -> int:
            open_again.wait()
            return super().write(text)

    pipe = Pipe()
    sink = logs.Sink(pipe)
    sink.setFormatter(logs.JsonFormatter())
    size = len(sink.format(record("line %s", "x" * 1000))) + 1 + logs.LINE_OVERHEAD
    most = logs.MAX_QUEUED_CHARS // size
    for _ in range(most + 100):
        sink.emit(record("line %s", "x" * 1000))
    assert 98 <= sink.num_dropped <= 100  # One may have been taken already.
    open_again.set()
    wait_until(lambda: pipe.getvalue().count("line ") >= most, "what was queued")
    dropped = sink.num_dropped
    for _ in range(100):
        sink.emit(record("line %s", "x" * 1000))
    wait_until(lambda: pipe.getvalue().count("line ") >= most + 100, "what was logged afterwards")
    assert sink.num_dropped == dropped


@pytest.mark.parametrize("letter", ["x", "\x01", "\u20ac", "\U0001f600"])
@pytest.mark.parametrize("form", [logs.TextFormatter, logs.JsonFormatter])
def test_a_line_is_bounded_whatever_it_shows(form: type[logging.Formatter], letter: str) -> None:
    try:
        raise ValueError(letter * 10**6)
    except ValueError:
        failed = record("failed: %s", letter * 10**6)
        failed.exc_info = sys.exc_info()
    line = form().format(failed)
    assert (
        len(line) < 12 * (logs.MAX_MESSAGE_CHARS + logs.MAX_TRACE_CHARS) + 500
        and "(1000008 characters)" in line
    )


def test_a_line_that_cannot_be_formatted_is_dropped() -> None:
    sink = logs.Sink(io.StringIO())
    sink.emit(record("%d", "no number"))
    assert sink.num_dropped == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_a_process_says_before_it_is_gone_at_once_is_out(form: str) -> None:
    """As an engine that fails does: `atexit` is not asked then."""
    last = f"""
import logging, os
from server import logs
logs.configure("info", "{form}")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("onehead").exception("the engine has failed")
logging.shutdown()
os._exit(1)
"""
    done = subprocess.run(
        [sys.executable, "-c", last],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (
        done.returncode == 1
        and "the engine has failed" in done.stderr
        and "ZeroDivisionError" in done.stderr
    )
