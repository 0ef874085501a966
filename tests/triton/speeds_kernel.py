"""A kernel that stores the random part of the speeds of a block's tokens. To be imported by tests,
under Triton's interpreter.
"""

from typing import Any

import triton
import triton.language as tl

from model.devices.gpu.draw import _speed, _words


@triton.jit
def speeds_of(settings_ptr: Any, speeds_ptr: Any, block: Any, QUARTER: tl.constexpr) -> None:
    """Of equally likely tokens, the four quarters of the block one behind the other."""
    index_Q = tl.arange(0, QUARTER)
    a_Q, b_Q, c_Q, d_Q = _words(settings_ptr, block * QUARTER + index_Q)
    share_Q = index_Q.to(tl.float32) * 0.0
    tl.store(speeds_ptr + index_Q, _speed(share_Q, a_Q))
    tl.store(speeds_ptr + QUARTER + index_Q, _speed(share_Q, b_Q))
    tl.store(speeds_ptr + 2 * QUARTER + index_Q, _speed(share_Q, c_Q))
    tl.store(speeds_ptr + 3 * QUARTER + index_Q, _speed(share_Q, d_Q))
