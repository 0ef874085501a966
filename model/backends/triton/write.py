"""The kernel that stores the keys and values of a step's tokens in their slots, both in one launch.

Where slots are float8 what is beyond its range becomes its largest number, and what is not finite its NaN (cache/pool.py).
Invariant: it writes to the slots it is given and nowhere else; slot -1 is padding and writes nothing. It knows nothing of sequences.
"""

import triton
import triton.language as tl


@triton.jit
def _stored(x, DTYPE: tl.constexpr):
    if DTYPE == tl.float8e4nv:  # noqa: SIM300
        # The instruction that converts saturates, infinities too.
        x = x.to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    return x.to(DTYPE)


@triton.jit
def scatter(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, k_stride, v_stride,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, VALUE_IN_KEY: tl.constexpr,
):  # fmt: skip
    """Program t: token t's key, and its value unless that is the key's beginning."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    cols = tl.arange(0, BLOCK_KEY)
    key = tl.load(k_ptr + token * k_stride + cols, mask=cols < KEY_DIM)
    tl.store(keys_ptr + slot * KEY_DIM + cols, _stored(key, keys_ptr.dtype.element_ty), mask=cols < KEY_DIM)
    if not VALUE_IN_KEY:
        cols = tl.arange(0, BLOCK_VALUE)
        value = tl.load(v_ptr + token * v_stride + cols, mask=cols < VALUE_DIM)
        tl.store(values_ptr + slot * VALUE_DIM + cols, _stored(value, values_ptr.dtype.element_ty), mask=cols < VALUE_DIM)
