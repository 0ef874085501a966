"""The GPU backend without a GPU: its kernels under Triton's interpreter, and what the compiler
makes of them.
"""
