"""Fill-in-the-middle: which dialect a tokenizer speaks, and the prompt of a prefix and a suffix in it (Bavarian et al. 2022, PSM).

Code between the marks is text: a mark that it spells is no mark. It knows nothing of requests.
"""

from dataclasses import dataclass

from server.errors import InvalidRequest
from server.text.codec import TextCodec

# prefix, suffix, middle, what separates files; StarCoder and granite, SantaCoder, CodeGemma.
WINDOW = 16
"""Tokens at the end of a prompt that are looked at to find where its last one begins."""
DIALECTS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<filename>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ""),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),
)


@dataclass(frozen=True, slots=True)
class Filling:
    """A prompt whose continuation is the middle. `healed` is the end of the prefix, cut off to be generated again."""

    prompt: list[int]
    healed: str
    stop_token_ids: tuple[int, ...]
    """The marks: a model that writes one has finished the middle."""


class FillInTheMiddle:
    """The dialect of one tokenizer, if it has any."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._marks: tuple[int, int, int] | None = None
        self._separator: int | None = None
        for *marks, separator in DIALECTS:
            prefix, suffix, middle = (codec.token_id(mark) for mark in marks)
            if prefix is not None and suffix is not None and middle is not None:
                self._marks = prefix, suffix, middle
                self._separator = codec.token_id(separator) if separator else None
                break

    def fill(self, prefix: str, suffix: str, heal: bool, extra: tuple[tuple[str, str], ...] = (), field: str = "suffix") -> Filling:
        """The prompt for what stands between `prefix` and `suffix`. `extra` is (name, text) of other files, which come before.

        Raises InvalidRequest, which names `field`, where the tokenizer has no such marks.
        """
        if self._marks is None:
            spoken = ", ".join(dialect[0] for dialect in DIALECTS)
            raise InvalidRequest(f"`{field}`: this model cannot fill in the middle, for its tokenizer has none of {spoken}", param=field)
        begin, then, fill = self._marks
        prefix_ids = self._codec.encode_plain(prefix)
        healed = ""
        if heal:
            prefix_ids, healed = cut_last_token(self._codec, prefix_ids, prefix, min_kept=0)
        context = [id for name, text in extra for id in self._file(name, text)]
        prompt = [*self._codec.opening, *context, begin, *prefix_ids, then, *self._codec.encode_plain(suffix), fill]
        stops = (*self._marks, *(() if self._separator is None else (self._separator,)))
        return Filling(prompt, healed, stops)

    def _file(self, name: str, text: str) -> list[int]:
        if self._separator is None:
            return self._codec.encode_plain(f"{name}\n{text}\n" if name else f"{text}\n")
        return [self._separator, *self._codec.encode_plain(f"{name}\n{text}\n")]


def cut_last_token(codec: TextCodec, ids: list[int], text: str, min_kept: int = 1) -> tuple[list[int], str]:
    """Ids without the last token (or the last few, where that one is a part of a character), and the text that they stood for. At least
    `min_kept` ids stay.

    A prompt that ends within what would be one token makes its usual continuation unlikely; generating the last token again, as whatever
    begins with its text, mends that.
    """
    window = ids[-WINDOW:]
    whole = codec.decode(window)
    for count in range(1, min(len(ids) - min_kept, 4) + 1):
        if ids[-count] in codec.special_ids:
            break
        kept = codec.decode(window[:-count])
        cut = whole[len(kept) :]
        if cut and whole.startswith(kept) and text.endswith(cut):
            return ids[:-count], cut
    return ids, ""
