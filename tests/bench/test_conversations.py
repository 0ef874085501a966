"""The conversations that bench/prefix_cache.py plays, and the ideal that it holds hit rates against, worked out by hand."""

from bench.conversations import Ideal, PerfectCache, make_conversations


def test_a_perfect_cache_knows_prefixes_and_nothing_else() -> None:
    cache = PerfectCache()
    cache.add([1, 2, 3, 4])
    cache.add([1, 2, 9])
    assert [cache.longest(tokens) for tokens in ([1, 2, 3, 5], [1, 2, 9, 9], [2, 3, 4], [], [1, 2, 3, 4])] == [3, 3, 0, 0, 4]


def test_the_ideal_of_two_turns() -> None:
    ideal = Ideal(page_size=4)
    ideal.ask([1, 2, 3, 4, 5])
    ideal.cache.add([1, 2, 3, 4, 5, 6, 7])  # The reply was 6, 7 and one more, which was not computed.
    ideal.ask([1, 2, 3, 4, 5, 6, 7, 8, 9])
    ideal.ask([1, 2, 3, 4])  # Known whole, and its last token has to be computed all the same.
    assert (ideal.prompts, ideal.queried, ideal.known, ideal.known_pages) == (3, 18, 10, 4)


def test_conversations_share_beginnings_and_fit() -> None:
    made, same = (make_conversations(200, 1000, reply_tokens=16, longest=700, seed=3) for _ in range(2))
    assert made == same and len(made) > 150
    assert 1 < len({tuple(conversation.tokens) for conversation in made}) <= 5
    for conversation in made:
        assert len(conversation.tokens) + sum(len(said) + 16 for said in conversation.to_come) <= 700
        first = conversation.to_come[0]
        assert conversation.next_prompt() == conversation.tokens + first and first not in conversation.to_come
