"""ApiSettings: what the front process tells its API processes of a server: its options, each one's part of the bounds, keys and state."""

from server import api_protocol
from server.config import ServerSection, ServeSettings
from server.http.keys import Keys
from server.http.model_names import ModelNames
from server.service import SupervisedEngine

MAX_STREAM_BYTES = 2**25
"""Most bytes of one resumable stream, which is sent as one message when it has ended."""


def part_of(section: ServerSection, count: int) -> ServerSection:
    """The options of one of `count` API processes."""
    changed = {
        "max_connections": max(1, section.max_connections // count),
        "resume_memory": max(1, section.resume_memory // 2 // count),
        "resume_stream_bytes": min(section.resume_stream_bytes, MAX_STREAM_BYTES),
        "resume_retention": 0.0,  # The front process keeps what has ended.
        "max_detached": section.max_detached and max(1, section.max_detached // count),
    }
    return section.model_copy(update=changed)


class ApiSettings:
    """The settings of `count` API processes of one server."""

    def __init__(self, engine: SupervisedEngine, settings: ServeSettings, keys: Keys, names: ModelNames, count: int) -> None:
        self._engine = engine
        self._keys = keys
        self._names = names
        self._model = str(settings.model)
        self._options = part_of(settings.server, count).model_dump_json()
        quick, slow = engine.workers.places
        self._places = max(1, quick // count), max(1, slow // count)

    def begin(self) -> api_protocol.Begin:
        """The first message to an API process."""
        return api_protocol.Begin(
            section=self._options,
            model=self._model,
            keys=self.keys(),
            model_names=list(self._names.listed),
            other_names=list(self._names.others),
            max_open=self._engine.client.max_open,
            places=self._places,
            status=self.status(),
        )

    def status(self) -> api_protocol.EngineStatus:
        """The state of the server now."""
        client, texts = self._engine.client, self._engine.generation.texts
        return api_protocol.EngineStatus(
            client.ready, client.status, client.accepting, client.healthy, client.draining, texts.cheap_template
        )

    def keys(self) -> dict[str, api_protocol.Terms] | None:
        """The API keys that are valid now."""
        return None if self._keys.terms is None else {digest: terms.as_list() for digest, terms in self._keys.terms.items()}
