"""Text on the API's side of the pipe: the tokenizer, incremental detokenization, stop strings. Knows nothing of requests or HTTP."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from server.errors import ConfigurationError

REPLACEMENT = "\ufffd"
# The decoder of an incomplete character gives one replacement character, or one for each of its up to three bytes.
MOST_HELD = 3
WINDOW, CONTEXT = 16, 4


class TextCodec:
    """A checkpoint's tokenizer. Special tokens in a prompt's text are read as such; the post-processor decides about BOS."""

    def __init__(self, folder: Path) -> None:
        """Reads tokenizer.json. Raises ConfigurationError where it is missing or broken."""
        if not folder.is_dir():
            raise ConfigurationError(f"{folder}: no such folder; --model takes a checkpoint folder")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigurationError(f"{path}: no such file; text cannot be served without a tokenizer")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception.
            raise ConfigurationError(f"{path}: not a tokenizer this version can read") from error
        # Some files carry the padding and truncation of their training; a prompt must arrive as it is.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.end_token_ids = self._end_token_ids(folder / "tokenizer_config.json")

    def _end_token_ids(self, path: Path) -> tuple[int, ...]:
        if not path.is_file():
            return ()
        try:
            token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise ConfigurationError(f"{path}: cannot be read as a JSON object") from error
        content = token.get("content") if isinstance(token, dict) else token
        id = self.tokenizer.token_to_id(content) if isinstance(content, str) else None
        return () if id is None else (id,)

    @property
    def largest_id(self) -> int:
        """The largest token id that `encode` can give."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        # encode holds the interpreter's lock while it works; encode_batch lets the event loop run meanwhile.
        ids: list[int] = self.tokenizer.encode_batch([text])[0].ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids in one go."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


class Detokenizer:
    """Token by token to text. The concatenation of everything given out is `decode` of all tokens; only a last, unfinished
    character is held back, and `flush` gives it up.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._given = 0
        """Characters of the window's text that have been given out."""

    def push(self, token: int) -> str:
        """The text that has become certain with this token."""
        self._window.append(token)
        text = self._codec.decode(self._window)
        certain = len(text) - min(MOST_HELD, len(text) - len(text.rstrip(REPLACEMENT)))
        new, held = text[self._given : certain], len(text) - certain
        self._given = max(self._given, certain)
        if len(self._window) > WINDOW:
            # A character has at most four bytes, so four tokens hold all of an unfinished one.
            self._window = self._window[-CONTEXT:]
            self._given = len(self._codec.decode(self._window)) - held
        return new

    def flush(self) -> str:
        """What is still held back, as the tokenizer would print it at the end of the text."""
        text = self._codec.decode(self._window)
        new, self._given = text[self._given :], len(text)
        return new


class StopStrings:
    """Finds the first stop string to be completed in a text that arrives in pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._tail = ""

    def push(self, text: str, search: bool = True) -> tuple[str, bool]:
        """(the part of `text` up to and with the first completed stop string, whether there is one). Unsearched text still counts
        as the beginning of a later match.
        """
        tail, self._tail = self._tail, ""
        both = tail + text
        if search:
            ends = [end for stop in self._stops if (end := _first_end(both, stop, len(tail))) is not None]
            if ends:
                return both[len(tail) : min(ends)], True
        self._tail = both[max(0, len(both) - self._keep) :]
        return text, False


def _first_end(text: str, stop: str, after: int) -> int | None:
    """End of the first occurrence of `stop` that ends behind `after`."""
    start = text.find(stop, max(0, after - len(stop) + 1))
    return None if start < 0 else start + len(stop)
