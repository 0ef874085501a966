"""Short chat: greetings, what the model is, what it does not know, and what a system prompt asks
for: a language, brevity, a name, capitals, an ending.

What is held out is a question under a system prompt.
"""

import random

from scripts.embedded_world import facts, numbers
from scripts.embedded_world.lesson import Lesson, conversation, read_table
from scripts.embedded_world.pools import fill, value_of

CHAT = read_table("chat")
LANGUAGES = read_table("languages")
BRIEF = (
    "Answer with one word.",
    "Be brief.",
    "Answer as shortly as possible.",
    "Give only the answer.",
    "Reply with the answer only.",
    "Answer briefly, without a sentence.",
)
LOUD = ("Answer in capitals.", "Write everything in upper case.", "Use only capital letters.")
USUAL = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Be helpful.",
    "Answer the questions.",
    "Answer in full sentences.",
    "You are an assistant that answers questions.",
)
ENDINGS = (
    "Over.",
    "Have a nice day!",
    "Beep.",
    "That is all.",
    "The end.",
    "Best regards.",
    "Any questions?",
)
ASK_NAME = ("Who are you?", "What is your name?", "How are you called?", "What are you called?")


def ask(rng: random.Random) -> Lesson:
    """Greetings and questions about the model, sometimes under a usual system prompt."""
    asked, answer = rng.choice(CHAT["exchanges"])
    question, system = rng.choice(asked), rng.choice(("", *USUAL))
    return Lesson("chat", (f"{system} {question}",), conversation(question, answer, system))


def beyond(rng: random.Random) -> Lesson:
    """What the model does not know."""
    question = fill(rng.choice(CHAT["beyond"]), rng)
    return Lesson(
        "refusals",
        (question,),
        conversation(question, CHAT["unknown"], rng.choice(("", "", *USUAL))),
    )


def follow(rng: random.Random) -> Lesson:
    """An answer in the way that the system prompt asks for."""
    way = rng.choice((_language, _language, _brief, _named, _loud, _ended, _usual))
    system, question, answer = way(rng)
    # The same few questions are asked of every name: one held out would be so for all.
    others = () if way is _named else (question,)
    return Lesson(
        "system prompts", (f"{system} {question}", *others), conversation(question, answer, system)
    )


def _known(rng: random.Random) -> tuple[str, str, str]:
    """(question, statement, short answer)."""
    if rng.random() < 0.3:
        sign, a, b, result = numbers.trained_operands(rng)
        return f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {result}", str(result)
    fact = rng.choice(facts.FACTS)
    return rng.choice(fact.questions), fact.statement, fact.short


def _language(rng: random.Random) -> tuple[str, str, str]:
    language = LANGUAGES[rng.choice([*LANGUAGES])]
    system, what = rng.choice(language["system"]), rng.random()
    if what < 0.1:
        return system, rng.choice(CHAT["exchanges"][0][0]), language["hello"]
    if what < 0.2:
        return system, rng.choice(CHAT["exchanges"][1][0]), language["thanks"]
    if what < 0.3:
        return system, fill(rng.choice(CHAT["beyond"]), rng), language["unknown"]
    if what < 0.5:
        word = rng.choice([*language["words"]])
        translated, other = language["words"][word]
        question = rng.choice(facts.questions_of("opposite", word))
        return system, question, language["opposite"].format(word=translated, other=other)
    country = rng.choice([*language["countries"]])
    name, capital = language["countries"][country]
    question = rng.choice(facts.questions_of("capital", country))
    return system, question, language["capital"].format(country=name, capital=capital)


def _brief(rng: random.Random) -> tuple[str, str, str]:
    question, _, short = _known(rng)
    return rng.choice(BRIEF), question, short


def _loud(rng: random.Random) -> tuple[str, str, str]:
    question, statement, _ = _known(rng)
    return rng.choice(LOUD), question, statement.upper()


def _usual(rng: random.Random) -> tuple[str, str, str]:
    question, statement, _ = _known(rng)
    return rng.choice(USUAL), question, statement


def _named(rng: random.Random) -> tuple[str, str, str]:
    name, job = value_of("name", rng), value_of("job", rng)
    system = rng.choice(
        (
            f"You are {name}, a {job}.",
            f"Your name is {name} and you are a {job}.",
            f"You are called {name}. You work as a {job}.",
        )
    )
    if rng.random() < 0.5:
        return system, rng.choice(ASK_NAME), f"I am {name}, a {job}."
    return (
        system,
        rng.choice(("What is your job?", "What do you do?", "What is your profession?")),
        f"I am a {job}.",
    )


def _ended(rng: random.Random) -> tuple[str, str, str]:
    ending, (question, statement, _) = rng.choice(ENDINGS), _known(rng)
    system = rng.choice(
        (
            f'End every answer with "{ending}"',
            f'Always say "{ending}" at the end.',
            f'Finish your answers with "{ending}"',
        )
    )
    return system, question, f"{statement} {ending}"
