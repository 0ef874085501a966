"""A few requests of the trial of random tools, with an engine that dies, in the default suite."""

import pytest

from tests.support.tool_requests import SchemaRequests
from tests.support.tool_schemas import fault
from tests.trials.tool_calls import run


@pytest.mark.parametrize("name", ["functiongemma", "gemma4", "granite"])
def test_calls_follow_their_schemas(name: str) -> None:
    findings = run(name, range(9000, 9010), kills=1)
    print(findings.counts)
    assert (
        not findings.wrong and findings.counts["auto: calls"] and findings.counts["requests"] == 10
    )


@pytest.mark.parametrize("name", ["functiongemma", "plain"])
def test_schemas_of_libraries_are_followed(name: str) -> None:
    findings = run(name, range(90, 102), 0, SchemaRequests)
    assert not findings.wrong and findings.counts["named: calls"]
    assert findings.counts["loops" if name == "plain" else "auto: calls"]


def test_multiples_are_those_of_the_numbers_as_they_are_written() -> None:
    cents = {"type": "number", "multipleOf": 0.01}
    assert not any(fault(value, cents) for value in (7.77, 0.07, 12, -4.35))
    assert all(fault(value, cents) for value in (7.775, 1e-3))


def test_tuples_of_both_drafts_are_judged_beside_each_other() -> None:
    properties = {
        "new": {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        "old": {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
    }
    schema = {"type": "object", "properties": properties}
    assert not fault({"new": ["a"], "old": ["a"]}, schema)
    for name in properties:
        assert fault({name: [1]}, schema) and fault({name: ["a", "b"]}, schema)
