"""Who owns which page of the one-head key/value cache. Imports nothing of ours."""
