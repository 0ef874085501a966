"""Validates, admits and submits requests, and turns their tokens into text; used by both HTTP
dialects and the commands. Knows no HTTP.
"""
