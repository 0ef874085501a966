"""Commands that make or study checkpoints. Nothing that serves imports this package."""
