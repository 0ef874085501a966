"""Bodies that cost a server most within every bound: the known ones, and kinds of random ones, each
from a random.Random and a size to 1.

Invariant: a body depends on its arguments alone. It knows no servers.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

VOCABULARY = 4000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Attack:
    """A request to POST."""

    path: str
    body: dict[str, Any]


IDS = [5 + i % 500 for i in range(500)]
KNOWN = {
    "A8 allowed_token_ids": Attack(
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 2, "n": 128, "allowed_token_ids": [*range(1, 4000)] * 65},
    ),
    "A8 650,000 ids": Attack(
        COMPLETIONS, {"prompt": "a", "max_tokens": 2, "n": 128, "allowed_token_ids": [1] * 650_000}
    ),
    "A9 stop": Attack(COMPLETIONS, {"prompt": "a", "stop": [""] * 260_000}),
    "A9 infill stop": Attack(
        "/infill", {"input_prefix": "a", "input_suffix": "", "stop": [1] * 260_000}
    ),
    "A9 samplers": Attack(
        "/infill", {"input_prefix": "a", "input_suffix": "", "samplers": [1] * 260_000}
    ),
    "A9 modalities": Attack(
        CHAT, {"messages": [{"role": "user", "content": "a"}], "modalities": [1] * 260_000}
    ),
    "A9 content": Attack(CHAT, {"messages": [{"role": "user", "content": [1] * 260_000}]}),
    "A10 bad_words": Attack(
        COMPLETIONS,
        {
            "prompt": ["x"] * 256,
            "max_tokens": 1,
            "bad_words": [f"{i:03}" + "w q" * 84 for i in range(128)],
        },
    ),
    "A10 within the price": Attack(
        COMPLETIONS,
        {
            "prompt": ["x"] * 64,
            "max_tokens": 1,
            "bad_words": [f"{i:03}" + "w q" * 84 for i in range(128)],
        },
    ),
    "A11 prompt_logprobs": Attack(
        COMPLETIONS, {"prompt": IDS, "max_tokens": 1, "n": 64, "prompt_logprobs": 20}
    ),
    "A11 echo": Attack(
        COMPLETIONS, {"prompt": IDS, "max_tokens": 1, "n": 64, "echo": True, "logprobs": 20}
    ),
    "A12 tokenize": Attack("/tokenize", {"inputs": "a b " * 520_000}),
}

SCRIPTS = [
    (0x20, 0x7E), (0xA1, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x64A),
    (0x904, 0x939), (0xE01, 0xE3A),
    (0x1100, 0x11FF), (0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F),
    (0x300, 0x36F), (0x200B, 0x200F),
    (0x20000, 0x2A6DF), (0, 0x1F),
]  # fmt: skip


def text(rng: random.Random, length: int) -> str:
    """A text of one script, of a repeated piece, or of one letter."""
    low, high = rng.choice(SCRIPTS)
    kind = rng.randrange(4)
    if kind == 0:
        return "".join(chr(rng.randint(low, high)) for _ in range(min(length, 20_000))) * (
            1 + length // 20_000
        )
    piece = "".join(chr(rng.randint(low, high)) for _ in range(rng.choice((1, 1, 2, 3, 8, 100))))
    return (piece + " " * (kind == 1)) * (length // (len(piece) + 1) + 1)


def ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(5, VOCABULARY), k=max(1, count))


def up_to(rng: random.Random, size: float, most: int) -> int:
    """A number up to `most`, mostly near its share `size`."""
    return max(1, int(most * size * rng.choice((1, 1, 0.5, 0.1))))


def sampled(rng: random.Random, size: float) -> dict[str, Any]:
    """Random fields that both /v1 bodies take."""
    every: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice((0, 1, 2)),
        "top_k": lambda: up_to(rng, size, VOCABULARY),
        "top_p": lambda: rng.uniform(0.01, 1),
        "min_p": rng.random,
        "typical_p": lambda: rng.uniform(0.01, 1),
        "repetition_penalty": lambda: rng.uniform(0.1, 5),
        "frequency_penalty": lambda: rng.uniform(-2, 2),
        "logit_bias": lambda: {
            str(id): rng.uniform(-100, 100) for id in set(ids(rng, up_to(rng, size, 1024)))
        },
        "allowed_token_ids": lambda: ids(rng, up_to(rng, size, 200_000)),
        "bad_words": lambda: [
            text(rng, up_to(rng, size, 255))[:256] for _ in range(up_to(rng, size, 128))
        ],
        "stop": lambda: [
            text(rng, up_to(rng, size, 1000))[:1024] for _ in range(up_to(rng, size, 16))
        ],
        "stop_token_ids": lambda: ids(rng, up_to(rng, size, 128)),
        "n": lambda: up_to(rng, size, 128),
        "ignore_eos": lambda: True,
        "return_token_ids": lambda: True,
        "prompt_logprobs": lambda: up_to(rng, size, 20),
    }
    names = rng.sample([*every], rng.randint(1, len(every)))
    return {name: every[name]() for name in names} | {"max_tokens": up_to(rng, size, 64)}


def completion(rng: random.Random, size: float) -> Attack:
    """Prompts of ids or texts, many or long, with everything that multiplies them."""
    body = sampled(rng, size)
    count = up_to(rng, size, 256) if rng.random() < 0.5 else 1
    length = up_to(rng, size, max(1, 100_000 // count))
    body["prompt"] = [ids(rng, min(length, 4000)) for _ in range(count)]
    if rng.random() < 0.5:
        body["prompt"] = [text(rng, length) for _ in range(count)]
    if rng.random() < 0.5:
        body |= {"logprobs": up_to(rng, size, 20), "echo": rng.random() < 0.7}
    if rng.random() < 0.3:
        body["stream"] = True
        body.pop("prompt_logprobs", None)
    return Attack(COMPLETIONS, body)


def chat(rng: random.Random, size: float) -> Attack:
    """Messages, many or long, or in many parts."""
    count = up_to(rng, size, 1024)
    content: Any = text(rng, up_to(rng, size, 10**6 // count))
    if rng.random() < 0.3:
        content = [{"type": "text", "text": "a"}] * up_to(rng, size, max(1, 16_000 // count - 1))
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i in range(count)]
    body = sampled(rng, size) | {"messages": messages}
    return Attack(
        CHAT,
        body
        | ({"logprobs": True, "top_logprobs": up_to(rng, size, 20)} if rng.random() < 0.5 else {}),
    )


def tgi(rng: random.Random, size: float) -> Attack:
    parameters: dict[str, Any] = {
        "max_new_tokens": up_to(rng, size, 64),
        "details": True,
        "do_sample": True,
    }
    parameters |= {
        "top_n_tokens": up_to(rng, size, 5),
        "decoder_input_details": rng.random() < 0.5,
        "best_of": up_to(rng, size, 128),
    }
    return Attack(
        "/generate", {"inputs": text(rng, up_to(rng, size, 10**6)), "parameters": parameters}
    )


def tokens(rng: random.Random, size: float) -> Attack:
    """/tokenize in its three forms, and /detokenize."""
    long = text(rng, up_to(rng, size, 600_000))
    kind = rng.randrange(4)
    if kind == 0:
        return Attack("/detokenize", {"tokens": ids(rng, up_to(rng, size, 250_000))})
    if kind == 1:
        return Attack("/tokenize", {"messages": [{"role": "user", "content": long}]})
    return Attack(
        "/tokenize", {"inputs": long} if kind == 2 else {"prompt": long, "return_token_strs": True}
    )


def infill(rng: random.Random, size: float) -> Attack:
    extra = [
        {"filename": "a", "text": text(rng, up_to(rng, size, 2000))}
        for _ in range(up_to(rng, size, 256))
    ]
    prefix, suffix = (text(rng, up_to(rng, size, 300_000)) for _ in range(2))
    return Attack(
        "/infill",
        {"input_prefix": prefix, "input_suffix": suffix, "input_extra": extra, "n_predict": 8},
    )


def schema(rng: random.Random, size: float, depth: int = 0) -> dict[str, Any]:
    """A JSON schema of any keywords."""
    wide = up_to(rng, size, max(2, 40 >> depth))

    def inner() -> dict[str, Any]:
        return schema(rng, size, depth + 1)

    leaves: list[Callable[[], dict[str, Any]]] = [
        lambda: {
            "type": "integer",
            "multipleOf": rng.choice((1, 7, 997, up_to(rng, size, 30_000_000))),
        },
        lambda: {"type": "number", "minimum": -rng.random(), "maximum": rng.random() * 10**9},
        lambda: {"type": "string", "pattern": pattern(rng, size)},
        lambda: {"type": "string", "minLength": wide, "maxLength": wide + up_to(rng, size, 5000)},
        lambda: {"enum": [text(rng, 20) for _ in range(wide * 10)]},
        lambda: {
            "type": "string",
            "format": rng.choice(("date-time", "uuid", "ipv6", "email", "hostname")),
        },
    ]
    if depth > 3:
        return rng.choice(leaves)()
    branches: list[Callable[[], dict[str, Any]]] = [
        lambda: {
            "type": "object",
            "properties": {f"k{i}": inner() for i in range(wide)},
            "required": [f"k{i}" for i in range(wide)],
        },
        lambda: {
            "type": "array",
            "items": inner(),
            "minItems": wide,
            "maxItems": wide + up_to(rng, size, 1000),
        },
        lambda: {"type": "array", "prefixItems": [inner() for _ in range(wide)]},
        lambda: {"anyOf": [inner() for _ in range(wide)]},
        lambda: {"oneOf": [inner() for _ in range(wide)]},
        lambda: {"allOf": [inner() for _ in range(min(wide, 8))]},
        lambda: {"type": "object", "additionalProperties": inner()},
        lambda: {
            "$defs": {"a": inner() | {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}},
            "$ref": "#/$defs/a",
        },
    ]
    return rng.choice(branches + leaves)()


def pattern(rng: random.Random, size: float, depth: int = 0) -> str:
    """A regular expression of every operator."""
    if depth > 4:
        return rng.choice(("a", ".", "[a-z]", r"\d", r"\w", "[^x]", "é", r"\p{L}", "ab|cd"))
    inner = pattern(rng, size, depth + 1)
    most = up_to(rng, size, 400)
    forms = (
        "({0})*",
        "({0})+",
        "({0})?",
        "({0}){{{1}}}",
        "({0}){{1,{1}}}",
        "{0}|{2}",
        "{0}{2}",
        ".*{0}.*",
        "(?i:{0})",
    )
    return rng.choice(forms).format(inner, most, pattern(rng, size, depth + 1))


def lark(rng: random.Random, size: float) -> str:
    """A grammar in Lark's syntax of rules that refer to each other, of terminals with &, ~, ranges
    and repetitions.
    """
    count = up_to(rng, size, 12)
    rules = [f"r{i}" for i in range(count)]
    lines = [f"start: {rng.choice(rules)}"]
    for rule in rules:
        options = [
            " ".join(rng.choices([*rules, '"x"', '"y"', "T0", "T1", ""], k=rng.randint(1, 4)))
            for _ in range(rng.randint(1, 4))
        ]
        lines.append(f"{rule}: {' | '.join(options)}" + rng.choice(("", " |", ' | "z"')))
    for name in ("T0", "T1"):
        parts = [f"/{pattern(rng, size, 3)}/" for _ in range(up_to(rng, size, 20))]
        lines.append(f"{name}: {rng.choice((' & ', ' | ', ' ')).join(parts)}")
    return "\n".join(lines)


def grammar(rng: random.Random, size: float) -> Attack:
    """A constraint of any form on one sequence or many."""
    forms: list[Callable[[], dict[str, Any]]] = [
        lambda: {"json": schema(rng, size)},
        lambda: {"regex": pattern(rng, size)},
        lambda: {"grammar": lark(rng, size)},
        lambda: {"choice": [text(rng, 200)[:256] for _ in range(up_to(rng, size, 1000))]},
    ]
    body = {
        "prompt": "a",
        "max_tokens": up_to(rng, size, 64),
        "n": up_to(rng, size, 32),
        "temperature": rng.choice((0, 1)),
    }
    return Attack(COMPLETIONS, body | {"structured_outputs": rng.choice(forms)()})


KINDS: dict[str, Callable[[random.Random, float], Attack]] = {
    "completion": completion,
    "chat": chat,
    "tgi": tgi,
    "tokens": tokens,
    "infill": infill,
    "grammar": grammar,
}
