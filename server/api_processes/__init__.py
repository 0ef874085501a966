"""Several API processes in front of one engine: how the front process runs them, and what each of them runs."""
