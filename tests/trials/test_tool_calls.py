"""A few requests of the trial of random tools, with an engine that dies, in the default suite."""

import pytest

from tests.support.tool_requests import SchemaRequests
from tests.trials.tool_calls import run


@pytest.mark.parametrize("name", ["functiongemma", "gemma4", "granite"])
def test_calls_follow_their_schemas(name: str) -> None:
    findings = run(name, range(9000, 9010), kills=1)
    print(findings.counts)
    assert not findings.wrong and findings.counts["auto: calls"] and findings.counts["requests"] == 10


@pytest.mark.parametrize("name", ["functiongemma", "plain"])
def test_schemas_of_libraries_are_followed(name: str) -> None:
    findings = run(name, range(90, 102), 0, SchemaRequests)
    assert not findings.wrong and findings.counts["named: calls"]
    assert findings.counts["loops" if name == "plain" else "auto: calls"]
