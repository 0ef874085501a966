"""A tiny random model with the embedded model's tokenizer and chat template, for clients whose
prompts are longer than that model's context.

    python -m tests.support.long_context FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import torch

from tests.support.paths import ROOT

POSITIONS = 2**16
NUM_ENDS = 64
"""Tokens that end an answer, so that answers are short."""


def make_model(folder: Path) -> None:
    """Writes the model to a new folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    embedded = ROOT / "model" / "pretrained"
    vocabulary = json.loads((embedded / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded / name, folder)
    ends = [*range(vocabulary - 1, 0, -vocabulary // NUM_ENDS)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
    print(sys.argv[1])
