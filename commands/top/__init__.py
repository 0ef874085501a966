"""`onehead top`: a running server's requests, KV cache pages, rates and latencies in the terminal, live from its GET /monitor."""
