"""ModelNames: the name of the served model in replies, and the names that requests on /v1 may use.
Knows no HTTP.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from server.errors import NotFound

ALWAYS = frozenset({"", "dummy", "tgi"})
"""Placeholders that clients send to a server with a single model: editors the empty one, TGI's
clients the others."""

TAG = ":latest"


@dataclass(frozen=True, slots=True)
class ModelNames:
    """`listed`: the names in GET /v1/models, the first of which is in every reply; `others`:
    further names accepted in requests.
    """

    listed: tuple[str, ...]
    others: frozenset[str] = ALWAYS

    @classmethod
    def of(cls, listed: Sequence[str], named: Sequence[str]) -> "ModelNames":
        """Also accepts `named`, paths of folders and names of repositories, in full and by their
        last part, and every name with Ollama's tag or without.
        """
        names = {*listed, *named, *(PurePath(name).name for name in named)}
        bare = {name.removesuffix(TAG) for name in names}
        others = ALWAYS.union(bare, (name + TAG for name in bare))
        return cls(tuple(dict.fromkeys(listed)), others)

    @property
    def shown(self) -> str:
        """The model's name in replies."""
        return self.listed[0]

    def resolve(self, name: str | None, host: str | None = None) -> str:
        """`name` if it is listed; the first listed name for None, the other accepted names, and a
        URL of the `host` that a request was sent to. Raises NotFound for any other name.
        """
        if name in self.listed:
            return name
        if (
            name is None
            or name in self.others
            or str(PurePath(name)) in self.others
            or _is_at(name, host)
        ):
            return self.shown
        raise NotFound(
            f"no such model; this server has {', '.join(map(ascii, self.listed))}",
            param="model",
            code="model_not_found",
        )


def _is_at(name: str, host: str | None) -> bool:
    """Whether a name is the URL of a server, as clients of one endpoint give it, and this server's
    Host header is the same.
    """
    scheme, separator, rest = name.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    if not (separator and port and host):
        return False
    return re.split("[/?#]", rest)[0].removesuffix(port) == host.lower().removesuffix(port)
