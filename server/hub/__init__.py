"""Checkpoint folders: downloads from the Hugging Face hub, and the folder that is made of a GGUF
file.
"""
