"""Reads special tokens, the chat template and sampling defaults from a checkpoint folder.

Invariant: a missing file counts as empty; an invalid one raises ConfigurationError that names it. It knows no tokenizer.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from server.errors import ConfigurationError

MAX_TEMPLATE_CHARS = 2**20


class CheckpointFiles:
    """tokenizer_config.json, generation_config.json and the chat template of one folder. Raises ConfigurationError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = self._read("tokenizer_config.json")
        self._generation = self._read("generation_config.json")
        self.eos_token = self.special_token("eos_token")

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError, RecursionError):
            raise ConfigurationError(f"{path}: cannot be read as a JSON object") from None
        if not isinstance(value, dict):
            raise ConfigurationError(f"{path}: cannot be read as a JSON object")
        return value

    def special_token(self, key: str) -> str | None:
        """The text of `bos_token`, `eos_token` or another special token, given as a string or an object."""
        token = self._tokenizer.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        return content if isinstance(content, str) else None

    @property
    def chat_template_place(self) -> str:
        """The file, and the field, that holds the chat template, for messages."""
        for name, field in (("chat_template.jinja", ""), ("chat_template.json", ": chat_template")):
            if (self._folder / name).is_file():
                return f"{self._folder / name}{field}"
        return f"{self._folder / 'tokenizer_config.json'}: chat_template"

    @cached_property
    def chat_template(self) -> str | None:
        """The template's source: chat_template.jinja, chat_template.json or tokenizer_config.json; of several named ones, `default`."""
        path = self._folder / "chat_template.jinja"
        template: Any = self._tokenizer.get("chat_template")
        if path.is_file():
            try:
                template = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                raise ConfigurationError(f"{path}: not a text in UTF-8") from None
        elif (self._folder / "chat_template.json").is_file():
            template = self._read("chat_template.json").get("chat_template")
        if isinstance(template, list):
            template = next(
                (entry.get("template") for entry in template if isinstance(entry, dict) and entry.get("name") == "default"), None
            )
        if template is not None and (not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARS):
            raise ConfigurationError(f"{self.chat_template_place} is not a text of up to {MAX_TEMPLATE_CHARS} characters")
        return template

    @cached_property
    def sampling_defaults(self) -> dict[str, float]:
        """The sampling parameters in generation_config.json, by name. Raises ConfigurationError for values out of bounds."""
        bounds = {
            "temperature": (0.0, 2.0),
            "top_k": (0, 2**31 - 1),
            "top_p": (1e-6, 1.0),
            "min_p": (0.0, 1.0),
            "typical_p": (1e-6, 1.0),
            "repetition_penalty": (0.01, 10.0),
        }
        found = {}
        for key, (least, most) in bounds.items():
            value = self._generation.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ConfigurationError(
                    f"{self._folder / 'generation_config.json'}: {key} must be within {least} and {most}, found {value!r}"
                )
            found[key] = value
        return found
