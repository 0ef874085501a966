"""The engine process: scheduler, step loop, entry. Only `worker` and `core` touch torch, through model.runner.runner."""
