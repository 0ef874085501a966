"""llguidance's tokenizer and its settings for matchers: a grammar that was compiled is followed
under the same limits.
"""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def grammar_tokenizer(text: str, ends: list[int]) -> LLTokenizer:
    """Prepares the tokenizer of a tokenizer.json's text. A large one takes seconds, during which
    the GIL is held. Raises ValueError.
    """
    try:
        return LLTokenizer(text, eos_token=ends or None)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # A panic of the Rust library is not an Exception.
        raise ValueError(
            f"this tokenizer cannot be used for structured output ({type(error).__name__})"
        ) from None


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher with its own lexer: copies of a matcher would share the lexer's limits and
    failures. Limits are in llguidance's units; a mask is computed by walking the vocabulary, so the
    limit of a step grows with the vocabulary.
    """
    limits = LLParserLimits(
        verbose_errors=False,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000 + tokenizer.vocab_size,
        step_max_items=10_000,
        max_items_in_row=500,
        max_lexer_states=100_000,
        max_grammar_size=100_000,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
