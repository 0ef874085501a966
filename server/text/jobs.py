"""Jobs: what is asked of a tokenizer, a chat template or a grammar compiler, as messages that
either process can carry out.

Invariant: a job gives the same result, or the same refusal, in whichever process it runs. It knows
no processes and no clients.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from server.errors import InvalidRequest
from server.text.calls.rules import Compiled
from server.text.calls.tool_calls import ToolCalls
from server.text.chat_template import ChatTemplate
from server.text.codec import TextCodec
from server.text.conversation import ChatInput
from server.text.fim import Filling, FillInTheMiddle

if TYPE_CHECKING:
    from server.text.grammar import GrammarCompiler


class Texts:
    """The tokenizer, chat template and grammar compiler of one checkpoint, for jobs."""

    def __init__(self, codec: TextCodec, end_token_ids: Iterable[int] = ()) -> None:
        self.codec = codec
        self.chat_template = ChatTemplate(codec)
        self.fim = FillInTheMiddle(codec)
        self._end_token_ids = end_token_ids

    @cached_property
    def calls(self) -> ToolCalls:
        """How this model calls tools."""
        return ToolCalls(self.codec)

    @cached_property
    def compiler(self) -> "GrammarCompiler":
        """Prepared on first use, which takes seconds for a large vocabulary, from what has been
        read. Raises ValueError where llguidance cannot use this tokenizer.
        """
        from server import guidance
        from server.text.grammar import GrammarCompiler

        ends = sorted({*self.codec.end_token_ids, *self._end_token_ids})
        return GrammarCompiler(guidance.grammar_tokenizer(self.codec.tokenizer.to_str(), ends))


class Job(msgspec.Struct, frozen=True, tag=True):
    """Base of the jobs. Each has a method `run(texts)`, which does the work and returns a value of
    the type `Result`, or raises InvalidRequest.
    """

    Result: ClassVar[Any] = list[int]
    max_seconds: ClassVar[float] = 5.0
    """Limit of its processor time in a worker process."""
    needs_grammars: ClassVar[bool] = False
    """Whether it needs the grammar compiler, and the cost of short ones has no bound either."""

    @property
    def num_chars(self) -> int:
        """Characters to process."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """Characters of the longest prompt that it makes."""
        return self.num_chars

    def refusal(self, bound: str) -> InvalidRequest:
        """The error for a job that needs more than a bound of time or memory."""
        return InvalidRequest(
            f"this text takes more than {bound} to tokenize; send less of it",
            code="tokenization_timeout",
        )


class Encode(Job, frozen=True):
    """Token ids of a text with special tokens recognised. `bare`: the post-processor adds none."""

    text: str
    bare: bool = False

    @property
    def num_chars(self) -> int:
        return len(self.text)

    def run(self, texts: Texts) -> list[int]:
        return texts.codec.encode_bare(self.text) if self.bare else texts.codec.encode(self.text)


class EncodeWithPlaces(Encode, frozen=True):
    """The tokens of a text and their places in it, as a JSON array in TGI's form: a large one is
    written in the worker process.
    """

    Result = bytes

    def run(self, texts: Texts) -> Any:
        text = self.text
        tokens = [
            {"id": id, "text": text[start:end], "start": start, "stop": end}
            for id, start, end in texts.codec.encode_with_offsets(text)
        ]
        return json.dumps(tokens, ensure_ascii=False, separators=(",", ":")).encode()


class Decode(Job, frozen=True):
    """The texts of lists of token ids."""

    Result = list[str]

    lists: list[list[int]]

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.lists))

    def run(self, texts: Texts) -> list[str]:
        return [*map(texts.codec.decode, self.lists)]


class Spell(Job, frozen=True):
    """The token sequences that spell words where they continue a text: as they stand, and after a
    space.
    """

    Result = list[list[int]]

    words: list[str]

    @property
    def num_chars(self) -> int:
        return 2 * sum(map(len, self.words))

    def run(self, texts: Texts) -> list[list[int]]:
        found: list[list[int]] = []
        for word in self.words:
            for text in (word, " " + word.lstrip()):
                found += [ids for ids in texts.codec.spellings(text) if ids not in found]
        return found


class Prompts(Job, frozen=True):
    """Several prompts: of texts, or for what stands between each and `suffix`."""

    Result = list[Filling]

    texts: list[str]
    bare: bool = False
    suffix: str | None = None
    heal: bool = False

    @property
    def num_chars(self) -> int:
        return len(self.suffix or "") * len(self.texts) + sum(map(len, self.texts))

    @property
    def longest(self) -> int:
        return max(map(len, self.texts)) + len(self.suffix or "")

    def run(self, texts: Texts) -> list[Filling]:
        if self.suffix is not None:
            return [texts.fim.fill(text, self.suffix, self.heal) for text in self.texts]
        return [Filling(Encode(text, self.bare).run(texts)) for text in self.texts]


class EncodePairs(Job, frozen=True):
    """Token ids of one text together with each of others, as the post-processor joins a pair."""

    Result = list[list[int]]

    text: str
    others: list[str]

    @property
    def num_chars(self) -> int:
        return len(self.text) * len(self.others) + sum(map(len, self.others))

    @property
    def longest(self) -> int:
        return len(self.text) + max(map(len, self.others))

    def run(self, texts: Texts) -> list[list[int]]:
        return [texts.codec.encode(self.text, other) for other in self.others]


class EncodeChat(Job, frozen=True):
    """Token ids of a conversation."""

    given: ChatInput

    @property
    def num_chars(self) -> int:
        try:
            return len(msgspec.msgpack.encode(self.given))
        except OverflowError:
            text = (
                "tools, calls and `chat_template_kwargs` cannot have integers of more than 64 bits"
            )
            raise InvalidRequest(text, param="messages") from None

    def run(self, texts: Texts) -> Any:
        return texts.chat_template.encode(self.given)


class RenderChat(EncodeChat, frozen=True):
    """The text of a conversation, as the chat template writes it."""

    Result = str

    def run(self, texts: Texts) -> Any:
        return texts.chat_template.render(self.given)


class AskedQuestions(msgspec.Struct):
    """Token ids of questions about one state. A question's prompt is `state`, its own ids and
    `end`; `labels` may follow it.
    """

    state: list[int]
    questions: list[list[int]]
    end: list[int]
    labels: list[list[int]]


class EncodeQuestions(EncodeChat, frozen=True, kw_only=True):
    """Questions that are asked one by one at the end of a conversation's last message, the user's;
    `labels`: the answers that begin a reply. Without a chat template all messages are one text,
    after which a question and its answer stand.
    """

    Result = AskedQuestions

    questions: list[str]
    labels: list[str]

    @property
    def num_chars(self) -> int:
        return super().num_chars + sum(map(len, self.questions)) + sum(map(len, self.labels))

    def run(self, texts: Texts) -> Any:
        codec = texts.codec
        if texts.chat_template.exists:
            state, end = texts.chat_template.around(self.given)
        else:
            text = "\n\n".join(message["content"] for message in self.given.messages)
            state, end = codec.opening + codec.encode_plain(text), "\nAnswer:"
        # The space belongs to the label: tokens of words begin with it.
        space = "" if texts.chat_template.exists else " "
        before = codec.encode_bare(end)
        labels = []
        for label in self.labels:
            ids = codec.encode_bare(end + space + label)
            if ids[: len(before)] != before:
                raise InvalidRequest(
                    f"the model's tokenizer joins the label {label} with the text before it",
                    param="questions",
                )
            labels.append(ids[len(before) :])
        return AskedQuestions(state, [*map(codec.encode_plain, self.questions)], before, labels)


class Fill(Job, frozen=True):
    """The fill-in-the-middle prompt for the text between two texts; see FillInTheMiddle.fill.
    `begun`: the beginning of the middle.
    """

    Result = Filling

    prefix: str
    suffix: str
    heal: bool
    extra: tuple[tuple[str, str], ...]
    field: str
    begun: str

    @property
    def num_chars(self) -> int:
        return (
            len(self.prefix)
            + len(self.suffix)
            + len(self.begun)
            + sum(len(name) + len(text) for name, text in self.extra)
        )

    def run(self, texts: Texts) -> Filling:
        return texts.fim.fill(
            self.prefix, self.suffix, self.heal, self.extra, self.field, self.begun
        )


class CompileGrammar(Job, frozen=True):
    """The grammar of a constraint, compiled and tried."""

    Result = Compiled
    max_seconds = 2.0
    needs_grammars = True

    kind: str
    source: str
    field: str
    """Its name in errors."""

    @property
    def num_chars(self) -> int:
        return len(self.source)

    def run(self, texts: Texts) -> Any:
        try:
            return texts.compiler.compile(self.kind, self.source)
        except ValueError as error:
            raise InvalidRequest(f"`{self.field}` {error}", param=self.field) from None

    def refusal(self, bound: str) -> InvalidRequest:
        return InvalidRequest(
            f"`{self.field}` takes more than {bound} to compile; simplify it", param=self.field
        )


AnyJob = (
    Decode
    | Spell
    | Prompts
    | Encode
    | EncodeWithPlaces
    | EncodePairs
    | EncodeChat
    | EncodeQuestions
    | RenderChat
    | Fill
    | CompileGrammar
)
