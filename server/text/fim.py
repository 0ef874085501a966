"""Fill-in-the-middle prompts in prefix-suffix-middle order (Bavarian et al. 2022), and token
healing.

Invariant: special tokens spelt in the given texts are tokenized as text. It knows nothing of
requests.
"""

from dataclasses import dataclass

from server.errors import InvalidRequest
from server.text.codec import TextCodec

WINDOW = 16
"""Tokens at the end of a prompt that `cut_last_token` decodes."""
# Prefix, suffix, middle and file separator of StarCoder and Granite, of SantaCoder, and of
# CodeGemma.
MARKS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<filename>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ""),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),
)


@dataclass(frozen=True, slots=True)
class Filling:
    """A prompt whose continuation is the middle. `healed`: text removed from its end by token
    healing.
    """

    prompt: list[int]
    healed: str = ""
    stop_token_ids: tuple[int, ...] = ()
    """The fill-in-the-middle tokens: the middle ends where the model generates one."""


class FillInTheMiddle:
    """Builds prompts with the fill-in-the-middle tokens of a tokenizer, if it has any."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.marks: tuple[int, int, int] | None = None
        """Ids of the tokens before the prefix, the suffix and the middle; None where the tokenizer
        has none."""
        self._separator: int | None = None
        for marks in (_named_marks(codec), *MARKS):
            prefix, suffix, middle, separator = (
                codec.token_id(mark) if mark else None for mark in marks
            )
            if prefix is not None and suffix is not None and middle is not None:
                self.marks = prefix, suffix, middle
                self._separator = separator
                break

    def fill(
        self,
        prefix: str,
        suffix: str,
        heal: bool,
        extra: tuple[tuple[str, str], ...] = (),
        field: str = "suffix",
        begun: str = "",
    ) -> Filling:
        """The prompt for the text between `prefix` and `suffix`, after the other files `extra`:
        (name, text). `begun` is the beginning of the middle; token healing applies to the text
        before the gap, which is `begun` if there is one.

        Raises InvalidRequest that names `field` if the tokenizer has no fill-in-the-middle tokens.
        """
        if self.marks is None:
            known = ", ".join(marks[0] for marks in MARKS)
            raise InvalidRequest(
                f"`{field}`: this model cannot fill in the middle, for its tokenizer has none of "
                f"{known}",
                param=field,
            )
        prefix_id, suffix_id, middle_id = self.marks
        prefix_ids, begun_ids = self._codec.encode_plain(prefix), self._codec.encode_plain(begun)
        healed = ""
        if heal and begun:
            begun_ids, healed = cut_last_token(self._codec, begun_ids, begun, min_kept=0)
        elif heal:
            prefix_ids, healed = cut_last_token(self._codec, prefix_ids, prefix, min_kept=0)
        context = [id for name, text in extra for id in self._file(name, text)]
        prompt = [
            *self._codec.opening,
            *context,
            prefix_id,
            *prefix_ids,
            suffix_id,
            *self._codec.encode_plain(suffix),
            middle_id,
            *begun_ids,
        ]
        separator = () if self._separator is None else (self._separator,)
        return Filling(prompt, healed, self.marks + separator)

    def _file(self, name: str, text: str) -> list[int]:
        if self._separator is None:
            return self._codec.encode_plain(f"{name}\n{text}\n" if name else f"{text}\n")
        return [self._separator, *self._codec.encode_plain(f"{name}\n{text}\n")]


def _named_marks(codec: TextCodec) -> tuple[str, ...]:
    """The tokens that tokenizer_config.json names, as that of a GGUF file does where its metadata
    names them; empty strings for others.
    """
    return tuple(
        codec.files.special_token(f"fim_{part}_token") or ""
        for part in ("prefix", "suffix", "middle", "separator")
    )


def cut_last_token(
    codec: TextCodec, ids: list[int], text: str, min_kept: int = 1
) -> tuple[list[int], str]:
    """Token healing: the ids without the last token, or without up to four where that one is part
    of a character, and the removed text.

    At least `min_kept` ids stay. A prompt that ends within what would usually be one token makes
    its continuation unlikely; generating its last token again, under the constraint that its text
    is kept, avoids that.
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
