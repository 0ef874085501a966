"""The kernel that applies rotary embeddings to keys and queries and stores keys and values in their
slots: one launch.

Rotated queries go to a new matrix. The rotation is computed in float32 as by model.layers.Rotation,
and rounded once. Float8 slots saturate, and infinities become NaN (cache/pool.py). Invariant: it
writes to the slots of the tokens' positions and nowhere else in the pool; tokens with a position
below 0 are padding and are skipped. It knows nothing of sequences.

Shape letters: H heads of a program, P pairs of a head's columns.
"""

import triton
import triton.language as tl


@triton.jit
def _stored(x, DTYPE: tl.constexpr):
    if DTYPE == tl.float8e4nv:  # noqa: SIM300
        # The conversion instruction saturates infinities too.
        x = x.to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    return x.to(DTYPE)


@triton.jit
def _put(pointers, x, there):
    """Stores x in the dtype of the pointers."""
    tl.store(pointers, _stored(x, pointers.dtype.element_ty), mask=there)


@triton.jit
def _copy(x_ptr, y_ptr, NUM: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    _put(y_ptr + cols, tl.load(x_ptr + cols, mask=cols < NUM), cols < NUM)


@triton.jit
def _rotate(
    x_ptr, y_ptr, cosine_ptr, sine_ptr, head_H,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, BLOCK_KEY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotates some heads of a token. Interleaved pairs come out as halves."""
    PAIRS: tl.constexpr = KEY_DIM // 2
    pair_P = tl.arange(0, BLOCK_KEY // 2)
    cosine_1P = tl.load(cosine_ptr + pair_P, mask=pair_P < PAIRS).to(tl.float32)[None, :]
    sine_1P = tl.load(sine_ptr + pair_P, mask=pair_P < PAIRS).to(tl.float32)[None, :]
    there_HP = (head_H < HEADS)[:, None] & (pair_P < PAIRS)[None, :]
    x_ptrs = x_ptr + head_H[:, None] * KEY_DIM + (pair_P * (2 if INTERLEAVED else 1))[None, :]
    a_HP = tl.load(x_ptrs, mask=there_HP).to(tl.float32)
    b_HP = tl.load(x_ptrs + (1 if INTERLEAVED else PAIRS), mask=there_HP).to(tl.float32)
    y_ptrs = y_ptr + head_H[:, None] * KEY_DIM + pair_P[None, :]
    _put(y_ptrs, a_HP * cosine_1P - b_HP * sine_1P, there_HP)
    _put(y_ptrs + PAIRS, b_HP * cosine_1P + a_HP * sine_1P, there_HP)


@triton.jit(do_not_specialize=["stack", "num_stacks"])
def scatter(
    q_ptr, k_ptr, v_ptr, cosine_ptr, sine_ptr, turned_ptr, keys_ptr, values_ptr, positions_ptr,
    offsets_ptr, pages_ptr,
    q_stride, k_stride, v_stride, stack, num_stacks, PAGE: tl.constexpr, NUMBERS: tl.constexpr,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, VALUE_IN_KEY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Program (t, 0): token t's key, if there are keys, and its value unless that is part of the
    key. With a rotation, program (t, 1 + i): block i of its query heads.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions_ptr + token)
    if position < 0:
        return
    page_ptr = pages_ptr + tl.load(offsets_ptr + token) + position // PAGE * num_stacks + stack
    if cosine_ptr is not None:
        cosine_ptr += token * (KEY_DIM // 2)
        sine_ptr += token * (KEY_DIM // 2)
    if part == 0:
        # A condition around all of it: what follows a return would be compiled without keys too.
        if k_ptr is not None:
            first, slot = tl.load(page_ptr).to(tl.int64) * NUMBERS, position % PAGE
            from_ptr, to_ptr = k_ptr + token * k_stride, keys_ptr + first + slot * KEY_DIM
            if cosine_ptr is None:
                _copy(from_ptr, to_ptr, KEY_DIM, BLOCK_KEY)
            else:
                _rotate(
                    from_ptr, to_ptr, cosine_ptr, sine_ptr, tl.arange(0, 1), 1, KEY_DIM,
                    BLOCK_KEY, INTERLEAVED,
                )  # fmt: skip
            if not VALUE_IN_KEY:
                value_ptr = v_ptr + token * v_stride
                _copy(value_ptr, values_ptr + first + slot * VALUE_DIM, VALUE_DIM, BLOCK_VALUE)
    elif cosine_ptr is not None:
        head_H = (part - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _rotate(
            q_ptr + token * q_stride, turned_ptr + token * (HEADS * KEY_DIM), cosine_ptr, sine_ptr,
            head_H, HEADS, KEY_DIM, BLOCK_KEY, INTERLEAVED,
        )  # fmt: skip
