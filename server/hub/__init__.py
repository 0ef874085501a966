"""Checkpoint folders: downloads from the Hugging Face hub, and the tokenizer.json of a folder that has none."""
