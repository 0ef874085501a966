"""The tokenizer, incremental detokenization and stop strings. Knows nothing of requests or HTTP."""

import json
import re
from collections.abc import Iterator, Sequence, Set
from functools import cache, cached_property
from itertools import islice, pairwise
from pathlib import Path

from tokenizers import Encoding, Tokenizer, decoders

from model.checkpoint.files import MOST_TOKENIZER_BYTES, read_file
from server.errors import ConfigurationError, InvalidRequest
from server.hub.tokenizer_file import tokenizer_path
from server.text.checkpoint_settings import CheckpointFiles

REPLACEMENT = "\ufffd"
# Decoders write one replacement character for an incomplete UTF-8 character, or one for each of its
# up to three bytes.
MAX_HELD_CHARS = 3
WINDOW = 32
"""Tokens from which on a window of a detokenizer is cut to its end."""
LEAST_CONTEXT, MOST_CONTEXT = 12, 64
"""Tokens of a context: twelve hold MAX_HELD_CHARS incomplete characters, which have at most three
bytes each."""


def _byte_letters() -> dict[str, int]:
    """Letter -> byte of byte-level vocabularies (GPT-2): printable bytes stand for themselves,
    others for letters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


BYTE_OF = _byte_letters()
LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}
SPACE = "\u2581"
"""Stands for a space in vocabularies of SentencePiece."""
JOINING_DECODER = (
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
"""The decoder of vocabularies of SentencePiece; with or without its last part, which removes a
space at the beginning of a text."""
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
ANCHORS = "\n", ".", "a", "0", "\u00a0"
"""Texts after which others are encoded to find the tokens that continue a text."""


class TextCodec:
    """A checkpoint's tokenizer. `encode` recognises special tokens in text; the post-processor
    decides whether BOS is added, but to a text that begins with it, such as a rendered chat, it
    adds no other.
    """

    def __init__(self, folder: Path, template: Path | None = None) -> None:
        """Reads tokenizer.json; `template` as in CheckpointFiles. Raises ConfigurationError if it
        is missing or invalid.
        """
        self.folder = folder
        self.path = tokenizer_path(folder)
        data = read_file(self.path, MOST_TOKENIZER_BYTES)
        try:
            self.tokenizer = Tokenizer.from_buffer(data or b"")
            # What its post-processor adds is looked up only now.
            self.tokenizer.encode("")
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # The library raises Exception itself, and its panics are BaseExceptions.
            raise ConfigurationError(
                f"{self.path}: not a tokenizer this version can read"
            ) from error
        # Some files hold the padding and truncation of training, which must not be applied to
        # prompts.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.added = {id: token.content for id, token in added.items() if token.content.strip()}
        """Id -> text of the tokens besides the vocabulary's own; runs of white space, which some
        vocabularies add, are left out."""
        self.files = CheckpointFiles(folder, template)
        written = self.files.chat_template or ""
        self.mark_ids = frozenset(
            self.special_ids | {id for id, text in self.added.items() if text in written}
        )
        """Ids that untrusted text never becomes: the special tokens and every added token that the
        chat template writes."""
        self.end_token_ids: tuple[int, ...] = ()
        """The end-of-sequence token, and after `end_at` the token that ends a turn."""
        if end := self.files.special_token("eos_token"):
            self.end_at(self.token_id(end))
        self.raw_bytes = cache(self._raw_bytes)
        """The bytes of a token as the decoder joins them, where `is_bytes`."""
        self.whole_text = cache(self._whole_text)
        """The text that a token adds to any text before it; None where that depends on its
        neighbours."""
        self.token_text = cache(self._token_text)
        """The text of a token in the middle of a text; a replacement character for a part of a
        character."""
        self.token_bytes = cache(self._token_bytes)
        """The UTF-8 bytes of a token for clients; a token may be part of a character."""

    @cached_property
    def _vocabulary(self) -> tuple[int, int]:
        """The largest token id, and the length of the longest token."""
        tokens = self.tokenizer.get_vocab(with_added_tokens=True)
        return max(tokens.values()), max(map(len, tokens))

    @property
    def largest_id(self) -> int:
        """The largest token id that `encode` can give. Those that the post-processor adds need not
        be in the vocabulary.
        """
        return max([self._vocabulary[0], *self.tokenizer.encode("").ids])

    @property
    def longest_token(self) -> int:
        """The most characters of text that one token stands for."""
        return self._vocabulary[1]

    def encode(self, text: str, pair: str | None = None) -> list[int]:
        """Token ids of a prompt, or of a pair of texts."""
        return self._encoding(text, with_post_processor=True, pair=pair).ids

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of text with special tokens recognised; the post-processor adds none."""
        return self._encoding(text).ids

    def encode_plain(self, text: str, marks: Set[int] = frozenset()) -> list[int]:
        """Token ids of untrusted text, which becomes neither one of `mark_ids` nor one of `marks`;
        the post-processor adds none.
        """
        marks = self.mark_ids | marks
        # The setting is the whole tokenizer's, which no other thread uses.
        self.tokenizer.encode_special_tokens = True
        try:
            encoding = self._encoding(text)
            if marks.isdisjoint(encoding.ids):
                return encoding.ids
            # What is recognised all the same is cut after its first character.
            cuts = [
                start + 1
                for id, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
                if id in marks
            ]
            pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
            ids = [id for piece in pieces for id in self._encoding(piece).ids]
        finally:
            self.tokenizer.encode_special_tokens = False
        if not marks.isdisjoint(ids):
            raise InvalidRequest(
                "the text holds a special token of the model that cannot be read as text; remove it"
            )
        return ids

    def encode_with_offsets(
        self, text: str, with_post_processor: bool = True
    ) -> list[tuple[int, int, int]]:
        """(id, start, end) of each token of a prompt; offsets in characters."""
        encoding = self._encoding(text, with_post_processor)
        return [(id, *span) for id, span in zip(encoding.ids, encoding.offsets, strict=True)]

    def _encoding(
        self, text: str, with_post_processor: bool = False, pair: str | None = None
    ) -> Encoding:
        """Encodes a text. (`encode_batch` would use threads, which a process that forks must not
        have.) Raises InvalidRequest.
        """
        num_added = len(self.opening) if with_post_processor else 0
        try:
            encoding = self.tokenizer.encode(text, pair, add_special_tokens=with_post_processor)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:
            # The library raises Exception itself, and its panics are BaseExceptions.
            raise InvalidRequest(
                "the model's tokenizer fails on this text", code="tokenization_failed"
            ) from None
        if num_added and encoding.ids[num_added : num_added + 1] == self.opening[:1]:
            encoding.truncate(len(encoding) - num_added, direction="left")
        return encoding

    def end_at(self, id: int | None) -> None:
        """Adds a token that ends answers: the one that the chat template writes after them, which
        files need not name.
        """
        if id is not None and id not in self.end_token_ids:
            self.end_token_ids = (*self.end_token_ids, id)

    @cached_property
    def opening(self) -> list[int]:
        """Token ids that the post-processor puts before a text: BOS, or none."""
        encoding = self.tokenizer.encode("a")
        ids: list[int] = encoding.ids
        return ids[: [*encoding.special_tokens_mask, 0].index(0)]

    @cached_property
    def closing(self) -> list[int]:
        """Token ids that the post-processor puts after a text: EOS, or none."""
        encoding = self.tokenizer.encode("a")
        return encoding.ids[len(encoding) - [*encoding.special_tokens_mask[::-1], 0].index(0) :]

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text, None if there is none."""
        id: int | None = self.tokenizer.token_to_id(token)
        return id

    def _token_text(self, id: int) -> str:
        whole = self.whole_text(id)
        if whole is not None:
            return whole
        if id in self.special_ids:
            return self.decode([id])
        detokenizer = Detokenizer(self, self._anchor)
        return detokenizer.push(id) + detokenizer.flush()

    @cached_property
    def _anchor(self) -> list[int]:
        """Tokens of a text that ends in none of the characters that decoders treat in a special
        way.
        """
        return next(
            (
                ids
                for text in ("a", "0", *ANCHORS)
                if (ids := self.encode_bare(text)) and self.decode(ids).strip()
            ),
            [],
        )

    def _token_bytes(self, id: int) -> bytes:
        text = self.tokenizer.id_to_token(id)
        if text is None or id in self.special_ids:
            return (text or "").encode()
        if '"ByteLevel"' in self._decoder:
            return self.raw_bytes(id)
        return (
            bytes([int(text[3:5], 16)])
            if _BYTE_TOKEN.fullmatch(text)
            else self.token_text(id).encode()
        )

    @cached_property
    def _decoder(self) -> str:
        """The decoder as JSON; empty for a tokenizer without one."""
        decoder = self.tokenizer.decoder
        return "" if decoder is None else decoder.__getstate__().decode()

    @cached_property
    def _byte_fallback(self) -> bool:
        return '"ByteFallback"' in self._decoder

    def is_byte(self, id: int) -> bool:
        """Whether a token stands for one byte, of which the decoder makes text once it knows the
        bytes next to it.
        """
        return (
            self._byte_fallback
            and _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(id) or "") is not None
        )

    @cached_property
    def is_bytes(self) -> bool:
        """Whether decoding concatenates the bytes of tokens and reads them as UTF-8."""
        return isinstance(self.tokenizer.decoder, decoders.ByteLevel) or self._joining

    @cached_property
    def _joining(self) -> bool:
        """Whether the decoder is JOINING_DECODER."""
        parts = json.loads(self._decoder or "{}").get("decoders", ())
        return tuple(parts) in (JOINING_DECODER, JOINING_DECODER[:-1])

    def _whole_text(self, id: int) -> str | None:
        if not self.is_bytes or self.is_byte(id):
            return None
        try:
            return self._raw_bytes(id).decode()
        except UnicodeDecodeError:
            return None

    def _raw_bytes(self, id: int) -> bytes:
        text = self.tokenizer.id_to_token(id) or ""
        if self._joining:
            return (
                bytes([int(text[3:5], 16)])
                if _BYTE_TOKEN.fullmatch(text)
                else text.replace(SPACE, " ").encode()
            )
        whole = all(letter in BYTE_OF for letter in text)
        return bytes(BYTE_OF[letter] for letter in text) if whole else text.encode()

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def context(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[int]:
        """The end of a text's tokens on which the text of its continuation depends.

        Decoders treat a text's beginning in their own ways: they remove spaces there, or leave out
        the space before a word. A character that is no space ends that beginning, so the context
        has one if the text does. It begins within no run of byte tokens.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        found: list[int] = []
        for id in islice((id for id in reversed(ids) if id not in skipped), MOST_CONTEXT):
            found.append(id)
            if (
                len(found) >= LEAST_CONTEXT
                and not self.is_byte(id)
                and self.decode(found[::-1]).strip()
            ):
                break
        return found[::-1]

    def spellings(self, text: str) -> Iterator[list[int]]:
        """The tokens of untrusted text where it continues another: those that it is encoded to
        there, and the single token that has it as its text.
        """
        for anchor in ANCHORS:
            before, both = self.encode_plain(anchor), self.encode_plain(anchor + text)
            start = self.decode(before)
            if (
                both[: len(before)] == before
                and start.endswith(anchor)
                and self.decode(both) == start + text
            ):
                yield both[len(before) :]
                break
        letters = "".join(LETTER_OF[byte] for byte in text.encode())
        names = text, letters, text.replace(" ", SPACE), f"##{text}", text.removeprefix(" ")
        for name in dict.fromkeys(names):
            id = self.token_id(name)
            if id is not None and id not in self.mark_ids and self.token_text(id) == text:
                yield [id]


