"""Structured output: finished outputs parse and validate for any logits; constraints that are not
supported are refused.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from server import protocol
from server.errors import ConstraintFailed, InvalidRequest
from server.text.codec import TextCodec
from server.text.constraints import GrammarConstraint, Grammars, HealingConstraint
from server.text.service import Source
from tests.support.constraints import BOMBS, EVERYDAY, PUBLISHED
from tests.support.guided import alone, choose, compiled, fresh, read_grammars, requests, together
from tests.support.inline_workers import Compiler
from tests.support.large_vocabulary import write_large_tokenizer
from tests.support.paths import EMBEDDED
from tests.support.processes import ServerProcess, kill, wait_until

END = 0


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TextCodec(EMBEDDED))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return read_grammars(EMBEDDED / "tokenizer.json", [END])


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that llguidance supports and random tokens can finish."""
    kinds = ["integer", "string", "boolean", "enum", "null", "number", "const"] + [
        "object",
        "array",
        "anyOf",
    ] * (depth < 3)
    kind = rng.choice(["object"] if depth == 0 else kinds)
    if kind == "object":
        names = rng.sample(["a", "b", "name", "n", "x y", "é"], rng.randint(1, 4))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": names[: rng.randint(0, len(names))],
            "additionalProperties": False,
        }
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": rng.randint(0, 1),
            "maxItems": rng.randint(1, 3),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "string":
        return rng.choice(
            [
                {"type": "string", "maxLength": rng.randint(1, 12)},
                {"type": "string", "pattern": "^[a-c]{1,4}$"},
                {"type": "string", "format": "date"},
            ]
        )
    if kind == "integer":
        return {"type": "integer", "minimum": -5, "maximum": rng.randint(0, 1000)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": 9}
    if kind == "enum":
        return {"enum": rng.sample(["x", "yy", 3, None, True, {"k": [1]}], 3)}
    if kind == "const":
        return {"const": rng.choice([{"a": 1}, "é", 0])}
    return {"type": kind}


@pytest.mark.nightly
def test_200_random_schemas_through_the_server(embedded_server: ServerProcess) -> None:
    def ask(seed: int) -> tuple[bool, bool]:
        schema = random_schema(random.Random(seed))
        body = {
            "prompt": "record = ",
            "max_tokens": 120,
            "temperature": 1.2,
            "seed": seed,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            },
        }
        status, answer = embedded_server.post("/v1/completions", body)
        assert status == 200, (seed, schema, answer)
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["text"])
            jsonschema.validate(value, schema)
            compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            assert len(choice["text"]) <= len(compact) + 8 * compact.count("\\") + 40, (
                "optional whitespace"
            )
        return True, choice["finish_reason"] == "stop"

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(ask, range(200)))
    assert len(outcomes) == 200 and sum(finished for _, finished in outcomes) >= 180


