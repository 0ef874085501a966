"""ApiProcesses: starts the API processes, replaces those that end, and passes messages between them and the front process's engine.

Each listens on a socket of its own on the same address (SO_REUSEPORT), of which this process keeps a copy: connections wait in it while an
API process is replaced. Invariant: every API process has ended when `ended` returns. It knows no HTTP.
"""

import asyncio
import logging
import socket
import subprocess
import time

from server import api_protocol, protocol
from server.api_processes.link import Link
from server.api_processes.open_requests import RemoteSequence
from server.api_processes.process_requests import ProcessRequests
from server.api_processes.settings import ApiSettings
from server.api_processes.stream_records import StreamRecords
from server.api_protocol import ApiStats
from server.child_process import WORKING_DIRECTORY, child_command
from server.config import ServerSection
from server.drain import FLUSH_SECONDS
from server.errors import ApiProcessesGaveUp, OneheadError
from server.generation.engine_client import LocalEngineClient
from server.generation.request import Progress
from server.http.stream_buffer import Retention
from server.service import SupervisedEngine

log = logging.getLogger("onehead")

MODULE = "server.api_processes.worker"
MAX_UNSENT_BYTES = 64 * 2**20
"""An API process that leaves so much unread is killed."""
MAX_FAILED_STARTS = 5
"""The server is given up after so many API processes in a row that ended before they served."""
QUICK_SECONDS, PAUSE_SECONDS, MAX_PAUSES = 5.0, 0.25, 16
"""After API processes that ended within QUICK_SECONDS the next one is started after a pause, which grows up to so many PAUSE_SECONDS."""
MIN_SILENT_SECONDS = 3.0
"""An API process that says nothing for server.stall_after seconds, and for at least so many, is killed. It sends ApiStats once a second."""
EXIT_SECONDS = 2.0
"""Time for an API process to exit after its connections had to be aborted."""


ENDED_EARLY = ApiProcessesGaveUp(f"{MAX_FAILED_STARTS} API processes in a row ended before they could serve; the log says why")


