"""Supervision of the engine process from the API process: start, messages, health checks, restart
and replay.
"""
