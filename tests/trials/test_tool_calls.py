"""A few requests of the trial of random tools, with an engine that dies, in the default suite."""

import pytest

from tests.trials.tool_calls import run


@pytest.mark.parametrize("name", ["functiongemma", "gemma4", "granite"])
def test_calls_follow_their_schemas(name: str) -> None:
    findings = run(name, range(9000, 9010), kills=1)
    print(findings.counts)
    assert not findings.wrong and findings.counts["auto: calls"] and findings.counts["requests"] == 10
