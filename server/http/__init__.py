"""HTTP: a package for each dialect and what they share. Imports no torch and no engine, and of
`model` only plain data.
"""
