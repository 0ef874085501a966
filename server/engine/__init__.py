"""The engine process: scheduler, step loop and entry point. Only `worker` loads torch, through
model.runner.
"""