class ApiProcess:
    """One running API process. Raises OSError."""

    def __init__(self, client: LocalEngineClient, records: StreamRecords, fds: tuple[int, ...]) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            descriptors = theirs.fileno(), *fds
            # A process group of its own: Ctrl-C in a terminal must reach only the front process, which drains first.
            self._process = subprocess.Popen(
                child_command(MODULE, *map(str, descriptors)),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                process_group=0,
                cwd=WORKING_DIRECTORY,
            )
        self.link = Link(api_protocol.decode_from_api, self._on_message, self._on_end)
        self.requests = ProcessRequests(client, records, self._send, self.link.write)
        self.stats = ApiStats()
        self.serves = asyncio.Event()
        self.problem: OneheadError | None = None
        """Why it cannot serve."""
        self.is_cut: bool | None = None
        """Of its Finished message; None before that."""
        self.silent_seconds = 0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self) -> None:
        """To be called first."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self.link, sock=self._ours)

    async def ended(self) -> None:
        """Waits until it has ended."""
        await self._over
        self.requests.close()
        if self.is_cut is None and self.problem is None:  # Else it ends by itself when its log has been written.
            self.kill()
        await asyncio.to_thread(self._process.wait)

    def kill(self) -> None:
        """Kills it, if it runs."""
        self._process.kill()

    def _send(self, message: api_protocol.ToApi) -> None:
        self.link.send(message)
        if self.link.num_unsent > MAX_UNSENT_BYTES:
            log.error("an API process leaves messages unread, and is killed")
            self.kill()

    def _on_end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _on_message(self, message: api_protocol.FromApi) -> None:
        match message:
            case ApiStats():
                self.stats, self.silent_seconds = message, 0
            case api_protocol.Watch():
                self.requests.watch(message.is_watching)
            case api_protocol.Listening():
                self.serves.set()
            case api_protocol.CannotServe():
                self.problem = OneheadError(message.reason)
                self.problem.exit_code = message.exit_code
            case api_protocol.Finished():
                self.is_cut = message.cut
            case _:
                self.requests.on_message(message)


class ApiProcesses:
    """The API processes of one server, one for each listening socket; front_process.HttpServers."""

    def __init__(self, engine: SupervisedEngine, section: ServerSection, settings: ApiSettings, listeners: list[socket.socket]) -> None:
        self._client = engine.client
        self._restarts = engine.metrics.api_process_restarts
        retention = Retention(
            section.resume_retention, section.resume_stream_bytes, section.resume_memory // 2, section.detach_grace, section.max_detached
        )
        self._records = StreamRecords(engine.client, retention)
        self._settings = settings
        self._listeners = listeners
        self._channels = engine.workers.jobs.fileno(), engine.workers.grammars.fileno()
        self._silent_seconds, self._start_seconds = max(MIN_SILENT_SECONDS, section.stall_after), section.start_timeout
        self._processes: dict[int, ApiProcess] = {}
        """Those that run, by the index of their listening socket."""
        self._tasks: list[asyncio.Task[None]] = []
        self._status: api_protocol.EngineStatus | None = None
        self._ended_stats = ApiStats()
        """The counts of processes that have ended."""
        self._deadline: float | None = None
        """When all processes must have ended."""
        self._is_cut = False
        self._ever_served = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client.on_started = _tell_started
        self._client.on_change = self._tell_status

    @property
    def num_running(self) -> int:
        return sum(process.serves.is_set() for process in self._processes.values())

    def _is_ending(self) -> bool:
        """Whether processes are not replaced any more."""
        return self._deadline is not None

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_running(index)) for index in range(len(self._listeners))]

    async def started(self) -> None:
        while self._deadline is None and self.num_running < len(self._listeners):
            await asyncio.sleep(0.02)

    async def _keep_running(self, index: int) -> None:
        """Runs one process after the other on a listening socket."""
        failed_starts = quick_ends = 0
        while not self._is_ending():
            began = time.monotonic()
            problem = await self._run(index)
            if self._is_ending():
                return
            failed_starts = failed_starts + 1 if problem is not None else 0
            quick_ends = quick_ends + 1 if time.monotonic() - began < QUICK_SECONDS else 0
            if problem is not None and (failed_starts >= MAX_FAILED_STARTS or (not self._ever_served and problem is not ENDED_EARLY)):
                if not self.failed.done():
                    self.failed.set_exception(problem)
                return
            self._restarts.inc()
            await asyncio.sleep(PAUSE_SECONDS * min(MAX_PAUSES, 2 ** (quick_ends - 1) - 1) if quick_ends else 0.0)

    async def _run(self, index: int) -> OneheadError | None:
        """Runs a process until it has ended. Returns why it could not serve; None if it did."""
        try:
            process = ApiProcess(self._client, self._records, (self._listeners[index].fileno(), *self._channels))
        except OSError as error:
            log.error("no API process can be started: %s", error.strerror)
            return ENDED_EARLY
        try:
            await process.connect()
            process.requests.send(self._settings.begin())
            self._processes[index] = process
            await process.ended()
        finally:
            process.kill()
            self._processes.pop(index, None)
        self._ever_served = self._ever_served or process.serves.is_set()
        ended, last = self._ended_stats, process.stats
        self._ended_stats = ApiStats(
            log_lines_dropped=ended.log_lines_dropped + last.log_lines_dropped, refused=ended.refused + last.refused
        )
        if not self._is_ending():
            log.error("an API process ended; it is replaced")
        elif process.serves.is_set() and process.is_cut is not False:
            self._is_cut = True
        return None if process.serves.is_set() else process.problem or ENDED_EARLY

    def _tell_status(self) -> None:
        """Tells all processes the state of the server, if it has changed."""
        status = self._settings.status()
        if status != self._status:
            self._status = status
            self._send(status)

    def _send(self, message: api_protocol.ToApi) -> None:
        for process in self._processes.values():
            process.requests.send(message)

    def sweep(self) -> None:
        self._tell_status()
        self._records.sweep(time.monotonic())
        for process in self._processes.values():
            process.silent_seconds += 1
            most = self._silent_seconds if process.serves.is_set() else self._start_seconds
            if process.silent_seconds > most and not self._is_ending():
                log.error("an API process has said nothing for %g s, and is killed", most)
                process.kill()

    def stats(self) -> ApiStats:
        running = [process.stats for process in self._processes.values()]
        both = [self._ended_stats, *running]
        return ApiStats(
            event_loop_lag=max((stats.event_loop_lag for stats in running), default=0.0),
            streams_detached=len(self._records.orphans) + sum(stats.streams_detached for stats in running),
            resume_bytes=self._records.num_bytes + sum(stats.resume_bytes for stats in running),
            log_lines_dropped=sum(stats.log_lines_dropped for stats in both),
            refused=sum(stats.refused for stats in both),
        )

    def reload(self) -> None:
        self._send(api_protocol.Reload(self._settings.keys()))

    def end(self, timeout: float) -> None:
        self._deadline = time.monotonic() + timeout + EXIT_SECONDS
        for listener in self._listeners:
            listener.close()
        self._send(api_protocol.Finish(timeout))

    async def ended(self) -> bool:
        if self._deadline is None:
            self.end(FLUSH_SECONDS)
        for index, task in enumerate(self._tasks):
            if index not in self._processes:
                task.cancel()  # It pauses, or starts a process.
        pending = set(self._tasks)
        while pending and self._deadline is not None and time.monotonic() < self._deadline:  # A second signal makes it an earlier one.
            _, pending = await asyncio.wait(pending, timeout=0.1)
        for process in self._processes.values():
            process.kill()
        await asyncio.wait(self._tasks)
        return self._is_cut


def _tell_started(sequence: Progress) -> None:
    assert isinstance(sequence, RemoteSequence)
    sequence.request.deliver(sequence, protocol.Started([sequence.id], [sequence.num_cached]))
