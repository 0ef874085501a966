"""Program: layers of a decoder as one call of a kernel (native/step.cpp), recorded from modules.

Invariant: memory of a step's activations is shared by layers and used again in the next step. It
knows nothing of requests and pages.

Shape letters: T tokens of the step, K those of them whose logits are wanted, D hidden size, L
layers, P columns of a layer's input.
"""

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from model.batch import Batch
from model.decoder import Decoder, Tail
from model.devices.backend import Plans
from model.devices.cpu.attention import GroupPlan, NativeBackend
from model.devices.cpu.native import integers
from model.devices.cpu.recording import ALIGNMENT, Activation, Buffer, Operation, Recorder
from model.layers import Rotation

KEPT_TOKENS = 64
"""The memory of steps of up to so many tokens is kept for the next one."""


class Pointers(ctypes.Structure):
    """The kernel's struct Rotation: of the step's tokens, or of no token."""

    _fields_ = integers("cosine", "sine", "pairs", "is_interleaved")


class Step(ctypes.Structure):
    """The kernel's struct of the same name."""

    _fields_ = integers(
        "operations",
        "num_operations",
        "num_tokens",
        "memory",
        "tiles",
        "groups",
        "rotations",
    )


class Program:
    """Some recorded layers of one decoder, over one backend's pages."""

    def __init__(self, decoder: Decoder, backend: NativeBackend, layers: range) -> None:
        self._library = backend.library
        spec, recorder = decoder.spec, Recorder(backend.struct)
        hidden, size = spec.hidden_size, spec.layer_input_size
        given = [Buffer(hidden), Buffer(len(layers) * size)]
        x: Any = Activation(recorder, given[0], 0, hidden)
        inputs: Any = Activation(recorder, given[1], 0, size, len(layers)) if size else None
        tables: Any = (None, None) if spec.rotary is None else (0, 1)
        attend: Any = recorder.attend
        output: Any = decoder.run_layers(x, inputs, tables, attend, layers)
        self._columns = recorder.place(given, output.buffer)
        self._given, self._output = given, output.buffer.base
        self._tile_bytes, self._kept = recorder.tile_bytes, recorder.kept
        self._operations = (Operation * len(recorder.operations))(
            *(operation for operation, _ in recorder.operations)
        )
        recorder.operations.clear()  # Activations refer to the recorder, and so to the backend.
        self._memory: Tensor | None = None

    def __call__(
        self,
        x_TD: Tensor,
        inputs_TLP: Tensor | None,
        rotations: Sequence[Rotation | None],
        plan: tuple[GroupPlan, ...],
    ) -> Tensor:
        """The input of the first of these layers -> the residual stream after them, or the final
        norm of it, valid until the next call. `inputs_TLP`: the columns that each of the layers is
        given, if they are given any; `plan`: the backend's.
        """
        num_tokens, size = x_TD.shape
        memory = self._room(num_tokens)
        memory[: num_tokens * size].view(num_tokens, size).copy_(x_TD)
        if inputs_TLP is not None:
            first = self._given[1].base * num_tokens
            memory[first : first + inputs_TLP.numel()].view(inputs_TLP.shape).copy_(inputs_TLP)
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


class RecordedForward:
    """A Forward: all layers in one call, of the program `whole`, or in two where only some tokens
    pass the last ones.
    """

    def __init__(self, decoder: Decoder, backend: NativeBackend) -> None:
        self._decoder = decoder
        num_layers, num_storing = decoder.spec.num_layers, decoder.spec.num_storing_layers
        self.whole = Program(decoder, backend, range(num_layers))
        self._programs = {range(num_layers): self.whole}
        if num_storing < num_layers:
            for layers in (range(num_storing), range(num_storing, num_layers)):
                self._programs[layers] = Program(decoder, backend, layers)

    def __call__(self, batch: Batch, plans: Plans) -> Tensor:
        tail = batch.tail and Tail(batch.tail.rows_K, plans.tail)
        x_TD: Tensor = self._decoder(
            batch.token_ids_T, batch.position_ids_T, plans.all_tokens, tail, self._run
        )
        return x_TD

    def _run(
        self,
        x_TD: Tensor,
        inputs_TLP: Tensor | None,
        rotations: Sequence[Rotation | None],
        plan: Any,
        layers: range,
    ) -> Tensor:
        """What `Decoder.run_layers` computes, by a plan in place of an Attend."""
        return self._programs[layers](x_TD, inputs_TLP, rotations, plan)
