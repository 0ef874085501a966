"""The names of the served model: the one that replies show, and those that a request on /v1 may give. Knows no HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from server.errors import NotFound

ALWAYS = frozenset({"", "dummy", "tgi"})
"""Names that clients send where a server has one model: editors an empty one, TGI's clients the others."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """`listed` are the models of GET /v1/models, the first of them in every reply; `others` are accepted in requests besides."""

    listed: tuple[str, ...]
    others: frozenset[str] = ALWAYS

    @classmethod
    def of(cls, listed: Sequence[str], named: Sequence[str]) -> "ModelNames":
        """The names of a model that is also known as `named`, folders and repositories: in full, and by their last part."""
        return cls(tuple(dict.fromkeys(listed)), ALWAYS.union(named, (PurePath(name).name for name in named)))

    @property
    def shown(self) -> str:
        """The model's name in replies."""
        return self.listed[0]

    def resolve(self, name: str | None) -> str:
        """The listed name that a request means by `name`; the first where it gives none, or another name of the model. Raises NotFound for
        a name of another model.
        """
        if name in self.listed:
            return name
        if name is None or name in self.others or str(PurePath(name)) in self.others:
            return self.shown
        raise NotFound(f"no such model; this server has {', '.join(map(ascii, self.listed))}", param="model", code="model_not_found")
