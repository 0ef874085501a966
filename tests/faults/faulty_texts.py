"""The production process that forks workers for texts and grammars, with faults from the
environment patched into what they name.
"""

import time
from typing import Any

from server.text import worker_process
from server.text.codec import TextCodec
from tests.faults.rules import Rule, Rules

sound_run = worker_process.run


def tokenizer_hangs(rules: Rules, rule: Rule) -> None:
    """Every way to tokenize a text that holds the marker computes for `seconds`."""
    for name in ("encode", "encode_plain", "encode_bare", "encode_with_offsets"):
        sound = getattr(TextCodec, name)

        def stuck(
            codec: TextCodec, text: str, *others: Any, sound: Any = sound, **named: Any
        ) -> Any:
            if rule.marker in text and rules.strike(rule):
                end = time.process_time() + rule.seconds
                while time.process_time() < end:
                    pass
            return sound(codec, text, *others, **named)

        setattr(TextCodec, name, stuck)


def run(*arguments: Any) -> None:
    """In place of worker_process.run."""
    rules = Rules.of_environment()
    for rule in rules.named("tokenizer_hangs"):
        tokenizer_hangs(rules, rule)
    sound_run(*arguments)
