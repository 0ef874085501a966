"""GGUF files, the checkpoints of llama.cpp: a header of metadata and tensors, and weights in quantization blocks."""

# Contract: split.GGUF.open(path) checks a file, or all parts of a split one, and gives `metadata` and the place of each tensor; header and
# split import neither torch nor numpy. config.config_of(gguf) is the config.json that the families read. weights.GGUFWeights gives the
# tensors under Hugging Face's names, dequantized or as the blocks in the file.
