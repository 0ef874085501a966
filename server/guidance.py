"""Settings of llguidance shared by both processes, so that a grammar the API process accepts runs under the same limits in the engine."""

from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from model.checkpoint.files import MOST_TOKENIZER_BYTES, read_text


def read_tokenizer(path: Path, ends: list[int]) -> LLTokenizer:
    """Reads a tokenizer.json. A large one takes seconds, during which the GIL is held. Raises ValueError, or CheckpointError."""
    text = read_text(path, MOST_TOKENIZER_BYTES)
    try:
        return LLTokenizer(text or "", eos_token=ends or None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the Rust library is not an Exception.
        raise ValueError(f"{path}: this tokenizer cannot be used for structured output ({type(error).__name__})") from None


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher with its own lexer: copies of a matcher would share the lexer's limits and failures. Limits are in llguidance's units;
    a mask is computed by walking the vocabulary, so the limit of a step grows with the vocabulary.
    """
    limits: dict[str, Any] = {
        "initial_lexer_fuel": 200_000,
        "step_lexer_fuel": 50_000 + tokenizer.vocab_size,
        "step_max_items": 10_000,
        "max_items_in_row": 2_000,
        "max_lexer_states": 100_000,
        "max_grammar_size": 100_000,
    }
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, **limits))
