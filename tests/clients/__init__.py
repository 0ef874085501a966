"""Suites for clients that need an environment of their own: `scripts/clients`. Each file is a
program that is given a server's URL.
"""
