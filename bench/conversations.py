"""Conversations of several turns: each prompt is the whole history and new words. Also counts the tokens that an unlimited prefix cache
would hit.

Token ids, no text: a conversation begins with one of a few system prompts that many share, and goes on with random words of a user and
whatever the server replies. It knows nothing of how prompts are sent.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_SYSTEMS = 5
SYSTEM_TOKENS = 120, 400
USER_TOKENS = 8, 60
TURNS = 2, 6


@dataclass(slots=True)
class Conversation:
    """What has been said, and what its user will say."""

    tokens: list[int]
    to_come: list[list[int]] = field(default_factory=list)

    def next_prompt(self) -> list[int]:
        return self.tokens + self.to_come.pop(0)


def make_conversations(count: int, vocab_size: int, reply_tokens: int, longest: int, seed: int) -> list[Conversation]:
    """So many, none longer than `longest` tokens with its replies; the same for the same seed."""
    rng = random.Random(seed)

    def words(bounds: tuple[int, int]) -> list[int]:
        return rng.choices(range(vocab_size), k=rng.randint(*bounds))

    systems = [words(SYSTEM_TOKENS) for _ in range(NUM_SYSTEMS)]
    made = []
    for _ in range(count):
        conversation = Conversation(list(rng.choice(systems)))
        length = len(conversation.tokens)
        for _ in range(rng.randint(*TURNS)):
            said = words(USER_TOKENS)
            length += len(said) + reply_tokens
            if length > longest:
                break
            conversation.to_come.append(said)
        made.append(conversation)
    return [conversation for conversation in made if conversation.to_come]


class PerfectCache:
    """Knows every prefix of all prompts so far, token by token."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def longest(self, tokens: Sequence[int]) -> int:
        """How many of these tokens it knows, from the first on."""
        place = 0
        for number, token in enumerate(tokens):
            place = hash((place, token))
            if place not in self._known:
                return number
        return len(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        place = 0
        for token in tokens:
            place = hash((place, token))
            self._known.add(place)


@dataclass(slots=True)
class Ideal:
    """Counts, over all prompts, of tokens and of those that need not be computed again."""

    page_size: int
    cache: PerfectCache = field(default_factory=PerfectCache)
    prompts: int = 0
    queried: int = 0
    known: int = 0
    """Tokens known from earlier prompts, regardless of page borders. A prompt's last token never counts: it must be computed to draw the
    next one.
    """
    known_pages: int = 0
    """Those of them that are on whole pages."""

    def ask(self, prompt: Sequence[int]) -> None:
        """A prompt that is sent now: what is in earlier ones need not be computed again, if one waits for it."""
        known = min(self.cache.longest(prompt), len(prompt) - 1)
        self.prompts += 1
        self.queried += len(prompt)
        self.known += known
        self.known_pages += known // self.page_size * self.page_size
        self.cache.add(prompt)

    def told(self) -> dict[str, float]:
        return {
            "prompts": self.prompts,
            "queried_tokens": self.queried,
            "ideal_rate": self.known / self.queried,
            "ideal_rate_of_pages": self.known_pages / self.queried,
        }
