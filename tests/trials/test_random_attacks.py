"""Bodies of the random attacker: the same for the same name, and within the bound on bodies."""

import json

import pytest

from tests.trials.attack_bodies import KINDS
from tests.trials.random_attacks import MAX_BODY_BYTES, Attacker, Sent, body_of


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_one_body_within_the_bound(kind: str) -> None:
    for seed in range(3):
        first, second = (json.dumps(body_of(f"{kind}:{seed}:1.0").body) for _ in range(2))
        assert first == second and len(first) <= MAX_BODY_BYTES


def test_kinds_that_keep_the_server_longest_are_sent_more_often() -> None:
    attacker = Attacker(0)
    for kind in KINDS:
        for _ in range(30):
            attacker.learn(Sent(f"{kind}:0:1", 0.0, 200, 10.0 if kind == "grammar" else 0.01))
    drawn = [attacker.draw().split(":")[0] for _ in range(200)]
    assert drawn.count("grammar") > 150