def walk(
    constraint: GrammarConstraint | HealingConstraint, rng: random.Random, most: int = 400
) -> list[int]:
    """Tokens drawn at random under the mask, with the forced ones, to the end token."""
    output = list(constraint.forced)
    while len(output) < most:
        assert constraint.mask is not None
        allowed = [id for id in range(4096) if constraint.mask[id // 8] >> (id % 8) & 1]
        # The end where it may come, or most walks never finish.
        token = END if END in allowed else rng.choice(allowed)
        output.append(token)
        if token == END:
            return output
        constraint.advance(token)
        output += constraint.forced
    return output


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 262,144 words."""
    return write_large_tokenizer(tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="module", params=[4096, 262_144])
def vocabulary(request: pytest.FixtureRequest) -> Path:
    """The folder of a tokenizer of so many words."""
    return EMBEDDED if request.param == 4096 else request.getfixturevalue("large_folder")  # type: ignore[no-any-return]


def test_requests_served_together_get_what_each_gets_alone(vocabulary: Path) -> None:
    """Requests over 40 grammars on 64 streams, with preemption and two replays: requests share
    neither lexers nor their limits. At length: tests.trials.grammar_isolation.
    """
    codec = TextCodec(vocabulary)
    grammars, refused = compiled(codec)
    assert not refused and len(set(grammars)) == 40
    served = read_grammars(codec.path, list(codec.end_token_ids))
    asked = requests(grammars, 200 if vocabulary == EMBEDDED else 80, 100, seed=1)
    ends = list(codec.end_token_ids)
    for request, outcome in zip(
        asked, together(asked, served, ends, seed=1, crashes=2), strict=True
    ):
        assert outcome == alone(request, fresh(served), ends), request
        assert outcome[1] in ("eos_token", "length") or request.grammar in grammars[-len(BOMBS) :]


def test_a_request_that_fails_leaves_others_with_the_same_grammar_alone(grammars: Grammars) -> None:
    grammar, codec = _raw_regex(BOMBS[1]), TextCodec(EMBEDDED)
    (a,), (z,) = codec.encode("a"), codec.encode("z")
    for _ in range(2):
        constraint = grammars.constraint(submit(grammar))
        assert constraint is not None
        constraint.advance(z)
        with pytest.raises(ConstraintFailed):
            failing = grammars.constraint(submit(grammar))
            assert failing is not None
            for token in (a, *codec.encode("a") * 40):
                failing.advance(token)
        constraint.advance(z)


ANSWERED = PUBLISHED + [
    ("regex", expression) for expression in EVERYDAY if ("regex", expression) not in PUBLISHED
]


@pytest.mark.parametrize(("kind", "value"), ANSWERED, ids=lambda x: str(x)[:40])
def test_published_and_everyday_constraints_are_answered_on_262144_words(
    large_compiler: Compiler, large_grammars: Grammars, kind: Any, value: Any
) -> None:
    grammar = asyncio.run(large_compiler.compile(Source(kind, value, "f")))
    for seed in range(3):
        constraint, rng = large_grammars.constraint(submit(grammar, end=1)), random.Random(seed)
        assert constraint is not None
        for _ in range(100):
            assert constraint.mask is not None
            if (token := choose(constraint.mask, rng.getrandbits(60))) == 1:
                break
            constraint.advance(token)


@pytest.fixture(scope="module")
def large_compiler(large_folder: Path) -> Compiler:
    return Compiler(TextCodec(large_folder))


@pytest.fixture(scope="module")
def large_grammars(large_folder: Path) -> Grammars:
    return read_grammars(large_folder / "tokenizer.json", [1])


async def test_a_grammar_that_fails_after_some_tokens_only_is_refused_before(
    compiler: Compiler,
) -> None:
    """The highest ids alone lead nowhere near the part that is too complex."""
    with pytest.raises(InvalidRequest, match="too complex"):
        await compiler.compile(Source("regex", "\\x{10FFFF}{40}|!(?:a{1,1000}){1000}", "f"))


def submit(
    grammar: str = "", healed: str = "", output: list[int] | None = None, end: int = END
) -> protocol.Submit:
    return protocol.Submit(
        0, [1], output or [], 500, 0, [end], protocol.Sampling(), grammar=grammar, healed=healed
    )


@pytest.mark.parametrize("part", range(4))
def test_a_constraint_cut_anywhere_and_replayed_goes_on_as_it_was(
    compiler: Compiler, grammars: Grammars, part: int
) -> None:
    codec = TextCodec(EMBEDDED)
    for seed in range(part, 60, 4):
        rng = random.Random(seed)
        schema = random_schema(rng)
        grammar = asyncio.run(compiler.compile(Source("json", schema, "f")))
        constraint = grammars.constraint(submit(grammar))
        assert constraint is not None
        tokens = walk(constraint, rng)
        if tokens[-1] == END:
            jsonschema.validate(json.loads(codec.decode(tokens[:-1])), schema)
        cut = rng.randrange(len(tokens))
        replayed = grammars.constraint(submit(grammar, output=tokens[:cut]))
        assert replayed is not None
        assert tokens[cut : cut + len(replayed.forced)] == replayed.forced
        rest = tokens[cut + len(replayed.forced) :]
        if rest and tokens[-1] == END:
            assert replayed.mask is not None and replayed.mask[rest[0] // 8] >> (rest[0] % 8) & 1


def test_forced_tokens_are_taken_several_at_a_step_and_with_their_logprobs(
    embedded_server: ServerProcess,
) -> None:
    schema = {
        "type": "object",
        "properties": {"a_long_name_of_a_field": {"type": "boolean"}},
        "required": ["a_long_name_of_a_field"],
    }
    body = {
        "prompt": "x",
        "max_tokens": 60,
        "temperature": 0,
        "logprobs": 1,
        "structured_outputs": {"json": schema},
    }
    before = embedded_server.metric("onehead_step_time_seconds_count")
    status, answer = embedded_server.post("/v1/completions", body)
    steps = embedded_server.metric("onehead_step_time_seconds_count") - before
    (choice,) = answer["choices"]
    assert status == 200 and json.loads(choice["text"]).keys() == {"a_long_name_of_a_field"}
    assert answer["usage"]["completion_tokens"] > steps + 4
    # The same output, scored as a prompt, has the same log-probabilities: forced tokens' are the
    # model's own too.
    scored = {"prompt": "x" + choice["text"], "max_tokens": 0, "echo": True, "logprobs": 1}
    logprobs = embedded_server.post("/v1/completions", scored)[1]["choices"][0]["logprobs"]
    if logprobs["tokens"][1:] == choice["logprobs"]["tokens"][:-1]:
        for ours, theirs in zip(
            choice["logprobs"]["token_logprobs"], logprobs["token_logprobs"][1:], strict=False
        ):
            assert ours == pytest.approx(theirs, abs=1e-3)


def test_a_constrained_stream_outlives_the_engine(embedded_folder: Path) -> None:
    server = ServerProcess(embedded_folder)
    try:
        grammar = {"type": "regex", "value": "([0-9]{4}-[a-f]{4} ){40}"}
        parameters: dict[str, Any] = {
            "max_new_tokens": 300,
            "grammar": grammar,
            "do_sample": True,
            "seed": 3,
        }
        whole = server.text("x", **parameters)
        assert len(whole) > 300
        stream = server.stream("x", **parameters)
        events: Iterator[Any] = stream.events()
        for _ in range(20):
            next(events)
        kill(server.engine_pid)
        *_, last = events
        assert last["generated_text"] == whole
        wait_until(lambda: server.metric("onehead_kv_pages_used") == 0, "every page is free")
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "(?:a{1,1000}){1000}", "too complex"),
        ("regex", r"(a)\1", "not a regular expression"),
        ("regex", "(?<=a)b", "not a regular expression"),
        ("regex", "(", "not a regular expression"),
        ("regex", "a" * 70_000, "longer than 65536"),
        ("json", {"$ref": "http://127.0.0.1/x"}, "nothing is fetched"),
        ("json", {"enum": [f"value {i}" for i in range(100_000)]}, "longer than 65536"),
        ("json", {"type": "string", "not": {"const": "a"}}, "at #/not: it cannot be followed"),
        ("json", {"type": "integer", "minimum": 5, "maximum": 1}, "cannot"),
        ("json", [], "JSON schema"),
        ("json", "{", "not JSON"),
        ("lark", "start: (", "cannot be compiled"),
        ("lark", "start: missing", "cannot be compiled"),
        ("lark", 'x ::= y\nroot ::= "a"', "is neither Lark nor GBNF: Rule 'y' not found"),
        ("lark", "root ::= (", "is neither Lark nor GBNF: Expected '\\)' at line 1"),
        ("lark", "root ::= " + "(" * 5000, "is neither Lark nor GBNF"),
        ("json", '{"type": "object", "default": NaN}', "a number that is not finite"),
    ],
    ids=lambda x: str(x)[:20],
)
async def test_bombs_and_nonsense_are_refused_at_once(
    compiler: Compiler, kind: Any, value: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        await asyncio.wait_for(compiler.compile(Source(kind, value, "field")), 5)
    assert (
        caught.value.param == "field"
        and "\n" not in caught.value.message
        and len(caught.value.message) < 200
    )


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no"', "yes|no"),
        ('root ::= word (" " word)*\nword ::= [a-c]{1,3} # letters', "[a-c]{1,3}( [a-c]{1,3})*"),
        ('root ::= "-"? digit+ ("." digit+)?\ndigit ::= [0-9]', r"-?\d+(\.\d+)?"),
        ('root ::= [^a-z\\n]{2} "\\t"', r"[^a-z\n]{2}\t"),
        ('start: "a ::= b"', "a ::= b"),
    ],
)
async def test_grammars_of_llama_cpp(
    compiler: Compiler, grammars: Grammars, grammar: str, pattern: str
) -> None:
    """GBNF, and Lark that has its sign in a text: random tokens make texts of the language."""
    compiled = await compiler.compile(Source("lark", grammar, "grammar"))
    for seed in range(8):
        rng = random.Random(seed)
        constraint = grammars.constraint(submit(compiled))
        ids = list[int]()
        assert constraint is not None
        while len(ids) < 60:
            ids += constraint.forced
            allowed = [
                id
                for id in range(4096)
                if constraint.mask is not None and constraint.mask[id // 8] >> id % 8 & 1
            ]
            token = END if END in allowed else rng.choice(allowed)
            if token == END:
                break
            ids.append(token)
            constraint.advance(token)
        text = TextCodec(EMBEDDED).decode(ids)
        assert re.fullmatch(pattern, text) or len(ids) >= 60, text


@pytest.mark.parametrize("depth", [50, 120, 200, 320, 10_000])
async def test_deep_schemas(compiler: Compiler, depth: int) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    if depth < 100:
        await compiler.compile(Source("json", schema, "field"))
        return
    with pytest.raises(InvalidRequest, match=r"nested too deeply|recursion limit exceeded"):
        await compiler.compile(Source("json", schema, "field"))


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|b)*a(a|b){20}", "((a*)*)*c"])
async def test_what_explodes_when_backtracking_is_followed_in_bounded_time(
    compiler: Compiler, grammars: Grammars, pattern: str
) -> None:
    """A derivative of the expression is taken for each character: these cost no more than others,
    so they are served.
    """
    grammar = await compiler.compile(Source("regex", pattern, "field"))
    constraint = grammars.constraint(submit(grammar))
    assert constraint is not None and constraint.mask is not None
    for _ in range(50):
        allowed = [id for id in range(1, 4096) if constraint.mask[id // 8] >> (id % 8) & 1]
        if not allowed:
            break
        constraint.advance(allowed[0])


def test_a_grammar_that_becomes_too_complex_fails_its_own_request(grammars: Grammars) -> None:
    with pytest.raises(ConstraintFailed):
        constraint = grammars.constraint(submit(_raw_regex("(?:a{1,1000}){1000}")))
        assert constraint is not None
        for _ in range(50):
            assert constraint.mask is not None
            constraint.advance(
                max(id for id in range(4096) if constraint.mask[id // 8] >> (id % 8) & 1)
            )


def _raw_regex(pattern: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


@pytest.mark.parametrize("healed", ["i", "imp", " re", "\n    ", "é", "<", "x.y("])
def test_healing_writes_the_cut_text_again_and_then_anything(
    grammars: Grammars, healed: str
) -> None:
    codec = TextCodec(EMBEDDED)
    for seed in range(10):
        rng, output = random.Random(seed), []
        constraint = grammars.constraint(submit(healed=healed))
        assert constraint is not None
        while constraint.mask is not None:
            token = rng.choice(
                [id for id in range(4096) if constraint.mask[id // 8] >> (id % 8) & 1]
            )
            output.append(token)
            constraint.advance(token)
        assert codec.decode(output).startswith(healed) and not constraint.forced
        replayed = grammars.constraint(submit(healed=healed, output=output))
        assert replayed is not None and replayed.mask is None
