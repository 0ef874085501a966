"""Wires the API processes of a server to its engine: their settings, their parts of the bounds, and their channels."""

import socket

from server import api_protocol
from server.api_processes.processes import ApiProcesses
from server.api_processes.stream_records import StreamRecords
from server.config import ServerSection, ServeSettings
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.http.stream_buffer import Retention
from server.service import SupervisedEngine

MAX_STREAM_BYTES = 2**25
"""Most bytes of one resumable stream, which is sent as one message when it has ended."""


def part_of(section: ServerSection, count: int) -> ServerSection:
    """The options of one of several API processes."""
    changed = {
        "max_connections": max(1, section.max_connections // count),
        "resume_memory": max(1, section.resume_memory // 2 // count),
        "resume_stream_bytes": min(section.resume_stream_bytes, MAX_STREAM_BYTES),
        "resume_retention": 0.0,  # The front process keeps what has ended.
        "max_detached": section.max_detached and max(1, section.max_detached // count),
    }
    return section.model_copy(update=changed)


def api_processes_of(
    engine: SupervisedEngine, settings: ServeSettings, keys: Keys, names: ModelNames, listeners: list[socket.socket]
) -> ApiProcesses:
    """The API processes on these sockets, which do not run yet."""
    section, client, workers = settings.server, engine.client, engine.workers
    count = len(listeners)
    options = part_of(section, count).model_dump_json()
    retention = Retention(
        section.resume_retention, section.resume_stream_bytes, section.resume_memory // 2, section.detach_grace, section.max_detached
    )

    def begin() -> api_protocol.Begin:
        texts = engine.generation.texts
        status = api_protocol.EngineStatus(client.ready, client.status, client.accepting, client.draining, texts.cheap_template)
        return api_protocol.Begin(
            section=options,
            model=str(settings.model),
            keys=None if keys.terms is None else {digest: terms.as_list() for digest, terms in keys.terms.items()},
            model_names=list(names.listed),
            other_names=list(names.others),
            max_open=client.max_open,
            places=(max(1, workers.places[0] // count), max(1, workers.places[1] // count)),
            status=status,
        )

    channels = workers.jobs.fileno(), workers.grammars.fileno()
    records = StreamRecords(client, retention)
    return ApiProcesses(client, records, begin, listeners, channels, engine.metrics.api_process_restarts.inc)
