"""The processes that follow constraints: over real pipes, with the embedded model's tokenizer, and
through deaths of every kind.
"""

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher

from server import child_process
from server.engine import masks
from server.engine.masks import MAX_ATTEMPTS, MaskProcesses, ProcessConstraint
from server.errors import ConstraintFailed
from server.protocol import Begin, Opening
from server.text import worker_process
from server.text.codec import TextCodec
from server.text.constraints import Grammars
from server.text.jobs import Texts
from server.text.worker_process import CONSTRAINT_MEMORY
from tests.support.constraints import BOMBS
from tests.support.guided import read_grammars
from tests.support.paths import EMBEDDED
from tests.support.processes import alive, children, wait_until

TOKENIZER = EMBEDDED / "tokenizer.json"
WORDS = LLMatcher.grammar_from_regex("([a-z]+ )+")
AMBIGUOUS = LLMatcher.grammar_from_lark('start: a "~~~"\na: a a a a | a a | a a a | "x" | "y" | ')
QUIET = Pipe()
"""A pipe on which nothing arrives."""


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return read_grammars(TOKENIZER, [0])


FORKING = 0
"""The process that forks those of a test: the one for grammars, while it lives, and them."""


@pytest.fixture
def processes() -> Iterator[MaskProcesses]:
    global FORKING
    control, jobs, grammars = (
        socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)
    )
    theirs = control[1], jobs[1], grammars[1]
    texts = Texts(TextCodec(EMBEDDED))
    FORKING = child_process.fork(
        lambda: worker_process.run(texts, *theirs), *(end.fileno() for end in theirs)
    )
    processes = MaskProcesses(grammars[0])
    yield processes
    for pipe in processes._spares:
        pipe.close()
    processes._selector.close()
    kill(FORKING)
    os.waitpid(FORKING, 0)
    for end in (*control, *jobs, *grammars):
        end.close()


def begun(
    processes: MaskProcesses,
    grammar: str,
    output: list[int],
    healed: str = "",
    opening: Opening | None = None,
) -> ProcessConstraint:
    asked: Any = SimpleNamespace(grammar=grammar, healed=healed, opening=opening)
    constraint = processes.constraint(asked)
    assert constraint is not None
    constraint.begin(output)
    return constraint


def settle(processes: MaskProcesses, *constraints: ProcessConstraint) -> None:
    while any(constraint.is_pending for constraint in constraints):
        processes.wait(QUIET[0])


