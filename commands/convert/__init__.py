"""`onehead convert`: a checkpoint with one key/value head from a checkpoint with several."""
