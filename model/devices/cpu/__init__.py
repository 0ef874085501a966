"""The CPU: attention and matrix products by our own kernels."""
