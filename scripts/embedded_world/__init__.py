"""The small world that the embedded model knows: what it is trained on, and what it is asked."""
