"""The decode kernel: attention of single tokens, whose splits the same launch joins.

A program computes one tile of a token's heads over one split of its keys. Each of GROUPS warps has
BLOCK_N keys of every block to itself, with sums of its own that are joined after the loop, so that
the loop needs few barriers; with one group of warps all share the keys.

The last program of a tile to finish, which an atomic counter tells, adds up the splits in their
order and sets the counter back to 0.

Invariant: a token's output depends on its own sequence, and on the tile sizes, `split` and
`most_splits`. All keys are stored before the launch, so that tokens of one sequence may be in it. A
token at a position below 0 is padding: nothing is read or written for it.

Shape letters: G groups of warps, M rows of a tile, which are heads, N keys of a group's block, D
first columns of a key, R its tail's, V of a value. Tensors of the loop begin with G only where
there are several groups.
"""

import triton
import triton.language as tl

from model.devices.gpu.attention.online_softmax import base_of, of_no_keys, online_softmax, queries


@triton.jit
def _of_each(GROUPS: tl.constexpr, q_MD):
    """Queries, once for each group of warps."""
    return (
        q_MD
        if GROUPS == 1
        else tl.broadcast_to(q_MD[None, :, :], [GROUPS, q_MD.shape[0], q_MD.shape[1]])
    )


@triton.jit
def _share(position, number, split, most_splits, SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """The blocks low .. high - 1 of split `number` of a token at this position, and how many splits
    it has.

    Splits are counted from the first block that the window touches. They have `split` keys, and
    more where there would be more than `most_splits`.
    """
    first = tl.maximum(position - WINDOW + 1, 0) // SIZE if WINDOW > 0 else 0
    end = position // SIZE + 1
    blocks = tl.maximum(split // SIZE, tl.cdiv(end - first, most_splits))
    low = first + number * blocks
    return low, tl.minimum(low + blocks, end), tl.cdiv(end - first, blocks)


@triton.jit
def _attended(
    low, high, position, q, q_tail, pages_ptr, num_stacks, keys_ptr, values_ptr, factor,
    NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    NUMBERS: tl.constexpr, WINDOW: tl.constexpr, VALUE_IN_KEY: tl.constexpr,
):  # fmt: skip
    """A tile over blocks low .. high - 1: largest logit, sum of weights and weighted values."""
    inside = tl.arange(0, BLOCK_N)
    if GROUPS == 1:
        peak, total, o = of_no_keys(BLOCK_M, BLOCK_V)
    else:
        inside = tl.arange(0, GROUPS)[:, None] * BLOCK_N + inside[None, :]
        peak = tl.full([GROUPS, BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([GROUPS, BLOCK_M], tl.float32)
        o = tl.zeros([GROUPS, BLOCK_M, BLOCK_V], tl.float32)
    peak, total, o = online_softmax(
        low, high, position, position, inside, q, q_tail, peak, total, o, pages_ptr, num_stacks,
        keys_ptr, values_ptr, factor,
        NUM_D, NUM_R, NUM_V, BLOCK_D, BLOCK_R, BLOCK_V, GROUPS * BLOCK_N, PAGE, NUMBERS, WINDOW,
        VALUE_IN_KEY, True,
    )  # fmt: skip
    if GROUPS > 1:
        top_M = tl.max(peak, 0)
        weight_GM = tl.exp2(peak - base_of(top_M)[None, :])
        peak, total, o = top_M, tl.sum(total * weight_GM, 0), tl.sum(o * weight_GM[:, :, None], 0)
    return peak, total, o


@triton.jit
def _counted(
    place, counter_ptr, num_splits, peak_M, sum_M, o_MV, stored_MV, partial_ptr, peaks_ptr,
    sums_ptr,
    NUM_V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Stores the outputs of a split. -> Whether all splits of the tile have been stored now."""
    place_M, cols_V = place * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_V)
    tl.store(peaks_ptr + place_M, peak_M)
    tl.store(sums_ptr + place_M, sum_M)
    tl.store(partial_ptr + place_M[:, None] * NUM_V + cols_V[None, :], o_MV, mask=stored_MV)
    # What all threads have stored comes before the count of one of them.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == num_splits - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def _joined(
    place, num_splits, stored_MV, partial_ptr, peaks_ptr, sums_ptr, NUM_V: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """The outputs of a tile from those of its splits. They were stored by other processors: read
    past the cache of this one.
    """
    place_M, cols_V = place * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_V)
    peak_M, sum_M, o_MV = of_no_keys(BLOCK_M, BLOCK_V)
    # Unrolled, so that the loads of several splits are on their way at once.
    for split in tl.range(0, num_splits, num_stages=1, loop_unroll_factor=4):
        at_M = place_M + split * BLOCK_M
        split_peak_M = tl.load(peaks_ptr + at_M, cache_modifier=".cg")
        split_sum_M = tl.load(sums_ptr + at_M, cache_modifier=".cg")
        split_ptrs = partial_ptr + at_M[:, None] * NUM_V + cols_V[None, :]
        split_o_MV = tl.load(split_ptrs, mask=stored_MV, other=0.0, cache_modifier=".cg")
        new_peak_M = tl.maximum(peak_M, split_peak_M)
        base_M = base_of(new_peak_M)
        shrink_M, weight_M = tl.exp2(peak_M - base_M), tl.exp2(split_peak_M - base_M)
        sum_M = sum_M * shrink_M + split_sum_M * weight_M
        o_MV = o_MV * shrink_M[:, None] + split_o_MV * weight_M[:, None]
        peak_M = new_peak_M
    return sum_M, o_MV


@triton.jit(do_not_specialize=["first_row", "stack", "num_stacks", "split", "most_splits"])
def decode(
    q_ptr, keys_ptr, values_ptr, output_ptr, tokens_ptr, positions_ptr, offsets_ptr, pages_ptr,
    partial_ptr, peaks_ptr, sums_ptr, counters_ptr,
    first_row, q_stride, stack, num_stacks, split, most_splits, factor,
    HEADS: tl.constexpr, NUM_D: tl.constexpr, NUM_R: tl.constexpr, NUM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, NUMBERS: tl.constexpr,
    WINDOW: tl.constexpr, VALUE_IN_KEY: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile, i): tile % TILES of the heads of row first_row + tile // TILES, over split i
    of the row's keys.
    """
    TILES: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
    tile, number = tl.program_id(0), tl.program_id(1)
    token = first_row + tile // TILES
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + token)
    position = tl.load(positions_ptr + token)
    pages_ptr += tl.load(offsets_ptr + token) + stack
    token = token.to(tl.int64)
    low, high, num_splits = _share(position, number, split, most_splits, GROUPS * BLOCK_N, WINDOW)
    if position < 0 or number >= num_splits:
        return
    head_M, cols_V = tile % TILES * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_V)
    stored_MV = (head_M < HEADS)[:, None] & (cols_V < NUM_V)[None, :]
    # Rows after the last head repeat that one and are not stored.
    query_ptrs = q_ptr + token * q_stride + tl.minimum(head_M, HEADS - 1) * (NUM_D + NUM_R)
    q = _of_each(GROUPS, queries(query_ptrs, NUM_D, BLOCK_D, UPCAST))
    q_tail = q
    if NUM_R > 0:
        q_tail = _of_each(GROUPS, queries(query_ptrs + NUM_D, NUM_R, BLOCK_R, UPCAST))
    peak_M, sum_M, o_MV = _attended(
        low, high, position, q, q_tail, pages_ptr, num_stacks, keys_ptr, values_ptr, factor,
        NUM_D, NUM_R, NUM_V, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_M, GROUPS, BLOCK_N, PAGE,
        NUMBERS, WINDOW, VALUE_IN_KEY,
    )  # fmt: skip
    last = num_splits == 1
    if not last:
        scratch = tile.to(tl.int64) * tl.num_programs(1)
        last = _counted(
            scratch + number, counters_ptr + tile, num_splits, peak_M, sum_M, o_MV, stored_MV,
            partial_ptr, peaks_ptr, sums_ptr, NUM_V, BLOCK_V, BLOCK_M,
        )  # fmt: skip
        if last:
            sum_M, o_MV = _joined(
                scratch, num_splits, stored_MV, partial_ptr, peaks_ptr, sums_ptr, NUM_V, BLOCK_V,
                BLOCK_M,
            )  # fmt: skip
    if last:
        output_ptrs = output_ptr + ((token * HEADS + head_M) * NUM_V)[:, None] + cols_V[None, :]
        tl.store(
            output_ptrs,
            (o_MV * (1.0 / sum_M)[:, None]).to(output_ptr.dtype.element_ty),
            mask=stored_MV,
        )
