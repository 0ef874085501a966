"""The CPU: attention and matrix products by our own kernels, or by torch where these cannot run."""
