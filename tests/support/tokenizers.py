"""Small tokenizers of each kind of decoder that published checkpoints have, with words, spaces,
bytes and special tokens.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = "<s>", "</s>", "<end_of_turn>"
WORDS = "ab", "cd", "n't", "do", "not", "'s", "'m"
LETTERS = "abcdef.,'!?é漢"


def _pieces(first: tuple[str, ...]) -> dict[str, int]:
    """A vocabulary as SentencePiece makes it, bytes included; `first`: its first tokens."""
    words = ["▁", "▁▁", "▁▁▁", *LETTERS, *WORDS, *(f"▁{word}" for word in (*"abcdef漢", *WORDS))]
    names = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *words, "\n"]
    return {name: id for id, name in enumerate(dict.fromkeys(names))}


def _byte_level() -> Tokenizer:
    words = ["ab", "Ġa", "Ġab", "cd", "ĠĠ", "Ã©"]
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    tokenizer = Tokenizer(
        models.BPE({name: id for id, name in enumerate(dict.fromkeys(names))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(_pieces((*SPECIAL, "<unk>")), [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def _byte_fallback(strips: bool) -> Tokenizer:
    """As in checkpoints of llama and mistral, which begin a text with a space that the decoder
    strips, or in those of Gemma.
    """
    vocabulary = _pieces((*SPECIAL, "<unk>"))
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), spaces] if strips else [spaces]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return tokenizer


def _word_piece(cleanup: bool) -> Tokenizer:
    names = [*SPECIAL, "[UNK]", *LETTERS, *WORDS, *(f"##{word}" for word in (*"abcdef", "ab"))]
    vocabulary = {name: id for id, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return tokenizer


MAKERS = {
    "byte level": _byte_level,
    "metaspace, prefix": lambda: _metaspace("always"),
    "metaspace": lambda: _metaspace("never"),
    "strip": lambda: _byte_fallback(strips=True),
    "byte fallback": lambda: _byte_fallback(strips=False),
    "word piece": lambda: _word_piece(cleanup=False),
    "clean-up of spaces": lambda: _word_piece(cleanup=True),
}


def make_decoding_tokenizer(kind: str, folder: Path) -> Tokenizer:
    """One of MAKERS, whose first ids are SPECIAL, written into the folder."""
    tokenizer = MAKERS[kind]()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
