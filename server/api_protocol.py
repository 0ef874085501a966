"""Messages between the front process, which has the supervisor and admission, and the API processes, which serve HTTP.

Invariant: everything on a link is the msgpack encoding of one of these structs, or of those of server.protocol that tell of sequences. This
module knows nothing of sockets and HTTP.
"""

from server.protocol import Part


class ApiStats(Part, frozen=True):
    """What API processes alone know, for metrics."""

    event_loop_lag: float = 0.0
    streams_detached: int = 0
    resume_bytes: int = 0
    log_lines_dropped: int = 0
    refused: int = 0
