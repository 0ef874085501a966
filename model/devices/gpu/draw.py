"""Kernels that draw tokens: the race of a row's tokens, and the filters top-k and top-p.

A draw is an exponential race (docs/why.md#draws-as-races): token v finishes at t_v / p_v, the first
one is drawn. t_v comes from Philox (Salmon et al. 2011) with the seed as its key and a counter of
block, output index and choice; each of a call's four words belongs to one token, so that the block
size is part of the definition. model/draw_words.py says what settings and limits are.
Invariant: a row's results are a pure function of its own logits and settings, bit for bit: its
parts are joined in their order, by whichever program finishes last. It knows nothing of requests;
gpu/drawing.py launches these kernels.

Shape letters: B tokens of a block, Q a quarter of these (or of several blocks), P parts of a row, E
entries of a list, D hidden size.
"""

import triton
import triton.language as tl

from model.draw_words import NUM_LIMITS, NUM_SETTINGS

BLOCK = tl.constexpr(2048)
SETTINGS = tl.constexpr(NUM_SETTINGS)
LIMITS = tl.constexpr(NUM_LIMITS)
RESULTS = tl.constexpr(5)
"""Of a row, 32 bits each: token; log-probability, normaliser and largest logit as float32; 1 if its
states are finite, plus 2 if these numbers are."""
PART_FIELDS = tl.constexpr(6)
"""Of a part of a row, 32 bits each: largest logit, sum of exponentials, place of the largest,
whether states are finite; where the row is drawn at random the best speed and its place.
"""
SMALLEST_STEP = tl.constexpr(5.9604645e-08)
ENTRIES = tl.constexpr(128)
SIGN = tl.constexpr(-(1 << 31))


@triton.jit
def _block(start_ptr, token_B, COLUMNS: tl.constexpr):
    return tl.load(start_ptr + token_B, mask=token_B < COLUMNS, other=float("-inf")).to(tl.float32)


@triton.jit
def _float(ptr):
    return tl.load(ptr).to(tl.float32, bitcast=True)


@triton.jit
def _store_float(ptr, x):
    tl.store(ptr, x.to(tl.int32, bitcast=True))


@triton.jit
def _first_largest(a_Q, b_Q, c_Q, d_Q, place_Q, QUARTER: tl.constexpr, SIZE: tl.constexpr):
    """The largest number of some blocks in four quarters, the first of which have these places, and
    its first place; SIZE where there is none, as with NaN.
    """
    largest = tl.max(tl.maximum(tl.maximum(a_Q, b_Q), tl.maximum(c_Q, d_Q)), 0)
    later_Q = tl.where(
        c_Q == largest,
        place_Q + 2 * QUARTER,
        tl.where(d_Q == largest, place_Q + 3 * QUARTER, SIZE),
    )
    first_Q = tl.where(
        a_Q == largest, place_Q, tl.where(b_Q == largest, place_Q + QUARTER, later_Q)
    )
    return largest, tl.min(first_Q, 0)


@triton.jit
def _words(settings_ptr, counter_Q):
    """Four random words for each counter, a place in the first quarters of all blocks: of the
    tokens at this place in a block's four quarters.
    """
    low = tl.load(settings_ptr + 2).to(tl.uint32, bitcast=True)
    high = tl.load(settings_ptr + 3).to(tl.uint32, bitcast=True)
    seed = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    zero_Q = counter_Q * 0
    return tl.philox(
        seed,
        counter_Q,
        zero_Q + tl.load(settings_ptr + 5),
        zero_Q + tl.load(settings_ptr + 4),
        zero_Q,
    )


