"""Sums and differences of numbers up to 99, products up to 12 x 12, and comparisons up to 999.

What is held out is a pair of numbers under an operation, in all its wordings; under a comparison, a
pair in its order.
"""

import random

from scripts.embedded_world.lesson import Lesson, conversation

SIGNS = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?"),
    "-": ("What is {a} minus {b}?", "Subtract {b} from {a}.", "Take {b} away from {a}."),
    "*": ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
}
FORMS = (
    "What is {a} {sign} {b}?",
    "{a} {sign} {b} = ?",
    "Calculate {a} {sign} {b}.",
    "How much is {a} {sign} {b}?",
    "Compute {a} {sign} {b}",
    "{a} {sign} {b}",
)


def operands(rng: random.Random) -> tuple[str, int, int, int]:
    """(sign, a, b, result); no result is below 0."""
    sign = rng.choices("+-*", (4, 4, 2))[0]
    if sign == "*":
        a, b = rng.randrange(13), rng.randrange(13)
        return sign, a, b, a * b
    a, b = rng.randrange(100), rng.randrange(100)
    if sign == "-":
        a, b = max(a, b), min(a, b)
        return sign, a, b, a - b
    return sign, a, b, a + b


def trained(sign: str, a: int, b: int) -> bool:
    """Whether training may show the result of a pair: whether it is not held out."""
    return Lesson("numbers", (f"{a} {sign} {b}",)).may_be_trained_on


def trained_operands(rng: random.Random) -> tuple[str, int, int, int]:
    """As `operands`, of a pair that is not held out."""
    while True:
        sign, a, b, result = operands(rng)
        if trained(sign, a, b):
            return sign, a, b, result


def compared(rng: random.Random) -> tuple[int, int]:
    """Two different numbers, often of similar size."""
    a = rng.randrange(1000)
    b = max(0, a + rng.randrange(-30, 31)) if rng.random() < 0.5 else rng.randrange(1000)
    return (a, b) if a != b else (a, b + 1)


def ask(rng: random.Random) -> Lesson:
    """A calculation or a comparison in words."""
    if rng.random() < 0.75:
        sign, a, b, result = operands(rng)
        form = rng.choice([*FORMS, *SIGNS[sign]])
        question = form.format(a=a, b=b, sign=sign)
        return Lesson(
            "numbers", (f"{a} {sign} {b}",), conversation(question, f"{a} {sign} {b} = {result}")
        )
    a, b = compared(rng)
    more, less = max(a, b), min(a, b)
    question, answer = rng.choice(
        (
            (f"Which is larger, {a} or {b}?", f"{more} is larger than {less}."),
            (f"Which number is greater: {a} or {b}?", f"{more} is larger than {less}."),
            (f"Which is smaller, {a} or {b}?", f"{less} is smaller than {more}."),
            (
                f"Is {a} larger than {b}?",
                f"Yes, {a} is larger than {b}." if a > b else f"No, {a} is smaller than {b}.",
            ),
            (
                f"Is {a} less than {b}?",
                f"Yes, {a} is smaller than {b}." if a < b else f"No, {a} is larger than {b}.",
            ),
        )
    )
    return Lesson("numbers", (f"{a} < {b}",), conversation(question, answer))


def table(rng: random.Random) -> Lesson:
    """Lines of calculations as a text, or a number's products and the other way round; none of a
    pair that is held out.
    """
    if rng.random() < 0.3:
        a = rng.randrange(13)
        drawn = [("*", *pair, a * b) for b in range(13) for pair in ((a, b), (b, a))]
    else:
        drawn = [operands(rng) for _ in range(18)]
    lines = [f"{a} {sign} {b} = {result}\n" for sign, a, b, result in drawn if trained(sign, a, b)]
    return Lesson("tables", (), completion="".join(lines))
