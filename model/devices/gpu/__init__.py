"""The GPU's kernels besides attention, in Triton: products, norms and a summary of logits, each row's bits from that row alone.

Torch's own (cuBLAS) choose how to sum by how many rows there are; these are what `engine.deterministic` puts in their place. Triton is
imported by `products`, `rows` and whatever launches them, never from here.
"""

EXACT = {"enable_fp_fusion": False}
"""Products and sums become one instruction where the kernels say so, and not where a compiler likes: bits would hang on its taste."""
