"""Converts chat messages to a prompt with the checkpoint's chat template, in Jinja's sandbox.

Invariant: the template is untrusted code and receives plain data only; messages are untrusted text,
and only the template can write special tokens and the marks of roles. It knows nothing of requests.
"""

import contextlib
import datetime
import json
import logging
import re
import secrets
import string
import time
from collections.abc import Set
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import replace

from server.errors import ConfigurationError, InvalidRequest
from server.text.codec import TextCodec
from server.text.conversation import ChatInput, names_tools

log = logging.getLogger("onehead.chat")

MAX_PROMPT_CHARS = 2**24
MAX_CHEAP_MESSAGES = 64
"""Messages that `trial` renders at once. Conversations of more are not taken for cheap."""
CHEAP_SECONDS = 0.02


class ChatTemplate:
    """The chat template of a checkpoint, which may have none. It is compiled on first use."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def trial(self) -> bool:
        """Renders conversations as large as those that may be rendered in the API process; whether
        each takes little time.
        """
        text = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do "
        system, user, assistant = (
            {"role": role, "content": text} for role in ("system", "user", "assistant")
        )
        conversations = ([user], [system, user], [user, assistant] * (MAX_CHEAP_MESSAGES // 2))
        # The lesser of two: the first rendering compiles the template, and a busy machine makes any
        # one slow.
        return all(
            min(self._seconds(messages), self._seconds(messages)) <= CHEAP_SECONDS
            for messages in conversations
        )

    def _seconds(self, messages: list[dict[str, Any]]) -> float:
        began = time.process_time()
        with contextlib.suppress(InvalidRequest):  # A template may refuse roles and orders of them.
            self.encode(ChatInput(messages))
        return time.process_time() - began

    @property
    def exists(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._codec.files.chat_template is not None

    @cached_property
    def compiled(self) -> Template:
        """Raises ConfigurationError if it is not valid Jinja, or cannot be compiled."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self._codec.files.chat_template or "")
        except TemplateSyntaxError as error:
            reason = f"is not Jinja at line {error.lineno}"
        # Jinja writes Python, which Python may refuse: too many levels, a lone surrogate.
        except Exception as error:
            reason = f"cannot be compiled ({type(error).__name__})"
        raise ConfigurationError(
            f"{self._codec.files.chat_template_place}: the chat template {reason}"
        )

    def turn_end(self) -> int | None:
        """The added token that the template writes after an answer, which ends the model's turn;
        None where it writes none there.
        """
        answer = _nonce()
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        try:
            text = self.render(ChatInput(messages, add_generation_prompt=False))
        except InvalidRequest:  # A template may refuse such conversations.
            return None
        ids = self._codec.encode_bare(text.partition(answer)[2].lstrip())
        return ids[0] if ids and ids[0] in self._codec.added else None

    @cached_property
    def variables(self) -> list[str]:
        """Variables that the template reads. Raises ConfigurationError as `compiled` does."""
        parsed = self.compiled.environment.parse(self._codec.files.chat_template or "")
        return sorted(name for name in find_undeclared_variables(parsed) if len(name) <= 64)[:256]

    def around(self, given: ChatInput) -> tuple[list[int], str]:
        """Token ids of a conversation up to the end of its last message, and the text that the
        template writes after that: more text of the message may stand between them. Raises
        InvalidRequest as `encode` does.
        """
        place, last = _nonce(), given.messages[-1]
        text = self.render(
            replace(
                given, messages=[*given.messages[:-1], last | {"content": last["content"] + place}]
            )
        )
        if text.count(place) != 1:
            raise InvalidRequest(
                "the model's chat template does not write the last message once, as it is",
                param="messages",
            )
        return self.encode(replace(given, continues=True)), text.partition(place)[2]

    def encode(self, given: ChatInput) -> list[int]:
        """Token ids of a conversation. Raises InvalidRequest if there is no template or it refuses
        the messages.

        No text of a message, a tool or a variable becomes a special token, or another added token
        that the template writes: neither as it stands, nor as the template's filters or the
        tokenizer's normalizer change it. The conversation has the marks (such tokens, in their
        order) that it has with harmless text in its place; if not, marks spelt in messages are put
        aside; if it still has others, it is refused.
        """
        ids = self._codec.encode_bare(self.render(given))
        harmless = given.changed(self._harmless)
        if harmless == given:
            return ids
        expected = self._codec.encode_bare(self.render(harmless))
        # A template may write a mark in parts, so that its source does not contain it. Added words
        # are no marks.
        marks = self._codec.mark_ids | {
            id
            for id in set(expected) & self._codec.added.keys()
            if not self._codec.added[id].isalnum()
        }
        wanted = [id for id in expected if id in marks]
        if [id for id in ids if id in marks] == wanted:
            return ids
        aside = _Aside(self._codec, marks)
        ids, written = aside.encode(self.render(given.changed(aside.put)))
        if written != wanted:
            raise InvalidRequest(
                "the model's chat template makes special tokens of text in these messages; remove "
                "it",
                param="messages",
            )
        return ids

    def _harmless(self, text: str) -> str:
        """Text that has no character with which a mark begins, or from which a normalizer or a
        filter could make one.
        """
        suspect, filler = self._suspect
        return suspect.sub(filler, text)

    @cached_property
    def _suspect(self) -> tuple[re.Pattern[str], str]:
        """What `_harmless` replaces, and a letter that belongs to no mark."""
        texts = [text for id, text in self._codec.added.items() if id in self._codec.mark_ids]
        first = {
            next(
                (letter for letter in text if not letter.isalnum() and not letter.isspace()),
                text.strip()[0],
            )
            for text in texts
        }
        filler = next(
            (
                letter
                for letter in string.ascii_lowercase
                if not any(letter in text for text in texts)
            ),
            "x",
        )
        return re.compile(rf"[<&{re.escape(''.join(sorted(first)))}]|[^\x00-\x7f\s]"), filler

    def render(self, given: ChatInput) -> str:
        """The text of a conversation. Raises InvalidRequest if there is no template or it refuses
        the messages.
        """
        files = self._codec.files
        if files.chat_template is None:
            ways_out = (
                "give the server one with --server.chat_template FILE, or send a prompt to "
                "/v1/completions"
            )
            raise InvalidRequest(f"this model has no chat template; {ways_out}", param="messages")
        tokens: dict[str, Any] = {
            key: files.special_token(key) or ""
            for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        end = _nonce() if given.continues else ""
        variables = {"tools": given.tools or None, "documents": None, **tokens, **given.variables}
        variables["add_generation_prompt"] = given.add_generation_prompt
        try:
            prompt = self._written(given, files.chat_template, variables, end)
        except Refusal as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except MemoryError:
            raise
        except Exception as error:
            # The template may raise anything; the log gets the error's type alone, since its text
            # may hold messages.
            log.warning("the chat template failed with %s", type(error).__name__)
            raise InvalidRequest(
                "the model's chat template cannot be applied to these messages", param="messages"
            ) from None
        if end not in prompt:
            text = (
                "the model's chat template does not write the last message's text as it is, so "
                "that it cannot be continued"
            )
            raise InvalidRequest(text, param="continue_final_message")
        prompt = prompt[: prompt.rfind(end)]
        if len(prompt) > MAX_PROMPT_CHARS:
            raise InvalidRequest(
                f"the messages make a prompt of more than {MAX_PROMPT_CHARS} characters",
                param="messages",
            )
        return prompt

    def _written(self, given: ChatInput, source: str, variables: dict[str, Any], end: str) -> str:
        """The text that the template writes. Calls and results become text where it names none, or
        fails with them. `end`: what the last message's text ends with.
        """
        messages = given.adapted(source)
        messages[-1] = messages[-1] | {"content": messages[-1]["content"] + end}
        try:
            prompt = self.compiled.render(variables | {"messages": messages})
            prompt.encode()  # A lone surrogate cannot be tokenized.
            return prompt
        except MemoryError:
            raise
        except Exception:
            plain = "tools" if names_tools(source) else ""
            if source == plain or not given.has_calls:
                raise
            return self._written(given, plain, variables, end)


class GenerationTag(Extension):
    """{% generation %} .. {% endgeneration %}, which marks the assistant's text for training:
    rendered as its content.
    """

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Refusal(Exception):
    """Raised by a template's `raise_exception`; the message is the template's."""


def _raise_exception(message: str) -> None:
    raise Refusal(str(message)[:200])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter of transformers. Jinja's own filter escapes HTML characters and takes
    fewer arguments.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _nonce() -> str:
    """A text that no request holds: digits, which no filter turns to upper or lower case."""
    return f"{secrets.randbelow(10**16):016}"


class _Aside:
    """Marks spelt in the messages of one conversation: each is replaced by a random number before
    rendering, and read as text after it.
    """

    def __init__(self, codec: TextCodec, marks: Set[int]) -> None:
        self._codec = codec
        self._marks = marks
        self._numbers: dict[str, int] = {}
        """Of the texts that are put aside."""
        self._nonce = _nonce()

    def put(self, text: str) -> str:
        """The text with every mark that the tokenizer finds in it replaced."""
        parts, at = [], 0
        for id, start, end in self._codec.encode_with_offsets(text, with_post_processor=False):
            if id in self._marks:
                number = self._numbers.setdefault(text[start:end], len(self._numbers))
                parts += [text[at:start], f"{self._nonce}{number:08}"]
                at = end
        return "".join([*parts, text[at:]])

    def encode(self, prompt: str) -> tuple[list[int], list[int]]:
        """Token ids of the rendered conversation, and the marks among them that the template
        wrote.
        """
        plain = [self._codec.encode_plain(text, self._marks) for text in self._numbers]
        ids: list[int] = []
        written: list[int] = []
        for number, part in enumerate(re.split(rf"{self._nonce}(\d{{8}})", prompt)):
            if number % 2:
                ids += plain[int(part)]
            elif part:
                # The template writes BOS itself, so the tokenizer must not add one.
                bare = self._codec.encode_bare(part)
                ids += bare
                written += [id for id in bare if id in self._marks]
        return ids, written
