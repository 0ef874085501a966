"""Program: a decoder's layers as one call of a kernel (native/step.cpp), recorded from its modules.

Invariant: memory of a step's activations is shared by layers and used again in the next step. It
knows nothing of requests and pages.

Shape letters: T tokens of the step, D hidden size.
"""

import ctypes
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from model.batch import Batch
from model.decoder import Decoder
from model.devices.cpu.attention import GroupPlan, NativeBackend
from model.devices.cpu.recording import ALIGNMENT, Activation, Buffer, Operation, Recorder
from model.layers import Rotation

KEPT_TOKENS = 64
"""The memory of steps of up to so many tokens is kept for the next one."""


class Pointers(ctypes.Structure):
    """The kernel's struct Rotation: of the step's tokens, or of no token."""

    _fields_ = (
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("pairs", ctypes.c_int64),
        ("is_interleaved", ctypes.c_int64),
    )


class Step(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = (
        ("operations", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_operations", "num_tokens")),
        *((name, ctypes.c_void_p) for name in ("memory", "tiles", "groups", "rotations")),
    )


class Program:
    """The recorded layers of one decoder, over one backend's pages."""

    def __init__(self, decoder: Decoder, backend: NativeBackend) -> None:
        self._decoder, self._library = decoder, backend.library
        recorder = Recorder(backend.struct)
        x: Any = Activation(recorder, Buffer(decoder.spec.hidden_size), 0, decoder.spec.hidden_size)
        tables: Any = (None, None) if decoder.spec.rotary is None else (0, 1)
        attend: Any = recorder.attend
        y: Any = decoder.run_blocks(x, tables, attend)
        self._columns, self._output = recorder.place(x.buffer, y.buffer), y.buffer.base
        self._tile_bytes, self._kept = recorder.tile_bytes, recorder.kept
        self._operations = (Operation * len(recorder.operations))(
            *(operation for operation, _ in recorder.operations)
        )
        recorder.operations.clear()  # Activations refer to the recorder, and so to the backend.
        self._memory: Tensor | None = None

    def __call__(self, batch: Batch, plan: tuple[GroupPlan, ...]) -> Tensor:
        """The step's tokens -> their last hidden states x_TD, valid until the next call. `plan` is
        the backend's.
        """
        num_tokens, size = len(batch.token_ids_T), self._decoder.spec.hidden_size
        memory = self._room(num_tokens)
        memory[: num_tokens * size].view(num_tokens, size).copy_(
            self._decoder.embed(batch.token_ids_T, batch.position_ids_T)
        )
        rotations = self._decoder.rotations(batch.position_ids_T, torch.float32)
        pointers = (Pointers * 2)(*map(_pointers, rotations))
        groups = (ctypes.c_int64 * (2 * len(plan)))(
            *chain.from_iterable((group.address, len(group.pages)) for group in plan)
        )
        address = memory.data_ptr()
        step = Step(
            ctypes.addressof(self._operations),
            len(self._operations),
            num_tokens,
            address,
            address + 4 * self._columns * num_tokens,
        )
        step.groups, step.rotations = ctypes.addressof(groups), ctypes.addressof(pointers)
        self._library.compute_step(ctypes.addressof(step), torch.get_num_threads())
        first = self._output * num_tokens
        return memory[first : first + num_tokens * size].view(num_tokens, size)

    def _room(self, num_tokens: int) -> Tensor:
        """Memory for the activations and tiles of so many tokens."""
        needed = num_tokens * (self._columns + -(-self._tile_bytes // 4)) + ALIGNMENT
        if self._memory is not None and len(self._memory) >= needed:
            return self._memory
        memory = torch.empty(needed)
        if num_tokens <= KEPT_TOKENS:
            self._memory = memory
        return memory


def _pointers(rotation: Rotation | None) -> Pointers:
    if rotation is None:
        return Pointers()
    cosine_Tr, sine_Tr = rotation.cosine_Tr, rotation.sine_Tr
    return Pointers(
        cosine_Tr.data_ptr(), sine_Tr.data_ptr(), cosine_Tr.shape[1], rotation.interleaved
    )
