"""Which replica a prompt goes to, and which replica has a stream; without Ray."""

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deploy.ray.affinity import (
    BLOCK,
    GENERATING,
    MAX_BLOCKS,
    MAX_HOLDERS,
    PrefixTable,
    StreamOwners,
    prefix_keys,
)
from tests.support.fake_engine import serve

WORDS = "one two three four five six seven eight nine ten " * 40
"""Of more than seven blocks."""


def keys(*, owner: str = "", **fields: Any) -> tuple[bytes, ...]:
    return prefix_keys(json.dumps(fields).encode(), owner)


def messages(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": "user" if number % 2 == 0 else "assistant", "content": content}
        for number, content in enumerate(contents)
    ]


def test_equal_keys_are_equal_prefixes() -> None:
    """A text that differs in one character shares the blocks before it alone."""
    at = 3 * BLOCK + 5
    ours, theirs = keys(prompt=WORDS), keys(prompt=WORDS[:at] + "#" + WORDS[at + 1 :])
    assert len(ours) == len(WORDS) // BLOCK
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [True] * 3 + [False] * (
        len(ours) - 3
    )


def test_a_conversation_shares_the_keys_of_its_earlier_turns() -> None:
    before = keys(messages=messages(WORDS, WORDS))
    after = keys(messages=messages(WORDS, WORDS, WORDS))
    assert len(before) >= 2 * len(WORDS) // BLOCK
    assert after[: len(before)] == before


def test_a_longer_list_of_token_ids_shares_the_keys_of_the_shorter() -> None:
    ids = list(range(1000, 1400))
    before = keys(prompt=ids)
    assert before and keys(prompt=[*ids, 7, 8, 9])[: len(before)] == before


def test_both_dialects_have_the_same_prompt() -> None:
    assert keys(prompt=WORDS, max_tokens=3) == keys(inputs=WORDS, parameters={"max_new_tokens": 5})


def test_callers_who_share_no_pages_share_no_keys() -> None:
    plain = keys(prompt=WORDS)
    assert not set(plain) & set(keys(prompt=WORDS, owner="Bearer another"))
    assert not set(plain) & set(keys(prompt=WORDS, cache_salt="mine"))


def test_bodies_without_a_prompt_have_no_keys() -> None:
    for body in (
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"\xff",
        b'{"other": "x"}',
        b'{"prompt": "short"}',
        b'{"prompt": null}',
        b'{"prompt":' + b"[" * 100_000,
    ):
        assert prefix_keys(body) == ()


def test_what_is_read_of_a_prompt_is_bounded() -> None:
    assert len(keys(prompt="x" * (2 * MAX_BLOCKS * BLOCK))) == MAX_BLOCKS


def test_a_known_prefix_decides_unless_its_replica_is_much_busier() -> None:
    table = PrefixTable(slack=4)
    known = keys(prompt=WORDS)
    table.remember(known, "a")
    longer = keys(prompt=WORDS + "and more")
    assert table.choose(longer, {"a": 4, "b": 0}) == "a"
    assert table.choose(longer, {"a": 5, "b": 0}) == "b"
    assert table.choose(keys(prompt="#" * 2000), {"a": 1, "b": 0}) == "b"


def test_the_longest_prefix_wins_over_a_shorter_one() -> None:
    table = PrefixTable()
    all_keys = keys(prompt=WORDS)
    table.remember(all_keys[:5], "b")
    table.remember(all_keys[:6], "a")
    table.remember(all_keys[:5], "b")
    assert table.choose(all_keys, {"a": 3, "b": 0}) == "a"


def test_a_prefix_below_half_of_the_prompt_does_not_decide() -> None:
    table = PrefixTable()
    all_keys = keys(prompt="x" * (10 * BLOCK))
    table.remember(all_keys[:4], "a")
    assert table.choose(all_keys, {"a": 1, "b": 0}) == "b"
    table.remember(all_keys[:5], "a")
    assert table.choose(all_keys, {"a": 1, "b": 0}) == "a"


def test_a_prefix_that_all_share_spreads_over_replicas() -> None:
    """As each becomes much busier, the next learns it, and from then on the least busy of them gets
    it.
    """
    table = PrefixTable(slack=2)
    shared, loads = keys(prompt=WORDS), dict.fromkeys("abc", 0)
    for _ in range(30):
        chosen = table.choose(shared, loads)
        table.remember(shared, chosen)
        loads[chosen] += 1
    assert max(loads.values()) - min(loads.values()) <= 3


def test_without_a_prefix_the_replica_that_holds_least_is_chosen_of_the_least_busy() -> None:
    table = PrefixTable()
    table.remember(keys(prompt=WORDS), "a")
    assert table.choose((), {"a": 0, "b": 0}) == "b"
    assert table.choose((), {"a": 0, "b": 1}) == "a"


def test_a_replica_that_has_ended_is_forgotten() -> None:
    table = PrefixTable()
    table.remember(keys(prompt=WORDS), "a")
    table.keep_only(["b", "c"])
    assert len(table) == 0 and table.choose(keys(prompt=WORDS), {"b": 1, "c": 0}) == "c"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8), st.booleans()), max_size=200))
def test_memory_is_bounded_and_counts_are_right(steps: list[tuple[int, int, bool]]) -> None:
    table = PrefixTable(capacity=20)
    rng = random.Random(1)
    alive = {f"r{number}" for number in range(9)}
    for text, replica, ends in steps:
        if ends:
            alive = alive - {f"r{replica}"} or alive
            table.keep_only(alive)
        name = table.choose([bytes([text])], {name: rng.randrange(30) for name in alive})
        assert name in alive
        table.remember([bytes([text, part]) for part in range(3)] + [bytes([text])], name)
        assert len(table) <= 20
        counted = {
            name: sum(name in holders for holders in table._holders.values()) for name in alive
        }
        assert counted == {name: table._held[name] for name in alive}
        assert all(
            0 < len(holders) <= MAX_HOLDERS and set(holders) <= alive
            for holders in table._holders.values()
        )


def test_the_latest_streams_are_known() -> None:
    owners = StreamOwners(capacity=2)
    for number in range(3):
        owners.remember(f"stream{number}", f"replica{number}")
    assert [owners.find(f"stream{number}") for number in range(3)] == [None, "replica1", "replica2"]
    owners.forget("stream1")
    owners.forget("stream0")
    assert [owners.find(f"stream{number}") for number in (1, 2)] == [None, "replica2"]


async def test_the_paths_whose_prompts_are_remembered_are_those_of_the_server_that_generate(
    tokenizer_folder: Path,
) -> None:
    """But for those that make vectors, of which nothing stays in the cache."""
    vectors = {"/v1/embeddings", "/embed", "/embedding", "/embeddings", "/classify"}
    vectors |= {"/v1/rerank", "/rerank", "/api/embed", "/api/embeddings"}
    routes = serve(tokenizer_folder).app.table.routes
    assert {route.path for route in routes if route.generates} - vectors == GENERATING
