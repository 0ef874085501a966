"""The GPU as a Device: CUDA's streams, events, graphs and memory, and our Triton kernels where Triton is installed.

Shape letters: S rows of logits, V vocabulary, F rows whose largest logits are wanted, K how many of them, T tokens, I input and O output
columns.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from cache.pool import KVPool
from model.batch import Numbers
from model.devices.device import Device, Dtypes, Event, GumbelMax, Key, Stream
from model.devices.gpu import attention, upload
from model.devices.products import Products
from model.devices.quantization import Arithmetic, column_product, float8_product
from model.spec import OptionError
from model.step import StepPlan

FLOAT8_CAPABILITY = 8, 9
"""Compute capability of the first GPUs that convert float8."""
INT8_MIN_ROWS, INT8_MULTIPLE = 17, 8
"""torch's integer product on a GPU needs at least so many rows, and sizes that are multiples of 8."""


class CudaEvent:
    """torch's CUDA event as an Event."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream:
    """torch's current CUDA stream, whose calls return before their work is done, and CUDA graphs."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: libraries take a workspace for each stream and keep it.
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
                work()  # Compiles kernels and lets libraries take their workspaces, which is not possible within a capture.
            current.wait_stream(self._aside)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._aside):
                work()
        finally:
            # A capture that fails may leave its own stream the current one.
            torch.cuda.set_stream(current)
            current.wait_stream(self._aside)
        return graph.replay


class GpuDevice(Device):
    """The current GPU. Over torch's CPU it computes with the same kernels under Triton's interpreter, and has no streams and graphs."""

    name = "cuda"
    default_dtype = torch.bfloat16
    default_cache_share = 0.9
    warms_up = True
    invariant_backend = "triton"
    invariant_backend_needs = (
        "triton (`.venv/bin/pip install -c constraints.txt -e '.[gpu]'` in onehead's checkout), cache.page_size a power of two "
        "from 16, and keys of at most 576 columns"
    )

    def __init__(self, place: str = "cuda") -> None:
        self.torch_device = torch.device(place)
        self._is_real = place == "cuda"
        # torch for CUDA brings Triton along on Linux; elsewhere it is missing.
        self._has_kernels = find_spec("triton") is not None

    def backend_for(self, pool: KVPool, num_heads: int) -> str:
        return "triton" if self._has_kernels and attention.supports(pool, num_heads) else "reference"

    def products(self, dtypes: Dtypes, quantization: str, deterministic: bool) -> Products:
        arithmetic = Arithmetic(integer_product, float8_product)
        if self._has_kernels:
            from model.devices.gpu.launches import multiply_float8

            arithmetic = Arithmetic(integer_product, multiply_float8)
        if not deterministic:
            return Products(quantization, "cublas", arithmetic)
        from model.devices.gpu.modules import TritonProducts

        return TritonProducts(quantization, "triton", arithmetic)

    def check_float8(self, options: str) -> None:
        found = torch.cuda.get_device_capability(self.torch_device)
        if found < FLOAT8_CAPABILITY:
            has, needed = (f"{major}.{minor}" for major, minor in (found, FLOAT8_CAPABILITY))
            raise OptionError(
                f"{options} fp8: this GPU has compute capability {has}, expected {needed} or more; leave it out, or take int8 for weights"
            )

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch_device)

    def step_bytes(self, prepare: Callable[[], Callable[[StepPlan], object]], plans: Sequence[StepPlan]) -> int:
        """The sum of what the plans take at their peaks: captured steps have memory of their own."""
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
        return upload(values, self.torch_device, dtype)

    def download(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=self._is_real).copy_(x, non_blocking=True)

    def summary(self, logits_SV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self._has_kernels:
            return super().summary(logits_SV)
        from model.devices.gpu.launches import summary

        return summary(logits_SV)

    def exponential_noise(self, keys: Sequence[Key], count: int) -> Tensor:
        """Other numbers than on a CPU: to generate the CPU's on the host would take longer than a step of the GPU."""
        if not self._has_kernels:
            return super().exponential_noise(keys, count)
        from model.devices.gpu.draw import exponential_noise_SV

        return exponential_noise_SV(keys, count, self.torch_device)

    @property
    def gumbel_max(self) -> GumbelMax | None:
        if not self._has_kernels:
            return None
        from model.devices.gpu.draw import gumbel_max_S

        return gumbel_max_S

    def largest(self, logits_FV: Tensor, count: int) -> Tensor:
        """torch's topk chooses among equal logits differently for large batches, so `order` makes them unequal first."""
        return order(logits_FV).topk(count, dim=-1).indices

    def raise_if_broken(self) -> None:
        if self._is_real:
            torch.cuda.current_stream(self.torch_device).query()


def order(logits_FV: Tensor) -> Tensor:
    """Integers, no two of a row alike, that are ordered as the logits are; of equal logits the first id comes first."""
    bits_FV = logits_FV.contiguous().view(torch.int32)
    # A float's bits increase with it from 0 on, and decrease below.
    ordered_FV = torch.where(bits_FV < 0, bits_FV ^ 0x7FFFFFFF, bits_FV).long()
    return (ordered_FV << 32) - torch.arange(logits_FV.shape[-1], device=logits_FV.device)


def integer_product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T of int8 matrices, exactly, as int32."""
    num_rows, num_columns = x_TI.shape
    if num_columns == 1:
        return column_product(x_TI, weight_OI)
    padded_TI = _padded(x_TI, max(INT8_MIN_ROWS, num_rows), -(-num_columns // INT8_MULTIPLE) * INT8_MULTIPLE)
    padded_OI = _padded(weight_OI, -(-len(weight_OI) // INT8_MULTIPLE) * INT8_MULTIPLE, padded_TI.shape[1])
    return torch._int_mm(padded_TI, padded_OI.T)[:num_rows, : len(weight_OI)]


def _padded(x: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """x with zeros up to that size; x itself where it has it."""
    missing = num_columns - x.shape[1], num_rows - x.shape[0]
    return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x
