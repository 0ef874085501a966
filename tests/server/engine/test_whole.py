"""Sequences that are computed in one step each, as texts of bidirectional models are: every one is
computed whole, once, and holds nothing afterwards.
"""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.layout import CacheLayout
from model.step import Sampling, StepPlan, StepResult
from server.engine.core import EngineCore
from server.engine.scheduler import Limits, Scheduler
from tests.support.delayed import DelayedRunner
from tests.support.hash_model import HashModel
from tests.support.submitting import submit

CONTEXT, PAGE = 40, 4
LAYOUT = CacheLayout.of(4, (9, None, 9, 9), PAGE)
BLOCKS = -(-CONTEXT // PAGE)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=25),
    max_running=st.integers(1, 6),
    spare_steps=st.integers(0, 30),
    spare_blocks=st.integers(1, 30),
    cancelled=st.sets(st.integers(0, 24), max_size=5),
    is_late=st.booleans(),
)
def test_every_text_is_computed_once_in_one_step(
    lengths: list[int],
    max_running: int,
    spare_steps: int,
    spare_blocks: int,
    cancelled: set[int],
    is_late: bool,
) -> None:
    num_pages = (BLOCKS + spare_blocks) * LAYOUT.pages_per_block
    limits = Limits(
        num_pages, LAYOUT, CONTEXT + 1, max_running, CONTEXT + spare_steps, is_whole=True
    )
    computed = list[int]()

    class Checked(HashModel):
        def run(self, plan: StepPlan) -> StepResult:
            assert sum(len(row.tokens) for row in plan.rows) <= limits.step_tokens
            for row in plan.rows:
                assert row.start == 0 and len(row.tokens) == lengths[row.sequence]
                computed.append(row.sequence)
            return super().run(plan)

    model = Checked(LAYOUT)
    runner: Any = DelayedRunner(model.run) if is_late else model
    scheduler = Scheduler(limits)
    core = EngineCore(scheduler, runner)
    for id, length in enumerate(lengths):
        # Texts that begin alike, of which no part is reused.
        submit(scheduler, id, [1] * length, 1, Sampling())
    ended, num_cancelled = set[int](), len(cancelled)
    for _ in range(4 * len(lengths) + 4):
        if not scheduler.has_work:
            break
        ended |= {event.id for event in core.step()}
        if cancelled:
            scheduler.cancel(cancelled.pop())
    assert not scheduler.has_work
    assert scheduler.allocator.num_available == num_pages
    assert len(ended) >= len(lengths) - num_cancelled
    assert sorted(computed) == sorted(set(computed)) and ended <= set(computed)
    assert scheduler.num_hit_tokens == 0
