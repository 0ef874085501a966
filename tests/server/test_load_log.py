"""LoadLog: a line every 10 s while requests are open, and none while there is nothing to do."""

import asyncio
import logging
from pathlib import Path

import pytest

from server.load_log import PERIOD_SECONDS, LoadLog
from server.protocol import Gauges
from tests.support.fake_engine import serve


async def test_a_line_for_each_period_with_load(tokenizer_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served = serve(tokenizer_folder)
    await asyncio.sleep(0)  # The engine becomes ready.
    metrics = served.client.metrics
    load = LoadLog(served.client, 100.0)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "onehead"]

    load.tick(100.0 + PERIOD_SECONDS)
    assert lines() == []  # Idle.
    metrics.step(Gauges(3, 2, 8, 0, 0.1, 0, 400, 100), 50)
    load.tick(101.0 + PERIOD_SECONDS)
    assert lines() == []  # Not yet time.
    load.tick(100.0 + 2 * PERIOD_SECONDS)
    rates, cache = "prompt 30.0 tokens/s, generation 5.0 tokens/s", "KV cache usage 25.0 %, prefix cache hit rate 25.0 %"
    assert lines() == [f"load: 3 running, 2 waiting, {rates}, {cache}"]
    metrics.loaded(served.engine.ready)  # An engine that replaces another counts from 0 again.
    metrics.step(Gauges(1, 0, 1, 0, 0.1, 0, 10, 0), 20)
    load.tick(100.0 + 3 * PERIOD_SECONDS)
    assert "prompt 0.0 tokens/s, generation 2.0 tokens/s" in lines()[1]
    metrics.step(Gauges(0, 0, 0, 0, 0.1, 0, 10, 0), 0)
    load.tick(100.0 + 4 * PERIOD_SECONDS)
    assert len(lines()) == 2  # Idle again.
