"""F07, F09, F10, F22 and F27: what goes wrong inside a step or on the pipe hurts at most the
request that it is about.
"""

import pytest

from tests.faults.clients import Ask
from tests.faults.rules import Rule
from tests.faults.scene import Case, Scene

MARKED = "MARKED"
REPEATED_TOKEN = 66
STALL = ("--server.stall_after", "1.5")


def too_big_together(scene: Scene, error: str) -> None:
    """More than three rows never fit: all requests are computed all the same, by the same
    engine.
    """
    scene.start(rules=(Rule("oom", rows=3, error=error),))
    engine = scene.server.engine_pid
    scene.ask_all(scene.asks(10, 40))
    scene.all_finished()
    assert scene.server.engine_pid == engine and scene.server.restarts == 0


def one_fails(
    scene: Scene,
    rule: Rule,
    code: str,
    parameters: dict[str, object] | None = None,
    before: int = 0,
) -> None:
    """The marked request ends with an error of its own, streamed or whole, in both dialects; its
    neighbours and those who come after it are as ever, in the same engine.
    """
    scene.start(rules=(rule,))
    engine = scene.server.engine_pid
    marked = [
        Ask(f"{MARKED} {i}", 40, parameters or {}, ("tgi", "openai")[i % 2], i < 2)
        for i in range(4)
    ]
    sound = scene.ask_all(scene.asks(8, 60))
    failed = [scene.ask(ask).join() for ask in marked]
    for exchange in failed:
        streams, tgi = exchange.ask.stream and before > 0, exchange.ask.dialect == "tgi"
        assert exchange.error is not None and not exchange.finished
        assert exchange.status == (200 if streams else 424 if tgi else 500), (
            f"{exchange.status} {exchange.error}"
        )
        assert tgi or exchange.code == code, exchange.error
        assert len(exchange.ids) == (before if streams else 0)
    scene.ask_all(scene.asks(8, 60))  # They get the pages of the requests that failed.
    for exchange in scene.outcomes():
        assert exchange.finished or exchange in failed, (
            f"request {exchange.number}: {exchange.status} {exchange.error}"
        )
    assert len(sound) == 8 and scene.server.engine_pid == engine and scene.server.restarts == 0


def grammar_fails(scene: Scene) -> None:
    scene.traces = True
    grammar: dict[str, object] = {
        "grammar": {"type": "regex", "value": "[a-z]{30}"},
        "ignore_eos": None,
    }
    one_fails(scene, Rule("grammar_fails", marker=MARKED), "grammar_error", grammar, before=1)


def detokenizer_fails(scene: Scene) -> None:
    """In the API process, which must not mind more than the engine does."""
    scene.traces = True
    rule = Rule("detokenizer_fails", token=REPEATED_TOKEN)
    scene.start(rules=(rule,))
    marked = [
        Ask(MARKED, 20, {"allowed_token_ids": [REPEATED_TOKEN]}, ("tgi", "openai")[i % 2], i < 2)
        for i in range(4)
    ]
    clean = {"logit_bias": {str(REPEATED_TOKEN): -100}}
    sound = [
        Ask(ask.prompt, 60, ask.parameters | clean, ask.dialect, ask.stream, canary=ask.canary)
        for ask in scene.asks(8)
    ]
    going = scene.ask_all(sound)
    for exchange in scene.ask_all(marked):
        exchange.join()
        assert exchange.error is not None and exchange.status in (200, 424, 500), (
            f"{exchange.status} {exchange.error}"
        )
    assert all(exchange.join().finished for exchange in going) and scene.server.restarts == 0


def few_pages(scene: Scene) -> None:
    """Room for two of eight sequences: the others are put back and computed again, to the same
    tokens as with all the room there is.
    """
    scene.start("--cache.page_size", "8", "--cache.pages", "40", "--engine.max_running", "8")
    scene.ask_all(scene.asks(16, 100))
    scene.all_finished()
    assert scene.server.metric("onehead_preemptions_total") > 0 and scene.server.restarts == 0


def bad_frame(scene: Scene, kind: str) -> None:
    """An engine that violates the protocol is replaced; clients see no more of it than a pause."""
    rules = (Rule("pace", seconds=0.005), Rule(kind, after=8, times=1))
    scene.start(*STALL, rules=rules)
    front = scene.server.process.pid
    with scene.watched():
        scene.ask_all(scene.asks(8, 40))
        scene.all_finished()
        scene.canary()
    assert scene.server.restarts == 1 and scene.server.process.pid == front


def repeated_frame(scene: Scene) -> None:
    """What was said already changes nothing."""
    scene.start(rules=(Rule("repeated", after=3),))
    scene.ask_all(scene.asks(8, 40))
    scene.all_finished()


ALWAYS = Rule("oom", marker=MARKED, after=4, error="gpu")
NAN_LOGITS = Rule("nan_logits", marker=MARKED, after=4)
NAN_PAGES = Rule("nan_pages", marker=MARKED, after=4)
CASES = [
    Case("F07", "rows that do not fit a GPU", too_big_together, ("gpu",)),
    Case("F07", "rows that do not fit a CPU", too_big_together, ("cpu",)),
    Case("F07", "rows that do not fit Python", too_big_together, ("python",)),
    Case("F07", "a row that never fits", one_fails, (ALWAYS, "out_of_memory", None, 4)),
    Case(
        "F07",
        "a row that never fits from the start",
        one_fails,
        (Rule("oom", marker=MARKED, error="cpu"), "out_of_memory"),
    ),
    Case("F09", "NaN in the logits of a row", one_fails, (NAN_LOGITS, "numerical_error", None, 4)),
    Case("F09", "NaN in the cache of a row", one_fails, (NAN_PAGES, "numerical_error", None, 4)),
    Case("F10", "grammar of a row fails", grammar_fails),
    Case("F10", "detokenizer of a row fails", detokenizer_fails),
    Case("F22", "preemption in a tiny pool", few_pages),
    *(
        Case("F27", f"{kind} frame", bad_frame, (kind,))
        for kind in ("garbage", "truncated", "truncated_end", "oversized", "swapped", "dropped")
    ),
    Case("F27", "repeated frame", repeated_frame),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(scene: Scene, case: Case) -> None:
    scene.play(case)
