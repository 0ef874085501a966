"""What kernels of products share: activations, and the joining of sums over parts of the inputs
(split-K), which a matrix with few tiles is divided into to occupy a GPU.

Invariant (batch-invariant): parts are added in their order. It knows nothing of layers and steps.

Shape letters: T rows, O output columns.
"""

import triton
import triton.language as tl


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation. GELU's tanh form x / 2 * (1 + tanh(u)) is computed as x * sigmoid(2 u):
    Triton's interpreter has no tanh.
    """
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # A NaN stays one.
    else:
        tl.static_assert(ACTIVATION == "none")
    return x


@triton.jit(do_not_specialize=["num_sums"])
def join(
    sums_ptr, bias_ptr, y_ptr, num_sums,
    OUTPUTS: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_Y: tl.constexpr,
):  # fmt: skip
    """Program i: elements of y [T, O], each of the sum of its parts in their order."""
    index_Y = tl.program_id(0) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    there_Y, column_Y = index_Y < num_sums, index_Y % OUTPUTS
    sum_Y = tl.zeros([BLOCK_Y], tl.float32)
    for part in tl.static_range(PARTS):
        sum_Y += tl.load(sums_ptr + part * num_sums.to(tl.int64) + index_Y, mask=there_Y, other=0.0)
    if bias_ptr is not None:
        sum_Y += tl.load(bias_ptr + column_Y).to(tl.float32)
    tl.store(y_ptr + index_Y, activated(sum_Y, ACTIVATION).to(y_ptr.dtype.element_ty), mask=there_Y)