def lowest(mask: bytes | None, start: int = 20) -> int:
    assert mask is not None
    return next(id for id in range(start, 8 * len(mask)) if mask[id // 8] >> (id % 8) & 1)


def grammar_process() -> int:
    (pid,) = children(FORKING)
    return pid


def followers() -> list[int]:
    return children(grammar_process())


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not alive(pid), "the process has ended")


def follow(
    processes: MaskProcesses, constraint: ProcessConstraint, output: list[int], number: int
) -> None:
    for _ in range(number):
        output.append(lowest(constraint.take().mask))
        constraint.advance(output[-1])
        settle(processes, constraint)


@pytest.mark.parametrize("victim", ["follower", "all of them", "the one that forks"])
@pytest.mark.parametrize("when", ["idle", "computing"])
def test_a_lost_process_is_replaced_and_the_masks_are_the_same(
    processes: MaskProcesses, grammars: Grammars, victim: str, when: str
) -> None:
    outputs: list[list[int]] = [[], []]
    followed = [begun(processes, WORDS, output) for output in outputs]
    settle(processes, *followed)
    for constraint, output in zip(followed, outputs, strict=True):
        follow(processes, constraint, output, 3)
    victims = followers()
    victims = {
        "follower": victims[:1],
        "all of them": victims,
        "the one that forks": [grammar_process()],
    }[victim]
    if when == "computing":
        for process in victims:
            kill(process, signal.SIGSTOP)
        for constraint, output in zip(followed, outputs, strict=True):
            output.append(lowest(constraint.take().mask))
            constraint.advance(output[-1])
    for process in victims:
        kill(process)
    if when == "idle":
        for process in victims:
            wait_for_end(process)
        processes.collect(0.0)
    settle(processes, *followed)
    for constraint, output in zip(followed, outputs, strict=True):
        follow(processes, constraint, output, 3)
        alone = grammars.constraint(Begin(WORDS, "", output))
        assert (constraint.take().mask, constraint.take().forced) == (alone.mask, alone.forced)


def test_a_constraint_whose_processes_are_always_lost_is_refused(
    processes: MaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    fork = processes._fork

    def stillborn() -> Any:
        ours, theirs = Pipe()
        theirs.close()
        made.append(ours)
        return ours

    monkeypatch.setattr(processes, "_fork", stillborn)
    constraint = begun(processes, WORDS, [])
    settle(processes, constraint)
    with pytest.raises(ConstraintFailed, match="too complex") as caught:
        constraint.take()
    assert caught.value.refused and len(made) == MAX_ATTEMPTS and not processes._selector.get_map()
    monkeypatch.setattr(processes, "_fork", fork)
    settle(processes, begun(processes, WORDS, []))


def test_a_process_that_does_not_answer_is_replaced(
    processes: MaskProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint = begun(processes, WORDS, output := [])
    settle(processes, constraint)
    (process,) = followers()
    kill(process, signal.SIGSTOP)
    monkeypatch.setattr(masks, "ANSWER_SECONDS", 0.05)
    output.append(lowest(constraint.take().mask))
    constraint.advance(output[-1])
    monkeypatch.setattr(masks, "ANSWER_SECONDS", 60.0)
    settle(processes, constraint)
    assert constraint.take().mask is not None
    kill(process)


def test_a_grammar_that_fails_is_refused_and_its_process_follows_another(
    processes: MaskProcesses,
) -> None:
    failing = begun(processes, LLMatcher.grammar_from_regex(BOMBS[0]), [])
    settle(processes, failing)
    with pytest.raises(ConstraintFailed, match="too complex"):
        for _ in range(50):
            failing.advance(lowest(failing.take().mask))
            settle(processes, failing)
    unexpected = begun(processes, WORDS, [10**7])  # No token of the vocabulary.
    settle(processes, unexpected)
    with pytest.raises(ConstraintFailed):
        unexpected.take()


def test_an_ended_constraint_leaves_its_process_to_the_next(processes: MaskProcesses) -> None:
    for _ in range(5):
        constraint = begun(processes, WORDS, [])
        settle(processes, constraint)
        constraint.end()
        assert not constraint.is_pending
    assert len(followers()) == 1 and not processes._pending and not processes._selector.get_map()


def test_ending_an_unfinished_computation_ends_its_process(processes: MaskProcesses) -> None:
    """The mask of an ambiguous grammar takes long after many tokens, and is not waited for."""
    constraint = begun(processes, AMBIGUOUS, [])
    settle(processes, constraint)
    (process,) = followers()
    kill(process, signal.SIGSTOP)
    constraint.advance(lowest(constraint.take().mask))
    constraint.end()
    kill(process, signal.SIGCONT)
    wait_for_end(process)


def test_the_processes_yield_to_the_engine_and_end_with_the_one_that_forks(
    processes: MaskProcesses,
) -> None:
    constraint = begun(processes, WORDS, [])
    settle(processes, constraint)
    (process,) = followers()
    assert os.getpriority(os.PRIO_PROCESS, process) == 19 and resource.prlimit(
        process, resource.RLIMIT_CORE
    ) == (0, 0)
    data = int(Path(f"/proc/{process}/statm").read_text().split()[5]) * resource.getpagesize()
    assert resource.prlimit(process, resource.RLIMIT_DATA)[0] - data <= CONSTRAINT_MEMORY
    kill(grammar_process())
    wait_for_end(process)


def test_healed_text_is_followed_until_it_is_there(processes: MaskProcesses) -> None:
    constraint = begun(processes, "", output := [], healed="import")
    settle(processes, constraint)
    while (mask := constraint.take().mask) is not None:
        output.append(lowest(mask))
        constraint.advance(output[-1])
        settle(processes, constraint)
    assert output


def test_an_answer_is_waited_for_only_as_long_as_asked(processes: MaskProcesses) -> None:
    constraint = begun(processes, WORDS, [])
    settle(processes, constraint)
    (process,) = followers()
    kill(process, signal.SIGSTOP)
    constraint.advance(lowest(constraint.take().mask))
    began = time.monotonic()
    processes.collect(0.01)
    assert constraint.is_pending and time.monotonic() - began >= 0.01
    kill(process, signal.SIGCONT)
    processes.collect(10.0)
    assert not constraint.is_pending


def test_a_message_ends_the_wait(processes: MaskProcesses) -> None:
    ours, theirs = Pipe()
    theirs.send_bytes(b"message")
    processes.wait(ours)
    assert ours.recv_bytes() == b"message"


def test_a_grammar_with_an_opening_has_no_process_before_it(
    processes: MaskProcesses, grammars: Grammars
) -> None:
    constraint = begun(processes, WORDS, output := list[int](), opening=Opening([7]))
    for token in (20, 21, 8):
        output.append(token)
        assert not constraint.advance(token) and not constraint.is_pending
    assert not processes._selector.get_map()
    output.append(7)
    assert constraint.advance(7)
    settle(processes, constraint)
    assert constraint.take().mask == first_mask(grammars)
    follow(processes, constraint, output, 3)
    constraint.end()
    # Followed again, as after a preemption or a crash.
    again = begun(processes, WORDS, output, opening=Opening([7]))
    settle(processes, again)
    assert again.take().mask == constraint.take().mask


def test_an_opening_that_is_a_text_is_looked_for_after_each_token_that_may_end_it(
    processes: MaskProcesses, grammars: Grammars
) -> None:
    spelt = grammars.tokenizer.tokenize_str("x(def)")
    opening = Opening([spelt[-1]], "(def)")
    constraint = begun(processes, WORDS, output := [spelt[-1]], opening=opening)
    settle(processes, constraint)
    assert not constraint.take().is_open and constraint.take().mask is None
    constraint.end()  # As the sequence does.
    assert not constraint.advance(spelt[0])
    output += spelt
    assert constraint.advance(output[-1])
    settle(processes, constraint)
    assert constraint.take().is_open and constraint.take().mask == first_mask(grammars)


def first_mask(grammars: Grammars) -> bytes | None:
    constraint = grammars.constraint(Begin(WORDS, "", []))
    return None if constraint is None else constraint.mask
