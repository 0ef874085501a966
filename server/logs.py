"""Log lines as text or JSON, written by a thread: a slow disk or a blocked pipe delays no request.

Invariant: logging never blocks and never raises; lines that cannot be written are counted. No line
contains prompt text unless server.log_prompts is set.
"""

import json
import logging
import queue
import sys
import threading
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from server.errors import escaped

MAX_QUEUED_CHARS, LINE_OVERHEAD = 2**22, 100
"""Characters of the lines that wait to be written, and those that each counts for beside its
own."""
MAX_MESSAGE_CHARS, MAX_TRACE_CHARS = 4096, 2**15
"""Characters of a message, from its beginning, and of a traceback, from its end, that a line
shows."""
EXIT_SECONDS = 1.0

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task serves."""


class Sink(logging.Handler):
    """Formats lines and queues them for a thread that writes them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.num_dropped = 0
        self._stream = stream
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._num_queued = self._num_written = 0
        """Characters, each counted by one thread: by who holds this handler's lock, and by the one
        that writes."""
        self._thread = threading.Thread(target=self._write, daemon=True, name="log")
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
            size = len(line) + LINE_OVERHEAD
            if self._num_queued - self._num_written + size > MAX_QUEUED_CHARS:
                raise queue.Full
            self._num_queued += size
            self._lines.put(line)
        except Exception:  # The queue is full, or the line cannot be formatted.
            self.num_dropped += 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            self._num_written += len(line) + LINE_OVERHEAD
            try:
                self._stream.write(line)
                self._stream.flush()
            except Exception:  # A full disk, a closed pipe, or no standard error.
                self.num_dropped += 1

    def close(self) -> None:
        """Waits up to EXIT_SECONDS for the queued lines to be written. `logging` calls it at
        exit.
        """
        self._lines.put(None)
        self._thread.join(EXIT_SECONDS)
        super().close()


class TextFormatter(logging.Formatter):
    """A line of text. Control characters are escaped, so that a client cannot forge lines."""

    def format(self, record: logging.LogRecord) -> str:
        name = request_id.get()
        when = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        line = f"{when}Z {record.levelname} {record.name}: {escaped(_message(record))}" + (
            f" request={name}" if name else ""
        )
        return f"{line}\n{_trace(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """A line with one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        if name := request_id.get():
            line["request_id"] = name
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = _trace(record.exc_info)
        return json.dumps(line)  # ASCII, as some programs split lines at other Unicode characters.


def configure(level: str, style: str) -> Sink:
    """Sends all log lines of this process to standard error. Returns the sink, which counts dropped
    lines.
    """
    logging.raiseExceptions = False
    sink = Sink(sys.stderr)
    sink.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [sink]
    root.setLevel(level.upper())
    return sink


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return (
        text
        if len(text) <= MAX_MESSAGE_CHARS
        else f"{text[:MAX_MESSAGE_CHARS]}... ({len(text)} characters)"
    )


def _trace(caught: Any) -> str:
    """The lines of a traceback, from what sys.exc_info gives."""
    text = "".join(traceback.format_exception(*caught)).rstrip()
    return "\n".join(f"  {escaped(line)}" for line in text[-MAX_TRACE_CHARS:].split("\n"))
