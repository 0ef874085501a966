"""The CPU as a Device: our native kernels where they were compiled, torch's operations elsewhere.

Shape letters: S rows of logits, V vocabulary, F rows whose largest logits are wanted.
"""

import ctypes

import torch
from torch import Tensor

from cache.pool import KVPool
from model.devices.cpu.attention import supports
from model.devices.cpu.memory import free_and_total_bytes
from model.devices.cpu.native import library
from model.devices.cpu.products import NativeProducts
from model.devices.device import Device
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
        "engine.dtype float32, cache.dtype auto, cache.page_size and the columns of keys and values multiples of 16, and "
        "kernels that were compiled when onehead was installed"
    )

    def use_threads(self, count: int) -> None:
        if count:
            torch.set_num_threads(count)

    def backend_for(self, pool: KVPool, num_heads: int) -> str:
        return "native" if supports(pool) else "torch"

    def products(self, dtype: torch.dtype, quantization: str, deterministic: bool) -> Products:
        packs = dtype is torch.float32 and quantization != "fp8" and library() is not None
        return NativeProducts(quantization) if packs else Products(quantization)

    def memory(self) -> tuple[int, int]:
        return free_and_total_bytes()

    def summary(self, logits_SV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kernels = library()
        if kernels is None:
            return super().summary(logits_SV)
        logits_SV = logits_SV.contiguous()
        normaliser_S, largest_S = logits_SV.new_empty(2, len(logits_SV))
        tokens_S = torch.empty(len(logits_SV), dtype=torch.long)
        addresses = (ctypes.c_void_p(x.data_ptr()) for x in (logits_SV, normaliser_S, largest_S, tokens_S))
        kernels.summarise_logits(*addresses, *map(ctypes.c_int64, (*logits_SV.shape, torch.get_num_threads())))
        return normaliser_S, largest_S, tokens_S
