"""A tokenizer of 262,144 words, as many as Gemma's, made from a seed, for costs that grow with the
vocabulary.

Its words are of the kinds in large published vocabularies: word pieces with and without a leading
space, capitals, names with underscores, runs of punctuation and of spaces, numbers of up to three
digits, and several scripts. Each word is the merge of two others, so that the tokenizer encodes its
text as that word.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

SIZE = 262_144
END = 1
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
SCRIPTS = [
    LETTERS + LETTERS.upper() + "▁" + "0123456789" + PUNCTUATION + "\n\tåäöéèüñç",
    "".join(map(chr, range(0x3B1, 0x3CA))) + "".join(map(chr, range(0x430, 0x450))),
    "".join(map(chr, range(0x627, 0x64B))) + "".join(map(chr, range(0x915, 0x93A))),
    "".join(map(chr, range(0x4E00, 0x5E00)))
    + "".join(map(chr, range(0xAC00, 0xB400)))
    + "".join(map(chr, range(0x1F600, 0x1F640))),
]
SHARES = [
    ("latin", 0.62),
    ("name", 0.06),
    ("punctuation", 0.03),
    ("greek", 0.12),
    ("arabic", 0.07),
    ("chinese", 0.1),
]


def write_large_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json and its companion files into a folder, and returns the folder."""
    rng = random.Random(262_144)
    vocab = {
        word: number
        for number, word in enumerate(SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)])
    }
    merges: list[list[str]] = []
    for character in dict.fromkeys("".join(SCRIPTS)):
        vocab[character] = len(vocab)

    def merge(left: str, right: str) -> str:
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
        return left + right

    for character in "▁\n\t-=_*#":
        run = character
        for _ in range(30):
            run = merge(run, character)
    for number in range(10, 1000):
        text = str(number)
        merge(text[:-1], text[-1])
    pools = _pools(merge)
    while len(vocab) < SIZE:
        kind = rng.choices([name for name, _ in SHARES], [share for _, share in SHARES])[0]
        firsts, seconds = pools[kind]
        left, right = rng.choice(firsts), rng.choice(seconds)
        if len(left) + len(right) <= 18 and left + right not in vocab:
            firsts.append(merge(left, right))
    special = [
        {
            "id": number,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, word in enumerate(SPECIAL)
    ]
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": vocab,
        "merges": merges,
    }
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[END]}))
    return folder


def _pools(merge: Callable[[str, str], str]) -> dict[str, tuple[list[str], list[str]]]:
    """Kind of word -> its possible beginnings, which grow, and its possible continuations."""
    vowels = "aeiou"
    syllables = [merge(a, b) for a in LETTERS for b in vowels] + [
        merge(a, b) for a in vowels for b in LETTERS if a != b
    ]
    spaced = [merge("▁", first) for first in LETTERS + LETTERS.upper()]
    greek, arabic, chinese = (list(script) for script in SCRIPTS[1:])
    return {
        "latin": (
            spaced * 20 + list(LETTERS + LETTERS.upper()) * 8 + syllables,
            syllables + list(LETTERS),
        ),
        "name": ([merge("_", letter) for letter in LETTERS] + ["_"], [*syllables, "_"]),
        "punctuation": (
            list(PUNCTUATION) + [merge("▁", mark) for mark in PUNCTUATION],
            [*list(PUNCTUATION), "\n"],
        ),
        "greek": (greek + [merge("▁", letter) for letter in greek], greek),
        "arabic": (arabic + [merge("▁", letter) for letter in arabic], arabic),
        "chinese": (list(chinese), chinese),
    }


if __name__ == "__main__":
    import sys

    write_large_tokenizer(Path(sys.argv[1]))
