"""The GPU as a Device: CUDA's streams, events, graphs and memory, and our Triton kernels where
Triton is installed.

Shape letters: S rows of logits, V vocabulary, F rows whose largest logits are wanted, K how many of
them.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cache.pool import KVPool
from model.batch import Numbers
from model.devices.blocks import FORMATS
from model.devices.device import Device, Dtypes, Event, RowDraws, Stream
from model.devices.gpu import attention, card, upload
from model.devices.products import Products
from model.spec import OptionError
from model.step import StepPlan

if TYPE_CHECKING:
    from model.devices.gpu.drawing import KernelDraws

FLOAT8_CAPABILITY = 8, 9
"""Compute capability of the first GPUs that convert float8."""


class CudaStream:
    """torch's current CUDA stream, whose calls return before their work is done, and CUDA
    graphs.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: libraries take a workspace for each stream and keep it.
        self._aside = torch.cuda.Stream()

    def enqueue(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> Event:
        event: Event = torch.cuda.current_stream().record_event()
        return event

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._aside.wait_stream(current)
        try:
            with torch.cuda.stream(self._aside):
                # Compiles kernels and lets libraries take their workspaces, which is not possible
                # within a capture.
                work()
            current.wait_stream(self._aside)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._aside):
                work()
        finally:
            # A capture that fails may leave its own stream the current one.
            torch.cuda.set_stream(current)
            current.wait_stream(self._aside)
        return graph.replay


class GpuDevice(Device):
    """The current GPU. Over torch's CPU it computes with the same kernels under Triton's
    interpreter, and has no streams and graphs.
    """

    name = "cuda"
    default_dtype = torch.bfloat16
    default_cache_share = 0.9
    warms_up = True
    invariant_backend = "triton"
    invariant_backend_needs = (
        "triton (`.venv/bin/pip install -c constraints.txt -e '.[gpu]'` in onehead's checkout), "
        "cache.page_size a power of two from 16, and keys of at most 576 columns"
    )

    def __init__(self, place: str = "cuda") -> None:
        self.torch_device = torch.device(place)
        self._is_real = place == "cuda"
        # torch for CUDA brings Triton along on Linux; elsewhere it is missing.
        self._has_kernels = find_spec("triton") is not None
        self._draws: KernelDraws | None = None

    def backend_for(self, pool: KVPool, num_heads: int, deterministic: bool = False) -> str:
        if not self._has_kernels or not attention.supports(pool, num_heads):
            return "reference"
        return self.invariant_backend if deterministic else "triton-fast"

    def products(self, dtypes: Dtypes, quantization: str, deterministic: bool) -> Products:
        in_blocks = quantization in FORMATS
        if not self._has_kernels:
            if in_blocks:
                raise OptionError(
                    f"engine.quantization {quantization} on {self.name} needs triton; expected "
                    "none without it"
                )
            return Products(quantization, "cublas")
        from model.devices.gpu.block_modules import BlockProducts, InvariantBlockProducts
        from model.devices.gpu.modules import CublasProducts, SlabProducts

        if deterministic and in_blocks:
            return InvariantBlockProducts(quantization, "triton")
        found = SlabProducts if deterministic else BlockProducts if in_blocks else CublasProducts
        return found(quantization, "cublas")

    def refusal(self) -> str:
        return card.shortcoming(self.torch_device) if self._has_kernels else ""

    def check_float8(self) -> None:
        found = torch.cuda.get_device_capability(self.torch_device)
        if found < FLOAT8_CAPABILITY:
            has, needed = (f"{major}.{minor}" for major, minor in (found, FLOAT8_CAPABILITY))
            raise OptionError(
                f"cache.dtype fp8: this GPU has compute capability {has}, expected {needed} or "
                "more; leave it out"
            )

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch_device)

    own_memory = memory

    def memory_in_words(self) -> str:
        return card.memory_in_words(self.torch_device)

    def description(self) -> str:
        return card.description(self.torch_device)

    def failure(self, error: Exception) -> str:
        try:
            self.raise_if_broken()  # Libraries report a broken device by errors of their own.
        except torch.AcceleratorError as own:
            error = own
        return card.failure(error) if isinstance(error, torch.AcceleratorError) else ""

    def step_bytes(
        self, prepare: Callable[[], Callable[[StepPlan], object]], plans: Sequence[StepPlan]
    ) -> int:
        """The sum of what the plans take at their peaks: captured steps have memory of their
        own.
        """
        held = torch.cuda.memory_allocated(self.torch_device)
        run = prepare()
        total = torch.cuda.memory_allocated(self.torch_device) - held
        for plan in plans:
            before = torch.cuda.memory_allocated(self.torch_device)
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            run(plan)
            total += torch.cuda.max_memory_allocated(self.torch_device) - before
        del run
        self.release_cached_memory()
        return total

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self._is_real:
            torch.cuda.synchronize(self.torch_device)

    def stream(self) -> Stream | None:
        return CudaStream() if self._is_real else None

    def upload(self, values: Numbers, dtype: torch.dtype | None = None) -> Tensor:
        return upload(super().upload(values, dtype), self.torch_device)

    def for_upload(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self._is_real else values

    def download(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=self._is_real).copy_(
            x, non_blocking=True
        )

    def summary(self, logits_SV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self._has_kernels:
            return super().summary(logits_SV)
        from model.devices.gpu.launches import summary

        return summary(logits_SV)

    def row_draws(self, num_rows: int, num_tokens: int) -> RowDraws | None:
        """Seeds draw other tokens than on a CPU: to generate the CPU's noise on the host would take
        longer than a step of the GPU.
        """
        if not self._has_kernels:
            return None
        from model.devices.gpu.drawing import KernelDraws

        # Kept: steps launched kernel by kernel would allocate and clear them each time. The next
        # draw is after this one's results.
        if self._draws is None or not self._draws.holds(num_rows, num_tokens):
            self._draws = KernelDraws(num_rows, num_tokens, self.torch_device)
        return self._draws

    def largest(self, logits_FV: Tensor, count: int) -> Tensor:
        """torch's topk chooses among equal logits differently for large batches, so `order` makes
        them unequal first.
        """
        return order(logits_FV).topk(count, dim=-1).indices

    def raise_if_broken(self) -> None:
        if self._is_real:
            torch.cuda.current_stream(self.torch_device).query()


def order(logits_FV: Tensor) -> Tensor:
    """Integers, no two of a row alike, that are ordered as the logits are; of equal logits the
    first id comes first.
    """
    bits_FV = logits_FV.contiguous().view(torch.int32)
    # A float's bits increase with it from 0 on, and decrease below.
    ordered_FV = torch.where(bits_FV < 0, bits_FV ^ 0x7FFFFFFF, bits_FV).long()
    return (ordered_FV << 32) - torch.arange(logits_FV.shape[-1], device=logits_FV.device)
