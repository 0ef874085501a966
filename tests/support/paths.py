"""Folders of the source tree that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "model" / "pretrained"
"""The checkpoint that is served where no other is named."""
CONFIGS = ROOT / "configs"
"""Presets for `--config`."""
MODELS = CONFIGS / "models"
"""Folders with the config.json of published checkpoints, without weights."""
