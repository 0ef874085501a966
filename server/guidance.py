"""llguidance as both processes use it: what the API process has checked, the engine follows under the same limits."""

from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def read_tokenizer(path: Path, ends: list[int]) -> LLTokenizer:
    """The tokenizer of a checkpoint; of a large one that takes seconds, and holds the interpreter's lock. Raises ValueError."""
    try:
        return LLTokenizer(path.read_text(encoding="utf-8"), eos_token=ends or None)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the library's is no Exception.
        raise ValueError(f"{path}: not a tokenizer whose tokens can be constrained ({type(error).__name__})") from None


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher with a lexer of its own: copies of a matcher share one, whose limits add up, and whose failure is every copy's. A mask is
    computed by walking the vocabulary, so what one step may cost grows with that; it is in llguidance's units.
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
