"""Short Python functions: from the signature and docstring to the body, and with a hole in it.

Kinds are the functions of tables/functions.txt, and all combinations of an aggregate, a filter and
a change of the elements of a list. Names of functions and arguments vary. What is held out is a
combination of these. A body is right if it gives what the reference gives (`same_results`).
"""

import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass

from scripts.embedded_world.lesson import TABLES, Lesson

ARGUMENTS = {
    "n": ("n", "number", "value", "num"),
    "k": ("k", "count", "limit"),
    "a": ("a", "x", "first"),
    "b": ("b", "y", "second"),
    "text": ("text", "string", "s", "sentence"),
    "letter": ("letter", "char", "character"),
    "items": ("items", "numbers", "values", "data"),
    "others": ("others", "rest", "more"),
    "words": ("words", "texts", "strings", "names"),
}
"""What a reference calls its arguments, and what a lesson may call them."""
INPUTS = {
    "n": [0, 1, 2, 3, 5, 6, 7, 10, 15, 24, 100],
    "k": [1, 2, 3, 4],
    "a": [-7, -1, 0, 2, 5, 12],
    "b": [1, 2, 3, 5, 8],
    "text": ["", "level", "hello world", "The quick brown Fox", "aa b"],
    "letter": ["a", "l", "o", "T"],
    "items": [[], [3], [1, 2, 3, 4], [5, -2, 8, 8, 0, 7], [10, 20, -30], [9, 3, 6, 3, -6]],
    "others": [[], [3, 4], [8, 5, 1, 2]],
    "words": [[], ["apple"], ["Tom", "anna", "Bob", "kayak"], ["a", "bb", "ccc", "Apple", "be"]],
}
FILTERS = {
    "": ("", ""),
    "even": ("that are even", "{x} % 2 == 0"),
    "odd": ("that are odd", "{x} % 2 == 1"),
    "positive": ("that are positive", "{x} > 0"),
    "negative": ("that are negative", "{x} < 0"),
    "large": ("that are larger than 5", "{x} > 5"),
    "small": ("that are smaller than 5", "{x} < 5"),
    "above_ten": ("that are larger than 10", "{x} > 10"),
    "by_three": ("that are divisible by 3", "{x} % 3 == 0"),
    "by_five": ("that are divisible by 5", "{x} % 5 == 0"),
    "nonzero": ("that are not zero", "{x} != 0"),
}
CHANGES = {
    "": ("{those}", "{x}"),
    "squared": ("the squares of {those}", "{x} ** 2"),
    "doubled": ("twice {those}", "2 * {x}"),
    "cubed": ("the cubes of {those}", "{x} ** 3"),
    "absolute": ("the absolute values of {those}", "abs({x})"),
    "negated": ("the negatives of {those}", "-{x}"),
    "increased": ("{those} plus one", "{x} + 1"),
}
WORD_FILTERS = {
    "": ("", ""),
    "long": ("that are longer than 3 letters", "len({x}) > 3"),
    "short": ("that are shorter than 4 letters", "len({x}) < 4"),
    "with_a": ('that contain "a"', '"a" in {x}'),
    "capitalized": ("that begin with a capital", "{x}[0].isupper()"),
    "palindromic": ("that are palindromes", "{x} == {x}[::-1]"),
}
WORD_CHANGES = {
    "": ("{those}", "{x}"),
    "upper": ("{those} in upper case", "{x}.upper()"),
    "lower": ("{those} in lower case", "{x}.lower()"),
    "reversed": ("{those} reversed", "{x}[::-1]"),
    "initials": ("the first letters of {those}", "{x}[0]"),
    "lengths": ("the lengths of {those}", "len({x})"),
}
AGGREGATES = {
    "sum": ("the sum of {all}", "sum({each})"),
    "list": ("a list of {all}", "[{each}]"),
    "largest": ("the largest of {all}, or 0", "max(({each}), default=0)"),
    "smallest": ("the smallest of {all}, or 0", "min(({each}), default=0)"),
    "count": ("the number of {all}", "len([{each}])"),
    "set": ("a set of {all}", "{{{each}}}"),
    "sorted": ("{all}, sorted", "sorted({each})"),
}
WORD_AGGREGATES = ("list", "count", "set", "sorted")


@dataclass(frozen=True, slots=True)
class Function:
    """A reference. `arguments` are named as in ARGUMENTS."""

    name: str
    arguments: tuple[str, ...]
    doc: str
    body: str

    def source(self, name: str, names: dict[str, str]) -> tuple[str, str]:
        """(signature and docstring, body) under other names."""
        pattern = re.compile(rf"\b({'|'.join(self.arguments)})\b(?!=)")
        doc, body = (
            pattern.sub(lambda found: names[found[0]], text) for text in (self.doc, self.body)
        )
        listed = ", ".join(names[argument] for argument in self.arguments)
        return f'def {name}({listed}):\n    """{doc}"""', f"\n{body}"


