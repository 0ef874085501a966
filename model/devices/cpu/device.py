"""The CPU as a Device: our native kernels, and torch's operations for pages that they do not take.

Shape letters: S rows of logits, V vocabulary, F rows whose largest logits are wanted.
"""

import torch
from torch import Tensor

from cache.pool import KVPool
from model.decoder import Decoder
from model.devices.backend import Backend
from model.devices.cpu.attention import NativeBackend, supports
from model.devices.cpu.memory import free_and_total_bytes
from model.devices.cpu.native import library
from model.devices.cpu.products import NativeProducts
from model.devices.cpu.program import RecordedForward
from model.devices.device import Device, Dtypes, Forward
from model.devices.products import Products


class CpuDevice(Device):
    """This machine's processor. Every step is done when it has been launched."""

    name = "cpu"
    torch_device = torch.device("cpu")
    default_dtype = torch.float32
    default_cache_share = 0.4
    """Less than a GPU's: other processes need the machine's memory too."""
    overcommits = True
    invariant_backend = "native"
    invariant_backend_needs = (
        "cache.dtype auto, and cache.page_size and the columns of keys and values multiples of 16"
    )

    def use_threads(self, count: int) -> None:
        if count:
            torch.set_num_threads(count)

    def backend_for(self, pool: KVPool, num_heads: int, deterministic: bool = False) -> str:
        return "native" if supports(pool) else "reference"

    def dtypes(self, option: str) -> Dtypes:
        """Arithmetic is in float32, whatever numbers are held in: narrower ones are widened in
        registers.
        """
        _, held, cache = super().dtypes(option)
        return Dtypes(torch.float32, None if option == "auto" else held, cache)

    def products(self, dtypes: Dtypes, quantization: str, deterministic: bool) -> Products:
        return NativeProducts(quantization, dtypes.matrices)

    def forward(self, decoder: Decoder, backend: Backend) -> Forward:
        """One call for all layers where they consist of operations that it knows: latent attention
        and experts do not.
        """
        recordable = decoder.spec.latent is None and decoder.spec.experts is None
        if recordable and isinstance(backend, NativeBackend) and decoder.products == backend.name:
            return RecordedForward(decoder, backend)
        return super().forward(decoder, backend)

    def num_parts_run(self) -> int:
        return int(library().num_phases_computed())

    def description(self) -> str:
        return f"cpu ({library().isa().decode()})"

    def memory(self) -> tuple[int, int]:
        return free_and_total_bytes()

    def summary(self, logits_SV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_SV = logits_SV.contiguous()
        normaliser_S, largest_S = logits_SV.new_empty(2, len(logits_SV))
        tokens_S = torch.empty(len(logits_SV), dtype=torch.long)
        addresses = (x.data_ptr() for x in (logits_SV, normaliser_S, largest_S, tokens_S))
        library().summarise_logits(*addresses, *logits_SV.shape, torch.get_num_threads())
        return normaliser_S, largest_S, tokens_S