@triton.jit
def _speed(share_B, word_B):
    """The logarithm of p / t up to a constant: share - log(-log(1 - u)) with u = (word + 1/2) /
    2^32. Tokens that win have a small u, where 1 - u would lose its digits: there the logarithm is
    a series.
    """
    u_B = (word_B.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series_B = u_B * (1.0 + u_B * (0.5 + u_B * (0.33333334 + u_B * 0.25)))
    return share_B - tl.log(
        tl.where(u_B < 0.01, series_B, -tl.log(tl.maximum(1.0 - u_B, SMALLEST_STEP)))
    )


@triton.jit
def _fastest(
    a_Q, b_Q, c_Q, d_Q, settings_ptr, counter_Q, place_Q, QUARTER: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The best speed in some blocks, given the shares of their four quarters, and its first
    place.
    """
    word_a, word_b, word_c, word_d = _words(settings_ptr, counter_Q)
    a_Q = _speed(a_Q, word_a)
    b_Q = _speed(b_Q, word_b)
    c_Q = _speed(c_Q, word_c)
    d_Q = _speed(d_Q, word_d)
    return _first_largest(a_Q, b_Q, c_Q, d_Q, place_Q, QUARTER, SIZE)


@triton.jit
def _order(x_B):
    """Unsigned integers that are ordered as the numbers are; 0 and -0 are equal."""
    bits_B = tl.where(x_B == 0.0, 0.0, x_B).to(tl.int32, bitcast=True)
    return tl.where(bits_B < 0, ~bits_B, bits_B ^ SIGN).to(tl.uint32, bitcast=True)


@triton.jit
def _share_among(
    start_ptr, token_B, settings_ptr, largest, lowest, bound, end, COLUMNS: tl.constexpr
):
    """Shares of the tokens that take part (within min-p, of order `lowest` at least, and before
    token `end`, whose order is `bound`); -inf of the others.
    """
    x_B = _block(start_ptr, token_B, COLUMNS)
    share_B, order_B = (x_B - largest) * _float(settings_ptr), _order(x_B)
    before_B = (order_B > bound) | ((order_B == bound) & (token_B < end))
    return tl.where(
        (share_B >= _float(settings_ptr + 1)) & (order_B >= lowest) & before_B,
        share_B,
        float("-inf"),
    )


@triton.jit
def _race(
    start_ptr, settings_ptr, largest, lowest, bound, end, COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The winner among those tokens of a row that take part, see `_share_among`, computed by one
    program, SIZE / BLOCK blocks at a time. Where none takes part, no random words are made.
    """
    QUARTER: tl.constexpr = BLOCK // 4
    index_Q = tl.arange(0, SIZE // 4)
    place_Q = index_Q // QUARTER * BLOCK + index_Q % QUARTER
    best, winner = tl.full([], float("-inf"), tl.float32), tl.full([], COLUMNS - 1, tl.int32)
    for first in range(0, COLUMNS, SIZE):
        at_Q = first + place_Q
        a_Q = _share_among(start_ptr, at_Q, settings_ptr, largest, lowest, bound, end, COLUMNS)
        b_Q = _share_among(
            start_ptr, at_Q + QUARTER, settings_ptr, largest, lowest, bound, end, COLUMNS
        )
        c_Q = _share_among(
            start_ptr, at_Q + 2 * QUARTER, settings_ptr, largest, lowest, bound, end, COLUMNS
        )
        d_Q = _share_among(
            start_ptr, at_Q + 3 * QUARTER, settings_ptr, largest, lowest, bound, end, COLUMNS
        )
        if tl.max(tl.maximum(tl.maximum(a_Q, b_Q), tl.maximum(c_Q, d_Q)), 0) > float("-inf"):
            fastest, place = _fastest(
                a_Q, b_Q, c_Q, d_Q, settings_ptr, first // 4 + index_Q, place_Q, QUARTER, SIZE
            )
            winner = tl.where(fastest > best, first + place, winner)
            best = tl.maximum(fastest, best)
    return tl.minimum(winner, COLUMNS - 1)


@triton.jit
def _store_token(drawn_ptr, results_ptr, model_ptr, row, token, normaliser, model_stride):
    """A row's token, also for the next step, and its log-probability under the model's own
    distribution.
    """
    if drawn_ptr is not None:
        tl.store(drawn_ptr + row, token.to(tl.int64))
    logit = tl.load(model_ptr + row.to(tl.int64) * model_stride + token).to(tl.float32)
    tl.store(results_ptr, token)
    _store_float(results_ptr + 1, logit - normaliser)


@triton.jit
def _of_parts(field_ptrs, there_P, other):
    """Volatile: not from a cache that other programs' stores do not reach."""
    return tl.load(field_ptrs, mask=there_P, other=other, volatile=True)


@triton.jit
def _join(
    start_ptr, settings_ptr, part_ptr, num_blocks, COLUMNS: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Of a row, by its parts: the token, the logarithm of the sum of exponentials, the largest
    logit, whether states are finite.
    """
    part_P = tl.arange(0, NUM_PARTS)
    there_P, inverse, part_ptr = part_P < num_blocks, _float(settings_ptr), part_ptr + part_P
    peak_P = _of_parts(part_ptr, there_P, 0).to(tl.float32, bitcast=True)
    peak_P = tl.where(there_P, peak_P, float("-inf"))
    total_P = _of_parts(part_ptr + NUM_PARTS, there_P, 0).to(tl.float32, bitcast=True)
    place_P = _of_parts(part_ptr + 2 * NUM_PARTS, there_P, COLUMNS - 1)
    finite_P = _of_parts(part_ptr + 3 * NUM_PARTS, there_P, 1)
    largest = tl.max(peak_P, 0)
    # Of NaN there is no largest: the row fails, but its token must be a valid id.
    token = tl.min(tl.where(peak_P == largest, place_P, COLUMNS - 1), 0)
    if inverse > 0.0:
        speed_P = _of_parts(part_ptr + 4 * NUM_PARTS, there_P, 0).to(tl.float32, bitcast=True)
        speed_P = tl.where(there_P, speed_P + (peak_P - largest) * inverse, float("-inf"))
        place_P = _of_parts(part_ptr + 5 * NUM_PARTS, there_P, COLUMNS - 1)
        token = tl.minimum(
            tl.min(tl.where(speed_P == tl.max(speed_P, 0), place_P, COLUMNS - 1), 0), COLUMNS - 1
        )
        # What wins among all and is within min-p wins among those within min-p.
        if (tl.load(start_ptr + token).to(tl.float32) - largest) * inverse < _float(
            settings_ptr + 1
        ):
            anywhere = tl.zeros([], tl.uint32)
            token = _race(
                start_ptr, settings_ptr, largest, anywhere, anywhere, COLUMNS, COLUMNS, BLOCK
            )
    normaliser = tl.log(tl.sum(tl.exp(peak_P - largest) * total_P, 0)) + largest
    return tl.minimum(token, COLUMNS - 1), normaliser, largest, tl.min(finite_P, 0)


@triton.jit
def _are_finite(state_ptr, column_D, DEPTH: tl.constexpr):
    """1 if these columns of a row's states are finite, else 0."""
    x_D = tl.load(state_ptr + column_D, mask=column_D < DEPTH, other=0.0).to(tl.float32)
    return tl.min((tl.abs(x_D) < float("inf")).to(tl.int32), 0)


@triton.jit
def draw(
    logits_ptr, model_ptr, rows_ptr, settings_ptr, states_ptr, parts_ptr, counters_ptr, drawn_ptr,
    results_ptr,
    logits_stride, model_stride, states_stride, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PIECE: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Program (i, s): block i of row s of the logits; the last one of a row joins its parts, and
    sets the row's counter back to 0.

    With `rows_ptr` the logits are adjusted ones: row s is that row of the model's and of the
    results, partly known.
    """
    QUARTER: tl.constexpr = BLOCK // 4
    block, place = tl.program_id(0), tl.program_id(1)
    row, index_Q, first = place, tl.arange(0, QUARTER), block * BLOCK
    if rows_ptr is not None:
        row = tl.load(rows_ptr + place)
    start_ptr = logits_ptr + place.to(tl.int64) * logits_stride
    settings_ptr += row * SETTINGS
    at_Q, inverse = first + index_Q, _float(settings_ptr)
    a_Q, b_Q = _block(start_ptr, at_Q, COLUMNS), _block(start_ptr, at_Q + QUARTER, COLUMNS)
    c_Q = _block(start_ptr, at_Q + 2 * QUARTER, COLUMNS)
    d_Q = _block(start_ptr, at_Q + 3 * QUARTER, COLUMNS)
    peak, likeliest = _first_largest(a_Q, b_Q, c_Q, d_Q, index_Q, QUARTER, BLOCK)
    # Differences from the block's largest are exact where they matter; the join adds what that
    # lacks from the row's.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    a_Q, b_Q, c_Q, d_Q = a_Q - base, b_Q - base, c_Q - base, d_Q - base
    part_ptr = parts_ptr + place * PART_FIELDS * NUM_PARTS
    _store_float(part_ptr + block, peak)
    total = tl.sum(tl.exp(a_Q) + tl.exp(b_Q) + tl.exp(c_Q) + tl.exp(d_Q), 0)
    _store_float(part_ptr + NUM_PARTS + block, total)
    tl.store(part_ptr + 2 * NUM_PARTS + block, first + likeliest)
    finite = tl.full([], 1, tl.int32)
    if states_ptr is not None:
        finite = _are_finite(
            states_ptr + row.to(tl.int64) * states_stride,
            block * PIECE + tl.arange(0, PIECE),
            DEPTH,
        )
    tl.store(part_ptr + 3 * NUM_PARTS + block, finite)
    if inverse > 0.0:
        fastest, winner = _fastest(
            a_Q * inverse, b_Q * inverse, c_Q * inverse, d_Q * inverse, settings_ptr,
            block * QUARTER + index_Q, index_Q, QUARTER, BLOCK,
        )  # fmt: skip
        _store_float(part_ptr + 4 * NUM_PARTS + block, fastest)
        tl.store(part_ptr + 5 * NUM_PARTS + block, first + winner)
    # All threads' stores come before the counting, which one thread does.
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + place, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counters_ptr + place, 0)
        token, normaliser, largest, finite = _join(
            start_ptr, settings_ptr, part_ptr, tl.num_programs(0), COLUMNS, NUM_PARTS
        )
        results_ptr += row * RESULTS
        if rows_ptr is not None:
            normaliser = _float(results_ptr + 2)
        else:
            _store_float(results_ptr + 2, normaliser)
            is_finite = (tl.abs(normaliser) < float("inf")) & (tl.abs(largest) < float("inf"))
            tl.store(results_ptr + 4, finite + 2 * is_finite.to(tl.int32))
        _store_float(results_ptr + 3, largest)
        _store_token(drawn_ptr, results_ptr, model_ptr, row, token, normaliser, model_stride)


@triton.jit
def _mass(x, largest, inverse, UNIT: tl.constexpr):
    """exp((x - largest) / temperature) in whole units: sums are the same in every order."""
    return tl.floor(tl.exp((x - largest) * inverse) * UNIT + 0.5).to(tl.int64)


@triton.jit
def _lowest(likeliest_ptr, top_k):
    """The last of a row's `top_k` largest numbers, and how many of these are equal to it."""
    lowest = tl.load(likeliest_ptr + top_k - 1).to(tl.float32)
    ties_E = tl.zeros([ENTRIES], tl.int32)
    for begin in range(0, top_k, ENTRIES):
        place_E = begin + tl.arange(0, ENTRIES)
        x_E = tl.load(likeliest_ptr + place_E, mask=place_E < top_k, other=float("inf"))
        ties_E += (x_E.to(tl.float32) == lowest).to(tl.int32)
    return lowest, tl.sum(ties_E, 0)


@triton.jit(do_not_specialize=["likeliest_stride"])
def confine(
    logits_ptr, likeliest_ptr, model_ptr, limits_ptr, shares_ptr, settings_ptr, drawn_ptr,
    results_ptr, logits_stride, likeliest_stride, model_stride,
    UNIT: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program f: the token that filtered row f draws within top-k and top-p, given the one that it
    draws among all tokens, and its `likeliest` logits, as many as the largest top-k.

    A token is within if fewer than k are likelier and these hold less than top-p of what top-k
    keeps; of equals, lower ids are likelier. The winner among all wins among those within if it is
    one of them. If it is not, neither are those after it, and those before it race again: nothing
    is sorted. `shares_ptr`: top-p as float64. SIZE: of what is read at a time.
    """
    filtered, index_B = tl.program_id(0), tl.arange(0, SIZE)
    row = tl.load(limits_ptr + filtered * LIMITS)
    place = tl.load(limits_ptr + filtered * LIMITS + 1)
    top_k = tl.load(limits_ptr + filtered * LIMITS + 2)
    top_p = tl.load(shares_ptr + filtered)
    start_ptr = logits_ptr + place.to(tl.int64) * logits_stride
    settings_ptr += row * SETTINGS
    results_ptr += row * RESULTS
    inverse, first_token = _float(settings_ptr), tl.load(results_ptr)
    token, normaliser, largest = first_token, _float(results_ptr + 2), _float(results_ptr + 3)
    searching = (tl.abs(normaliser) < float("inf")) & (tl.abs(largest) < float("inf"))
    last, ties = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int32)
    if searching & (top_k > 0) & (top_k < COLUMNS):
        last, ties = _lowest(likeliest_ptr + filtered.to(tl.int64) * likeliest_stride, top_k)
    lowest = _order(last)
    while searching:
        bound = _order(tl.load(start_ptr + token).to(tl.float32))
        rank_B, before_B = tl.zeros([SIZE], tl.int32), tl.zeros([SIZE], tl.int64)
        total_B, tie_B = before_B, before_B
        for first in range(0, COLUMNS, SIZE):
            x_B = _block(start_ptr, first + index_B, COLUMNS)
            order_B, mass_B = _order(x_B), _mass(x_B, largest, inverse, UNIT)
            ahead_B = (order_B > bound) | ((order_B == bound) & (first + index_B < token))
            rank_B += ahead_B.to(tl.int32)
            before_B += tl.where(ahead_B, mass_B, 0)
            total_B += tl.where(order_B > lowest, mass_B, 0)
            tie_B = tl.maximum(tie_B, tl.where(order_B == lowest, mass_B, 0))
        rank, before = tl.sum(rank_B, 0), tl.sum(before_B, 0).to(tl.float64)
        # All equal to the k-th have its mass; top-k keeps so many of them.
        total = (tl.sum(total_B, 0) + ties * tl.max(tie_B, 0)).to(tl.float64)
        within = ((top_k <= 0) | (rank < top_k)) & ((top_p >= 1.0) | (before < top_p * total))
        searching = (rank > 0) & (within == 0)
        if searching:
            token = _race(start_ptr, settings_ptr, largest, lowest, bound, token, COLUMNS, SIZE)
    if token != first_token:
        _store_token(drawn_ptr, results_ptr, model_ptr, row, token, normaliser, model_stride)
