"""Makes what drafts tokens, as the options ask: loads a smaller model, if one is asked for. Which
tokens are drafted, and when, is not decided here.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from model.checkpoint.families import read_spec
from model.options import EngineOptions
from model.spec import ModelSpec, OptionError
from server.engine.draft_model import AssistantModel, SeparateModel
from server.engine.drafts import MAX_SPECULATIVE_STEP, Drafts
from server.engine.ngrams import NGrams

if TYPE_CHECKING:
    from model.checkpoint.weights import Report
    from model.decoder import Decoder
    from model.devices.device import Device
    from model.runner.runner import ModelRunner

CACHE_SHARE = 1 / 8
"""Part of the memory for caches that a draft model gets for keys and values of its own."""
Make = Callable[["ModelRunner"], Drafts | None]
log = logging.getLogger("onehead.engine")


def load_drafts(
    options: EngineOptions, spec: ModelSpec, report: "Report"
) -> tuple[Make, EngineOptions]:
    """Loads the weights of what drafts tokens for a model with this spec -> a function that makes
    it for the model's runner and raises MemoryError, and the options for the model. Raises
    CheckpointError, OptionError or MemoryError.
    """
    if options.speculation == "none":
        return lambda _: None, options
    if options.speculation == "ngram":
        return lambda _: NGrams(), options
    drafter = read_spec(Path(options.draft), drafts=True)
    if drafter.vocab_size != spec.vocab_size:
        raise OptionError(
            f"engine.draft has a vocabulary of {drafter.vocab_size} tokens, the model one of "
            f"{spec.vocab_size}; expected a model with the same tokenizer"
        )
    longest = min(options.max_context, drafter.max_positions)
    if drafter.backbone_size:
        return _assistant(drafter, spec, options, longest, report), options
    return _separate(drafter, options, longest, report)


def _load(spec: ModelSpec, options: EngineOptions, report: "Report") -> "tuple[Decoder, Device]":
    from model.devices import find_device
    from model.runner.runner import load_weights

    if find_device(options.device).warms_up:
        raise OptionError("engine.speculation draft needs a CPU; on a GPU there is ngram")
    folder = Path(options.draft)
    decoder, device = load_weights(folder, spec, options, report)
    log.info("%s drafts tokens, %d parameters", folder.name, decoder.num_parameters)
    return decoder, device


def _assistant(
    spec: ModelSpec, model: ModelSpec, options: EngineOptions, longest: int, report: "Report"
) -> Make:
    from model.runner.assistant import Assistant, check

    check(spec, model)
    decoder, _ = _load(spec, options, report)

    def make(runner: "ModelRunner") -> Drafts:
        assistant = Assistant(decoder, runner)
        return AssistantModel(assistant, assistant.states, longest)

    return make


def _separate(
    spec: ModelSpec, options: EngineOptions, longest: int, report: "Report"
) -> tuple[Make, EngineOptions]:
    from model.runner.runner import ModelRunner

    decoder, device = _load(spec, options, report)
    memory = options.memory or device.default_cache_share
    own = memory * CACHE_SHARE
    limits = replace(
        options,
        pages=None,
        memory=own,
        max_context=longest,
        max_running=min(options.max_running, MAX_SPECULATIVE_STEP),
    )

    def make(_: ModelRunner) -> Drafts:
        runner = ModelRunner.over(decoder, device, limits)
        pool, step_tokens = runner.pool, limits.step_tokens
        return SeparateModel(runner, pool.layout, pool.num_pages, step_tokens, longest)

    return make, replace(options, memory=memory - own)
