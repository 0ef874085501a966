"""Keys: the valid API keys, as SHA-256 digests, of server.api_keys and of the file
server.api_keys_file.

The file is read at start and again on SIGHUP. Invariant: an invalid file leaves the keys unchanged;
no message contains a key or a digest.
"""

import logging
import tomllib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from pydantic import Field, ValidationError

from server.config import Section, describe
from server.errors import ConfigurationError
from server.generation.clients import Terms
from server.option_types import Digest

log = logging.getLogger("onehead")


UNNAMED = Terms(priority=False)
"""The terms of a key of server.api_keys."""


class _Key(Terms):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: Digest
    priority: bool = False


class _File(Section):
    key: tuple[_Key, ...] = Field((), max_length=1000)


def read_keys(path: Path) -> dict[str, Terms]:
    """What each key of a file may do, by digest. Raises ConfigurationError that names the file and
    the entry.
    """
    try:
        keys = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).key
        for one, other in combinations(keys, 2):
            if one.name == other.name or one.sha256 == other.sha256:
                raise ValueError(
                    f"{one.name} and {other.name} must each have a name and a sha256 of their own"
                )
        return {key.sha256: key for key in keys}
    except (OSError, ValueError) as error:  # ValueError: of tomllib, of UTF-8 and of the validator.
        reason = describe(error, {}) if isinstance(error, ValidationError) else error
        raise ConfigurationError(f"server.api_keys_file {path}: {reason}") from None


class Keys:
    """The valid API keys. `terms`: what each may do, by digest; None if no key is needed."""

    def __init__(self, digests: Sequence[str], path: Path | None) -> None:
        self._unnamed = dict.fromkeys(digests, UNNAMED)
        self._path = path
        self.terms = self._read()

    def reload(self) -> None:
        """Reads the file again. Keys removed from it are refused from the next request on."""
        try:
            self.terms = self._read()
            log.info(
                "SIGHUP: %s",
                "no API key is needed"
                if self.terms is None
                else f"{len(self.terms)} API keys are valid",
            )
        except ConfigurationError as error:
            log.error("SIGHUP: the API keys stay as they were: %s", error)

    def _read(self) -> dict[str, Terms] | None:
        """The keys' terms. A file without keys gives an empty dictionary, which refuses all
        requests; None would open the server.
        """
        return self._unnamed | read_keys(self._path) if self._path else self._unnamed or None
