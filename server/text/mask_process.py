"""The life of a process that follows constraints, for one sequence of the engine at a time, and
computes their masks.

server.text.worker_process forks it. Invariant: a mask that takes more than MASK_SECONDS of
processor time ends its own process alone, and the process ends when its pipe is closed, also amid a
computation. It knows nothing of sequences.
"""

import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from server.child_process import ended_by_close
from server.errors import ConstraintFailed
from server.protocol import (
    SLOW_MASK_SECONDS,
    Advance,
    Answer,
    Begin,
    Guidance,
    decode_mask_request,
    encode,
)
from server.text.constraints import Grammars

MASK_SECONDS = 4.0


def limit_mask() -> None:
    """Ends this process if the next mask takes more than MASK_SECONDS of processor time, by the
    default action of SIGPROF.
    """
    signal.setitimer(signal.ITIMER_PROF, MASK_SECONDS)


def follow(pipe: Connection, grammars: Grammars | None) -> None:
    """Answers requests, with refusals where there are no grammars. Raises EOFError or OSError when
    the pipe is closed: the engine has no more use for this process.
    """
    constraint: Any = None
    while True:
        request = decode_mask_request(pipe.recv_bytes())
        # The engine sends nothing while it waits for an answer.
        with ended_by_close(pipe.fileno()):
            began = time.process_time()
            try:
                if isinstance(request, Advance):
                    constraint.advance(request.token)
                elif grammars is None:
                    raise ConstraintFailed(
                        "this model's tokenizer cannot be used for structured output"
                    )
                else:
                    constraint = grammars.constraint(request)
                guidance = (
                    Guidance(None, is_open=False)
                    if constraint is None
                    else Guidance(constraint.mask, constraint.forced)
                )
                answer = Answer(guidance, time.process_time() - began)
            except ConstraintFailed as error:
                answer = Answer(None, failure=str(error), refused=True)
            except BaseException:  # A panic of a Rust library is not an Exception.
                answer = Answer(None, failure=traceback.format_exc())
        pipe.send_bytes(encode(answer))
        if (
            answer.seconds > SLOW_MASK_SECONDS
            and not isinstance(request, Begin)
            and sys.platform == "linux"
        ):
            # Runs from now on only where a processor is idle, so that any number of slow
            # constraints takes nothing from the others.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
