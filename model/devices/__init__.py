"""Where a model runs: one folder for each device, all with the interface of device.py, and the
attention backends by name.

Devices never import each other; only the one that is chosen is imported. Each backend is tested
against `reference` on ragged batches.
"""

from pkgutil import resolve_name
from typing import cast

import torch

from cache.pool import KVPool
from model.devices.backend import Backend
from model.devices.device import Device
from model.spec import OptionError

BACKENDS = {
    "reference": "model.devices.reference:create",
    "native": "model.devices.cpu.attention:create",
    "triton": "model.devices.gpu.attention:create_invariant",
    "triton-fast": "model.devices.gpu.attention:create",
}
"""What creates each attention backend."""


def device_class(name: str) -> type[Device]:
    """The class of the device `cpu` or `cuda`; `auto` is cuda."""
    if name == "cpu":
        from model.devices.cpu.device import CpuDevice

        return CpuDevice
    from model.devices.gpu.device import GpuDevice

    return GpuDevice


def find_device(name: str) -> Device:
    """The device `cpu` or `cuda`; `auto` is cuda where there is one. Raises OptionError for a
    device that this machine lacks, also where CUDA_VISIBLE_DEVICES names one that is not there.
    """
    if name != "cpu" and not torch.cuda.is_available():
        from model.devices.gpu import card

        if name == "cuda" or card.is_missed():
            raise OptionError(
                f"engine.device is {name}, and no GPU can be used: {card.absence()}; for the CPU, "
                "--engine.device cpu"
            )
        name = "cpu"
    found = device_class(name)()
    if refused := found.refusal():
        raise OptionError(f"engine.device is {name}: {refused}; for the CPU, --engine.device cpu")
    return found


def create_backend(name: str, pool: KVPool, scale: float, num_heads: int) -> Backend:
    """The attention backend `name` over `pool`; logits are multiplied by `scale`. Raises KeyError
    for an unknown name.
    """
    return cast(Backend, resolve_name(BACKENDS[name])(pool, scale, num_heads))