class Detokenizer:
    """Incremental detokenization of the tokens that continue a text.

    Invariant: the returned texts, joined, are the text of all tokens, those before included,
    without as many characters as the text of those before has (as transformers' text generation
    returns a continuation). Text is held back while a later token may change it: an incomplete
    character, and a run of byte tokens, which is read as UTF-8 as a whole or not at all.
    """

    def __init__(
        self, codec: TextCodec, before: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        """`before`: the tokens of the text that is continued, which may be none.
        `skip_special_tokens`: special tokens among them add no text; others that are not to be in
        the text must not be pushed.
        """
        self._codec = codec
        self._window = codec.context(before, skip_special_tokens)
        """The last tokens, on which the text of the next one may depend."""
        self._num_held = 0
        """Characters at the end of the window's text that are held back. Below 0: so many are left
        out of what follows, because the text of the tokens before ended within a character that has
        become shorter.
        """
        self._run: list[int] = []
        """The byte tokens after the window."""

    def push(self, token: int) -> str:
        """The text that became final with this token."""
        text = self._codec.whole_text(token)
        if text is not None and self._window and not self._run and not self._num_held:
            if text:
                self._window = [token]
            return text
        if text is None and self._codec.is_byte(token):
            self._run.append(token)
            return ""
        return self._read([*self._run, token], is_last=False)

    def _read(self, tokens: list[int], is_last: bool) -> str:
        given = len(self._codec.decode(self._window)) - self._num_held
        self._window += tokens
        self._run = []
        text = self._codec.decode(self._window)
        incomplete = (
            0 if is_last else min(MAX_HELD_CHARS, len(text) - len(text.rstrip(REPLACEMENT)))
        )
        certain = len(text) - incomplete
        self._num_held = len(text) - max(given, certain)
        if len(self._window) > WINDOW:
            self._window = self._codec.context(self._window)
        return text[given:certain]

    def flush(self) -> str:
        """The text that is held back, as the decoder renders it at the end of a text."""
        return self._read(self._run, is_last=True) if self._run or self._num_held > 0 else ""


class StopStrings:
    """Finds the first completed stop string in a text that arrives in pieces.

    With `keep` (TGI) the stop string stays in the text and nothing is held back. Without it
    (OpenAI) the longest end of the text that may begin a stop string is held back until that is
    decided.
    """

    def __init__(self, stops: tuple[str, ...], keep: bool = True) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=1) - 1
        self._first = frozenset(stop[0] for stop in stops)
        self._keep = keep
        self._seen = ""
        """The end of the text so far: as much as can belong to an incomplete stop string."""
        self._held = 0
        """Characters at its end that are held back."""

    def push(self, text: str, search: bool = True) -> tuple[str, str | None]:
        """(text that became final, up to the first completed stop string; the stop string or None).
        With `search` False no match ends in this text, but a later match may begin in it.
        """
        if not self._stops:
            return text, None
        before = len(self._seen)
        both = self._seen + text
        emitted = before - self._held
        if search:
            # Of each the first occurrence that ends in this text.
            found = [
                (start + len(stop), start, stop)
                for stop in self._stops
                if (start := both.find(stop, max(0, before - len(stop) + 1))) >= 0
            ]
            if found:
                end, start, stop = min(found)
                self._seen, self._held = "", 0
                return both[emitted : end if self._keep else max(emitted, start)], stop
        self._held = 0 if self._keep else self._possible_beginning(both)
        self._seen = both[max(0, len(both) - max(self._longest, self._held)) :]
        return both[emitted : len(both) - self._held], None

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start] in self._first and any(
                stop.startswith(text[start:]) for stop in self._stops
            ):
                return len(text) - start
        return 0

    def flush(self) -> str:
        """The text that is held back; called after the last piece."""
        text, self._held = self._seen[len(self._seen) - self._held :], 0
        return text
