"""The options of a tool, which are a plain dataclass, from the command line alone. Nothing that serves imports it."""

from dataclasses import MISSING, fields
from typing import Any, TypeVar

from pydantic import Field, ValidationError, create_model
from pydantic_settings import BaseSettings, CliPositionalArg, PydanticBaseSettingsSource

from server.command_line import command_line
from server.config import Size, describe
from server.errors import ConfigurationError

Options = TypeVar("Options")


class CommandLineOnly(BaseSettings):
    """Base of the tools' options: the environment is not asked."""

    @classmethod
    def settings_customise_sources(  # type: ignore[override]
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def load_dataclass(cls: type[Options], argv: list[str], prog: str) -> Options:
    """The options of a tool, which are a plain dataclass, from the command line alone. Raises ConfigurationError."""
    options: dict[str, Any] = {
        f.name: (_annotation(f), Field(... if f.default is MISSING else f.default, description=f.metadata.get("help")))
        for f in fields(cls)  # type: ignore[arg-type]
    }
    model: type[BaseSettings] = create_model("Tool", __base__=CommandLineOnly, __doc__=cls.__doc__, **options)
    try:
        values = model(**command_line(model, argv, prog, implicit_flags=True)())
    except ValidationError as error:
        raise ConfigurationError(describe(error)) from None
    return cls(**{f.name: getattr(values, f.name) for f in fields(cls)})  # type: ignore[arg-type]


def _annotation(field: Any) -> Any:
    """The type of a tool's option: positional, or memory with a unit, where its metadata says so."""
    if field.metadata.get("positional"):
        return CliPositionalArg[field.type]  # type: ignore[misc]
    return Size | None if field.metadata.get("memory") else field.type
