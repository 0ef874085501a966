"""Messages to a prompt: the checkpoint's own chat template, in a sandbox, and tokens of it that no message can forge.

The template is code of whoever made the checkpoint, so it gets no more than text; messages are text of whoever writes them, so a special
token that one of them spells is text too. It knows nothing of requests.
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
    """The template of one checkpoint. Raises ConfigurationError where it is not Jinja; a checkpoint may have none."""

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
        """Whether this model can chat at all."""
        return self._template is not None

    def encode(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequest where there is no template, or it refuses these messages."""
        # Special tokens that a message spells are put aside before the template sees them, and come back as text.
        aside: dict[str, str] = {}
        mark = secrets.token_hex(8)

        def harmless(text: str) -> str:
            for token in self._special_texts:
                if token in text:
                    text = text.replace(token, aside.setdefault(token, f"{mark}{len(aside)}{mark}"))
            return text

        clean = [{key: harmless(value) for key, value in message.items()} for message in messages]
        prompt = self._render(clean, add_generation_prompt)
        pieces: list[tuple[str, bool]] = [(prompt, True)]
        for token, name in aside.items():
            pieces = [piece for text, special in pieces for piece in _split(text, special, name, token)]
        ids: list[int] = []
        for text, special in pieces:
            # The template writes BOS itself.
            ids += self._codec.encode_bare(text) if special else self._codec.encode_plain(text)
        return ids

    @cached_property
    def _special_texts(self) -> list[str]:
        """The texts of special tokens, the longest first, as one may be part of another."""
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
        except Exception as error:  # The checkpoint's code may do anything; its author is told in the log, and nothing of the messages.
            log.warning("the chat template failed with %s", type(error).__name__)
            raise InvalidRequest("the model's chat template cannot be applied to these messages", param="messages") from None
        if len(prompt) > MAX_PROMPT_CHARS:
            raise InvalidRequest(f"the messages make a prompt of more than {MAX_PROMPT_CHARS} characters", param="messages")
        return prompt


class GenerationTag(Extension):
    """{% generation %} .. {% endgeneration %}: marks what an assistant wrote, for training; here it is only what stands between."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Refusal(Exception):
    """What a template says of messages that it cannot take; its own words, not the client's."""


def _raise_exception(message: str) -> None:
    raise Refusal(str(message)[:200])


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """With the arguments that templates give it. Jinja's own escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _split(text: str, special: bool, name: str, token: str) -> list[tuple[str, bool]]:
    """`text` cut at each `name`, which stands for a token to be read as text."""
    if not special:
        return [(text, special)]
    pieces: list[tuple[str, bool]] = []
    for i, part in enumerate(text.split(name)):
        if i:
            pieces.append((token, False))
        if part:
            pieces.append((part, True))
    return pieces
