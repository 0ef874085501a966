"""The output of a finished training run: a checkpoint folder that onehead and transformers both
read, and its loss curve.
"""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from commands import corpus
from commands.options import TrainOptions
from commands.pictures import load_pyplot
from commands.saving import config_from_spec, save_decoder
from commands.train.state import TrainState
from model.decoder import Decoder


def export(
    options: TrainOptions, decoder: Decoder, tokenizer: Tokenizer, state: TrainState
) -> None:
    """Writes config, bfloat16 weights, tokenizer files and loss curve to options.output."""
    config = config_from_spec(decoder.spec) | {"multi_query": options.attention == "multi_query"}
    save_decoder(options.output, decoder, torch.bfloat16, config)
    tokenizer.save(str(options.output / "tokenizer.json"))
    _write_json(
        options.output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": corpus.END,
            "eos_token": corpus.END,
            "unk_token": corpus.END,
            "additional_special_tokens": list(corpus.SPECIAL_TOKENS[1:]),
            "model_max_length": decoder.spec.max_positions,
            "clean_up_tokenization_spaces": False,
        },
    )
    end = decoder.spec.end_token_ids[0]
    _write_json(
        options.output / "generation_config.json", {"bos_token_id": end, "eos_token_id": end}
    )
    plot_losses(options.output / "loss.svg", state)


def plot_losses(path: Path, state: TrainState) -> None:
    """The loss of every step, smoothed, and the held-out loss at each save, as an SVG; without
    matplotlib, nothing.
    """
    plt = load_pyplot()
    if plt is None:
        return
    width = max(1, len(state.losses) // 200)
    smooth = np.convolve(state.losses, np.ones(width) / width, mode="valid")
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(
        np.arange(len(smooth)) + width,
        smooth,
        linewidth=1.2,
        label="training (a share as fill-in-the-middle)",
    )
    if state.held_out:
        axes.plot(
            *zip(*state.held_out, strict=True),
            marker="o",
            markersize=3,
            linewidth=1.2,
            label="held-out modules",
        )
    axes.set(
        xlabel="step",
        ylabel="loss, nats per token",
        ylim=(min(smooth) * 0.9, min(6.0, max(smooth) * 1.05)),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