def _listed() -> list[Function]:
    blocks = re.findall(
        r"def (\w+)\((.*?)\): (.*)\n((?:    .*\n)+)",
        (TABLES / "functions.txt").read_text(encoding="utf-8"),
    )
    return [
        Function(name, tuple(arguments.split(", ")), doc, body)
        for name, arguments, doc, body in blocks
    ]


def _combined(argument: str, noun: str) -> list[Function]:
    """The combinations over a list of numbers or of words."""
    filters, changes = (FILTERS, CHANGES) if noun == "numbers" else (WORD_FILTERS, WORD_CHANGES)
    functions = []
    for how, (result, expression) in AGGREGATES.items():
        for chosen, (which, condition) in filters.items():
            for changed, (what, element) in changes.items():
                if (noun == "words" and how not in WORD_AGGREGATES) or (how == "count" and changed):
                    continue
                x = "x" if noun == "numbers" else "word"
                those = f"{argument} {which}".strip()
                each = f"{element.format(x=x)} for {x} in {argument}"
                each += f" if {condition.format(x=x)}" * bool(condition)
                doc = f"Return {result.format(all=what.format(those=those))}."
                name = "_".join(filter(None, (how, changed, chosen)))
                functions.append(
                    Function(name, (argument,), doc, f"    return {expression.format(each=each)}\n")
                )
    return functions


FUNCTIONS = [*_listed() * 3, *_combined("items", "numbers"), *_combined("words", "words")]
PREFIXES = ("", "", "", "get_", "compute_", "my_", "find_")
SUFFIXES = ("", "", "", "_of", "_value", "_result")


def written(rng: random.Random) -> tuple[Function, str, str, str]:
    """(reference, key, signature and docstring, body) of a function under names of its own."""
    function = rng.choice(FUNCTIONS)
    names = {argument: rng.choice(ARGUMENTS[argument]) for argument in function.arguments}
    name = rng.choice(PREFIXES) + function.name + rng.choice(SUFFIXES)
    head, body = function.source(name, names)
    return function, head, head, body


def complete(rng: random.Random) -> Lesson:
    """The body of a function, after its signature and docstring."""
    _, key, head, body = written(rng)
    return Lesson("functions", (key,), prompt=head, completion=body)


def fill_in(rng: random.Random) -> Lesson:
    """A piece of a function's body: some of its lines, or the end or a part of one line."""
    _, key, head, body = written(rng)
    words = [found.start() for found in re.finditer(r"\w+|[^\w\s]", body)]
    begin = rng.choice(words)
    ends = [body.index("\n", begin), *(word for word in words if word > begin)]
    end = ends[0] if rng.random() < 0.5 else rng.choice(ends)
    return Lesson(
        "holes", (key,), prompt=head + body[:begin], completion=body[begin:end], suffix=body[end:]
    )


def chat(rng: random.Random) -> Lesson:
    """A function asked for in a conversation."""
    function, key, head, body = written(rng)
    wish = function.doc[0].lower() + function.doc[1:]
    signature = head.split("\n", 1)[0]
    user = rng.choice(
        (
            f"Write a Python function: {signature} It should {wish}",
            f"Write {signature} in Python. It has to {wish}",
            f"Please complete this function: {signature} It must {wish}",
        )
    )
    names = dict(
        zip(function.arguments, re.findall(r"\((.*)\)", signature)[0].split(", "), strict=True)
    )
    user = re.sub(rf"\b({'|'.join(function.arguments)})\b(?=[^()]*$)", lambda f: names[f[0]], user)
    code = f"```python\n{signature}{body}```"
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": code}]
    return Lesson("functions in chat", (key,), turns)


CHECK = """
import itertools, json, sys
source, reference, inputs = json.load(sys.stdin)
spaces = {}, {}
exec(source, spaces[0]); exec(reference, spaces[1])
first, second = ([v for k, v in space.items() if k != "__builtins__"][0] for space in spaces)
def run(function, arguments):
    try:
        return function(*json.loads(json.dumps(arguments)))
    except Exception as error:
        return type(error).__name__
for given in itertools.product(*inputs):
    if repr(run(first, given)) != repr(run(second, given)):
        sys.exit(1)
"""


def same_results(source: str, reference: str) -> bool:
    """Whether a function gives what the reference gives, on inputs by the names of its arguments;
    in a process of its own, within 5 s.
    """
    meant = {name: argument for argument, names in ARGUMENTS.items() for name in names}
    listed = re.findall(r"\((.*?)\)", reference)[0].split(", ")
    inputs = [INPUTS[meant[name]] for name in listed]
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHECK],
            capture_output=True,
            timeout=5,
            check=False,
            input=json.dumps([source, reference, inputs]),
            text=True,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
