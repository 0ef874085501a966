"""Ten minutes on a GPU: ceilings, kernels, steps, the service, numbers and peers. `python -m
bench.gpu --help`.
"""
