"""GGUF files, the checkpoints of llama.cpp: a header of metadata and tensors, and weights in
quantization blocks.
"""

# Contract: header.GGUFFile.open(path) checks a file and gives `metadata` and the place of each
# tensor; header imports neither torch nor numpy. folder.py writes what is made of the metadata
# (config.config_of, tokenizer), once for each state of a file; weights.gguf_tensors gives the
# Readers of the tensors under Hugging Face's names.
