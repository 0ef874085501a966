"""Correctness campaigns: long runs against real servers, each a command of its own. The test suite
covers only their pure parts.
"""
