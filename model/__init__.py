"""Token ids in, logits and sampled ids out. Imports `cache` and nothing of `server`."""
