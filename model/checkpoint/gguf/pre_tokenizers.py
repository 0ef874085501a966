"""The pre-tokenizers of byte-level vocabularies, by the names of `tokenizer.ggml.pre`: regular
expressions that split a text.

They are those of the models' own tokenizer.json files. Each expression splits what the expressions
before it have left, and both its matches and the text between them are kept as pieces.
"""

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's words, each with the space before it."""
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (WORDS,),
    "starcoder": (r"\p{N}", WORDS),
    "refact": (r"\p{N}", WORDS),
    "smollm": (r"\p{N}", WORDS),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", WORDS, "[0-9][0-9][0-9]"),
    "llama-bpe": LLAMA_3,
    "llama3": LLAMA_3,
    "llama-v3": LLAMA_3,
}
"""Name -> the expressions, in their order."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")
"""Pre-tokenizers whose words are not merged where the vocabulary has them whole, and after which a
prompt begins with the begin token.
"""
