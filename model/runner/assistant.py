"""Assistant: a model that drafts tokens for another one, whose pages it reads (Gemma 4's assistant,
gemma4_assistant).

It has no cache and computes no prompt. A token is drawn from the model's embedding of the last
token and the state that this one was drawn from, by layers that attend to the keys and values which
the model has stored. From its own draws it goes on with its own states, at the same position. It
does not know which drafts come true.

Shape letters: T rows, one token each, D the model's hidden size, d the drafter's.
"""

from dataclasses import replace
from typing import Any

import torch
from msgspec.structs import replace as changed
from torch import Tensor

from model.batch import build_batch
from model.decoder import Decoder
from model.devices.device import lack_of_memory
from model.runner.runner import ModelRunner
from model.sampling import begin_draw
from model.spec import ModelSpec, OptionError
from model.step import StepPlan, StepResult


class Assistant:
    """Computes plans of rows that have one token each and draw the next one. `decoder`: one that
    `check` allows for the runner's model.
    """

    def __init__(self, decoder: Decoder, runner: ModelRunner) -> None:
        self._decoder, self._runner = decoder, runner
        self._sources = check(decoder.spec, runner.decoder.spec)
        layout = runner.pool.layout
        # A key less: the page of the oldest one may have been given back already.
        narrowed = (
            replace(group, window=group.window and max(1, group.window - 1))
            for group in layout.groups
        )
        self._layout = replace(layout, groups=tuple(narrowed))
        self.states: dict[int, Tensor] = {}
        runner.states = self.states

    def run(self, plan: StepPlan) -> StepResult:
        """Draws a token for each row, of whose sequence `states` has a state, and replaces that.
        Raises MemoryError.
        """
        try:
            return self._compute(plan)
        except RuntimeError as error:
            raise MemoryError(lack_of_memory(error)) from None

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> StepResult:
        decoder, device, model = self._decoder, self._runner.device, self._runner.decoder
        assert decoder.input_projection is not None and decoder.output_projection is not None
        # The row's own token has no key yet: it attends as the one before it does.
        rows = tuple(changed(row, start=row.start - 1) for row in plan.listed)
        batch = build_batch(StepPlan(rows), self._layout, device.upload)
        positions_T = batch.position_ids_T + 1
        state_TD = torch.stack([self.states[row.sequence] for row in rows])
        embedding_TD = model.embed(batch.token_ids_T, positions_T)
        x_Td = decoder.input_projection(torch.cat([embedding_TD, state_TD], dim=-1))
        backend = self._runner.backend
        attended = backend.plan(batch)

        def attend(layer: int, *rest: Any) -> Tensor:
            return backend.run(attended, self._sources[layer], *rest)

        rotations = decoder.rotations(positions_T, x_Td.dtype)
        layers = range(decoder.spec.num_layers)
        normed_Td = decoder.run_layers(x_Td, None, rotations, attend, layers)
        samples = [row.sample for row in rows if row.sample is not None]
        draws = begin_draw(device, decoder.logits(normed_Td), samples, None, None)
        for row, state_D in zip(rows, decoder.output_projection(normed_Td), strict=True):
            self.states[row.sequence] = state_D
        return StepResult(tuple(draws.read()))


def check(drafter: ModelSpec, model: ModelSpec) -> list[int]:
    """For each layer of an assistant the one of the model whose keys and values it reads: the last
    one of its kind that stores any. Raises OptionError for a model that it was not made for.
    """
    if drafter.backbone_size != model.hidden_size:
        raise OptionError(
            f"engine.draft was made for a model with states of {drafter.backbone_size} columns, "
            f"this one has {model.hidden_size}"
        )
    last = {_kind(model, layer): layer for layer in range(model.num_storing_layers)}
    kinds = [_kind(drafter, layer) for layer in range(drafter.num_layers)]
    if drafter.attention_scale != model.attention_scale or not last.keys() >= set(kinds):
        raise OptionError("engine.draft was made for a model with other layers than this one has")
    return [last[kind] for kind in kinds]


def _kind(spec: ModelSpec, layer: int) -> tuple[bool, int]:
    return spec.window(layer) is not None, spec.head_dim_of(layer)
