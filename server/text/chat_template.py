"""Converts chat messages to a prompt with the checkpoint's chat template, in Jinja's sandbox.

Invariant: the template is untrusted code and receives plain data only; messages are untrusted text, so special tokens spelt in them are
tokenized as text, and only the template can write special tokens. It knows nothing of requests.
"""

import datetime
import json
import logging
import secrets
from functools import cached_property
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.errors import ConfigurationError, InvalidRequest
from server.text.codec import TextCodec

log = logging.getLogger("onehead.chat")

MAX_PROMPT_CHARS = 2**24


class ChatTemplate:
    """The chat template of a checkpoint, which may have none. Raises ConfigurationError if it is not valid Jinja."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._template = None
        source = codec.files.chat_template
        if source is not None:
            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
            )
            environment.filters["tojson"] = _tojson
            environment.globals["raise_exception"] = _raise_exception
            environment.globals["strftime_now"] = _strftime_now
            try:
                self._template = environment.from_string(source)
            except TemplateSyntaxError as error:
                raise ConfigurationError(f"the chat template is not Jinja at line {error.lineno}") from None

    @property
    def exists(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._template is not None

    def encode(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequest if there is no template or it refuses the messages."""
        # Special tokens in messages are replaced by random placeholders before rendering, and tokenized as text afterwards.
        placeholders: dict[str, str] = {}
        mark = secrets.token_hex(8)

        def without_special_tokens(text: str) -> str:
            for token in self._special_texts:
                if token in text:
                    text = text.replace(token, placeholders.setdefault(token, f"{mark}{len(placeholders)}{mark}"))
            return text

        clean = [{key: without_special_tokens(value) for key, value in message.items()} for message in messages]
        prompt = self._render(clean, add_generation_prompt)
        pieces: list[tuple[str, bool]] = [(prompt, True)]
        for token, name in placeholders.items():
            pieces = [piece for text, special in pieces for piece in _split(text, special, name, token)]
        ids: list[int] = []
        for text, special in pieces:
            # The template writes BOS itself, so the tokenizer must not add one.
            ids += self._codec.encode_bare(text) if special else self._codec.encode_plain(text)
        return ids

    @cached_property
    def _special_texts(self) -> list[str]:
        """The texts of special tokens, longest first, because one may contain another."""
        return sorted((self._codec.decode([id]) for id in self._codec.special_ids), key=len, reverse=True)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; send a prompt to /v1/completions instead", param="messages")
        files = self._codec.files
        tokens: dict[str, Any] = {key: files.special_token(key) or "" for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        try:
            prompt = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **tokens
            )
        except Refusal as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", param="messages") from None
        except Exception as error:
            # The template may raise anything; the log gets the error's type alone, since its text may hold messages.
            log.warning("the chat template failed with %s", type(error).__name__)
            raise InvalidRequest("the model's chat template cannot be applied to these messages", param="messages") from None
        if len(prompt) > MAX_PROMPT_CHARS:
            raise InvalidRequest(f"the messages make a prompt of more than {MAX_PROMPT_CHARS} characters", param="messages")
        return prompt


class GenerationTag(Extension):
    """{% generation %} .. {% endgeneration %}, which marks the assistant's text for training: rendered as its content."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Refusal(Exception):
    """Raised by a template's `raise_exception`; the message is the template's."""


def _raise_exception(message: str) -> None:
    raise Refusal(str(message)[:200])


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """The `tojson` filter of transformers. Jinja's own filter escapes HTML characters and takes fewer arguments."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _split(text: str, special: bool, name: str, token: str) -> list[tuple[str, bool]]:
    """Splits `text` at each placeholder `name`, and puts `token` there, to be tokenized as plain text (False)."""
    if not special:
        return [(text, special)]
    pieces: list[tuple[str, bool]] = []
    for i, part in enumerate(text.split(name)):
        if i:
            pieces.append((token, False))
        if part:
            pieces.append((part, True))
    return pieces
