"""Stream: what a device is told to do, in order, while we go on; and steps that it repeats without being told them one by one.

Invariant: what is enqueued is done after all that was enqueued before, and not when `enqueue` returns. It knows nothing of steps.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from model.runner.pending_step import Event


class Stream(Protocol):
    """One device's queue."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Has `work` done, which touches the device and nothing else. Raises what telling a device can raise, MemoryError excepted."""

    def mark(self) -> Event:
        """The place behind everything that has been enqueued."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does the same as `work` again, on the same tensors, in one go. The numbers that `work` takes from the host stay as they are
        now; it must not wait for the device.
        """


class CudaEvent:
    """An Event of torch's."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """torch's current stream, whose calls return before their work is done, and CUDA's graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: libraries take a workspace for each stream, and keep it.
        self._aside = torch.cuda.Stream()

    def enqueue(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> Event:
        return CudaEvent()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._aside.wait_stream(current)
        try:
            with torch.cuda.stream(self._aside):
                work()  # Kernels are compiled and libraries take their workspaces, which a capture has no place for.
            current.wait_stream(self._aside)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._aside):
                work()
        finally:
            # A capture that fails may leave us on its stream.
            torch.cuda.set_stream(current)
            current.wait_stream(self._aside)
        return graph.replay
