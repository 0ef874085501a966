"""The suite on published weights: `python -m bench.real`."""
