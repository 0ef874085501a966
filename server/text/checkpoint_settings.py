"""Reads special tokens, the chat template and sampling defaults from a checkpoint folder.

Invariant: a missing file counts as empty; an invalid one raises CheckpointError that names it, and
the field. It knows no tokenizer.
"""

import reprlib
from pathlib import Path
from typing import Any

from model.checkpoint.files import MOST_CONFIG_BYTES, MOST_LIST_BYTES, read_object, read_text
from model.spec import CheckpointError

MAX_TEMPLATE_CHARS = 2**20
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (1e-6, 1.0),
    "repetition_penalty": (0.01, 10.0),
}
"""The sampling defaults that are read of generation_config.json, with the bounds of requests. One
with integer bounds is an integer."""


class CheckpointFiles:
    """tokenizer_config.json, generation_config.json and the chat template of one folder, or
    `template` in place of that; all are read at once. Raises CheckpointError.
    """

    def __init__(self, folder: Path, template: Path | None = None) -> None:
        self._folder = folder
        self._tokenizer = read_object(folder / "tokenizer_config.json", MOST_LIST_BYTES) or {}
        self.chat_template_place, source = self._template(template)
        self.generation = read_object(folder / "generation_config.json", MOST_CONFIG_BYTES) or {}
        """generation_config.json, unchecked."""
        if (source is not None or template is not None) and (
            not isinstance(source, str) or len(source) > MAX_TEMPLATE_CHARS
        ):
            raise CheckpointError(
                f"{self.chat_template_place}: expected a text of up to {MAX_TEMPLATE_CHARS} "
                "characters"
            )
        self.chat_template: str | None = source
        """The template's source. Errors of it begin with `chat_template_place`, its file and
        field."""
        self.sampling_defaults = {
            key: self._number(key, value)
            for key in BOUNDS
            if (value := self.generation.get(key)) is not None
        }
        """The sampling parameters in generation_config.json, by name."""

    def special_token(self, key: str) -> str | None:
        """The text of `bos_token`, `eos_token` or another special token, given as a string or an
        object.
        """
        token = self._tokenizer.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        return content if isinstance(content, str) else None

    def _template(self, given: Path | None) -> tuple[str, Any]:
        """(file and field, value) of the file that an option names, wherever it lies, or of
        chat_template.jinja, chat_template.json or tokenizer_config.json; of several named ones,
        `default`.
        """
        if given is not None:
            return str(given), read_text(given.resolve(), MOST_CONFIG_BYTES)
        path = self._folder / "chat_template.jinja"
        template: Any = read_text(path, MOST_CONFIG_BYTES)
        if template is not None:
            return str(path), template
        path = self._folder / "chat_template.json"
        values = read_object(path, MOST_CONFIG_BYTES)
        if values is None:
            path, values = self._folder / "tokenizer_config.json", self._tokenizer
        template = values.get("chat_template")
        if isinstance(template, list):
            default = (
                entry.get("template")
                for entry in template
                if isinstance(entry, dict) and entry.get("name") == "default"
            )
            template = next(default, None)
        return f"{path}: chat_template", template

    def _number(self, key: str, value: Any) -> float:
        least, most = BOUNDS[key]
        kind = "an integer" if isinstance(least, int) else "a number"
        types = int if isinstance(least, int) else int | float
        if isinstance(value, bool) or not isinstance(value, types) or not least <= value <= most:
            path = self._folder / "generation_config.json"
            raise CheckpointError(
                f"{path}: {key} must be {kind} within {least} and {most}, found "
                f"{reprlib.repr(value)}"
            )
        return value
