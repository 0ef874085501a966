"""Checkpoint folders: config.json to a ModelSpec, safetensors to parameters. Imports no cache."""
