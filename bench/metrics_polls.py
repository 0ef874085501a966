"""What a poll of /metrics costs the process that serves HTTP: `python -m bench.metrics_polls [--seconds 4] [--rounds 5]`.

Polls a server without traffic 20 times a second, as llm-d does, and reads the processor time of all threads of the process
from /proc. Rounds with polls and without take turns; what the process does without polls is taken off. /live, with the same path through
HTTP and nothing to write, says how much is HTTP. Prints the median and the range of the rounds, in milliseconds a poll.
"""

import argparse
import http.client
import json
import statistics
import sys
import time
from pathlib import Path

from server.config import EMBEDDED_MODEL
from tests.support.processes import ServerProcess
from tests.support.report import show

HZ = 20
CASES = {
    "/live": ("/live", ()),
    "/metrics": ("/metrics", ()),
    "/metrics, with vLLM's names": ("/metrics", ("--server.metrics_aliases", "true")),
}


def processor_seconds(pid: int) -> float:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def milliseconds_a_poll(server: ServerProcess, path: str, seconds: float) -> tuple[float, int]:
    """(processor time of one poll, bytes of its answer)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    spent, size, num_polls = [], 0, round(seconds * HZ)
    for polls in (False, True):
        before, due = processor_seconds(server.process.pid), time.monotonic()
        for _ in range(num_polls):
            if polls:
                connection.request("GET", path)
                response = connection.getresponse()
                size = len(response.read())
                assert response.status == 200
            due += 1 / HZ
            time.sleep(max(0.0, due - time.monotonic()))
        spent.append(processor_seconds(server.process.pid) - before)
    connection.close()
    return (spent[1] - spent[0]) / num_polls * 1e3, size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows, medians = [], {}
    for name, (path, arguments) in CASES.items():
        server = ServerProcess(EMBEDDED_MODEL, *arguments)
        try:
            milliseconds_a_poll(server, path, 1)
            rounds = [milliseconds_a_poll(server, path, options.seconds) for _ in range(options.rounds)]
        finally:
            server.stop()
        costs = [cost for cost, _ in rounds]
        medians[name] = round(statistics.median(costs), 3)
        rows.append((name, f"{medians[name]:.3f}", f"{min(costs):.3f} to {max(costs):.3f}", str(rounds[-1][1])))
    show(("path", "ms of processor time a poll", "range", "bytes"), rows)
    print(json.dumps(medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
