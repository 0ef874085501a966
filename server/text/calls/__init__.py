"""Calls of tools: formats, the grammar and the parser of each, and what a request needs of them."""
