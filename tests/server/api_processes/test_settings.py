"""The options of an API process: its part of the bounds, and every other option as it was given."""

from pathlib import Path

import pytest

from server.api_processes.settings import MAX_STREAM_BYTES, part_of
from server.config import ServerSection

PARTS = ("max_connections", "resume_memory", "resume_stream_bytes", "resume_retention", "max_detached")


def test_every_option_crosses_the_link(tmp_path: Path) -> None:
    section = ServerSection.model_validate(
        {
            "api_keys": "0" * 64,
            "trusted_proxies": "10.0.0.0/8,::1",
            "served_model_names": "a,b",
            "api_keys_file": str(tmp_path / "keys"),
            "root_path": "/llm",
            "drain_timeout": 1.5,
        }
    )
    part = part_of(section, 3)
    again = ServerSection.model_validate_json(part.model_dump_json())
    assert again == part and again.trusted_proxies == section.trusted_proxies
    assert again.model_dump(exclude=set(PARTS)) == section.model_dump(exclude=set(PARTS))


@pytest.mark.parametrize(("count", "expected"), [(2, (50, 2**24, 32)), (3, (33, 2**25 // 3, 21)), (64, (1, 2**19, 1))])
def test_bounds_are_divided(count: int, expected: tuple[int, int, int]) -> None:
    part = part_of(ServerSection(max_connections=100), count)
    assert (part.max_connections, part.resume_memory, part.max_detached) == expected and part.resume_retention == 0
    assert part_of(ServerSection(max_detached=0), count).max_detached == 0
    assert part_of(ServerSection(resume_stream_bytes=2**30), count).resume_stream_bytes == MAX_STREAM_BYTES
