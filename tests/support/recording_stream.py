"""A simulated device stream: operations are executed late, and a captured CUDA graph is a recording
of torch operations and of Triton kernels under the interpreter.

A replay executes the recorded operations again on the recorded tensors, as a CUDA graph does.
Python code that ran during the capture does not run again, so values that a step took from the host
then are still used.
"""

import sys
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.kernel_launches import watched


class Recording(TorchDispatchMode):
    """Records the torch operations executed while it is active, and the Triton kernels that the
    interpreter runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self.kernels: AbstractContextManager[None] = nullcontext()
        if "triton.runtime.interpreter" in sys.modules:
            self.kernels = watched(lambda _, repeat: self.operations.append(repeat))

    def __enter__(self) -> Self:
        self.kernels.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.kernels.__exit__(*error)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        self.operations.append(partial(self._repeat, function, args, kwargs or {}, found))
        return found

    def _repeat(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: Any
    ) -> None:
        found = function(*args, **kwargs)
        for old, new in zip(tree_leaves(recorded), tree_leaves(found), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    def replay(self) -> None:
        with torch.inference_mode():
            for operation in self.operations:
                operation()


class RecordedEvent:
    """An event in the stream."""

    def __init__(self, stream: "RecordingStream", number: int) -> None:
        self.stream, self.number = stream, number

    def synchronize(self) -> None:
        while self.stream.num_done < self.number:
            self.stream.do_one()


class RecordingStream:
    """A simulated model.devices.device.Stream. `random` decides when the device is quick."""

    def __init__(self, random: Callable[[], float] = lambda: 1.0) -> None:
        self.random = random
        self.queue: deque[Callable[[], None]] = deque()
        self.num_enqueued = self.num_done = self.num_replays = self.most_queued = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.num_enqueued += 1
        self.most_queued = max(self.most_queued, len(self.queue))
        while self.queue and self.random() < 0.2:
            self.do_one()

    def do_one(self) -> None:
        with torch.inference_mode():
            self.queue.popleft()()
        self.num_done += 1

    def mark(self) -> RecordedEvent:
        return RecordedEvent(self, self.num_enqueued)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        assert not self.queue, "captured while work is queued"
        work()
        with Recording() as recording:
            work()

        def replay() -> None:
            self.num_replays += 1
            recording.replay()

        return replay
