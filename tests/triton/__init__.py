"""The GPU backend without a GPU: its kernels under Triton's interpreter, and what the compiler
makes of them.
"""

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program may have, by compute capability."""
