// Attention over pages of one key/value head, where they lie: nothing is gathered, and a page is read once for all query heads.
//
// A query row is one head of one token. It passes the pages of its sequence in order from the first that it sees, each page is one block of
// the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), and all sums within a page run in one order. Invariant: what a row
// gets depends on the row and on the keys and values it sees; not on the other rows, nor on how rows are shared out to threads. (A value
// that is not finite may reach rows of the same sequence that do not see it, as 0 times it: that sequence fails as a whole.)
//
// Letters: H query heads, d columns of a key, v of a value, S slots of a page. A key page is [d, S], so that the scores of neighbouring keys
// are neighbouring lanes; a value page is [S, v]. Where there are no value pages, the value is the beginning of the key (latent attention),
// and a page of values is made of one of keys whenever rows pass it. S, d and v are multiples of 16. Pages hold `Number`s: float32, or 16
// bits, which are widened when they are loaded.

#include <algorithm>
#include <vector>

#include "vector.h"

constexpr int MAX_ROWS = 96;  // Rows that pass a page together.

extern "C" const char *isa() { return ISA; }

// What one row of the step (some tokens of one sequence) reads and writes; model/devices/cpu/attention.py has the same fields.
struct Span {
    int64_t first_token, num_tokens, num_keys, window;
    const int64_t *pages;  // From the one that holds key 0; those of one stack of layers are page_stride apart.
    int64_t page_stride;
};

struct Step {
    const float *queries;                // [T, H, d], with the strides below from a token to the next
    const void *new_keys, *new_values;   // [T, d] and [T, v], as pages hold them
    float *outputs;                      // [T, H, v]
    void *keys, *values;                 // The layer's pages; values may be null.
    const Span *spans;
    int64_t query_stride, key_stride, value_stride, num_tokens, num_spans, stack, num_heads, key_dim, value_dim, page_size, number_type;
    float scale;
};

template <class Number> static void write(const Step &step, const Span &span) {
    const int64_t size = step.page_size;
    for (int64_t t = 0; t < span.num_tokens; t++) {
        const int64_t place = span.num_keys - span.num_tokens + t, token = span.first_token + t;
        const int64_t page = span.pages[place / size * span.page_stride + step.stack], offset = place % size;
        const Number *new_key = (const Number *)step.new_keys + token * step.key_stride;
        const Number *new_value = (const Number *)step.new_values + token * step.value_stride;
        Number *key = (Number *)step.keys + page * size * step.key_dim + offset;
        for (int64_t i = 0; i < step.key_dim; i++) key[i * size] = new_key[i];
        if (step.values) memcpy((Number *)step.values + (page * size + offset) * step.value_dim, new_value, step.value_dim * sizeof(Number));
    }
}

// Where a page is.
template <class Number> struct Page {
    const Number *keys, *values;
};

// scores[r, s] = scale * q_r . k_s for ROWS rows and VECTORS * LANES keys.
template <int ROWS, int VECTORS, class Number>
static void score(const float *const *queries, const Number *keys, const Number *next, int64_t key_dim, int64_t page_size, float scale,
                  float *scores) {
    Vector sums[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int n = 0; n < VECTORS; n++) sums[r][n] = all(0.0f);
    for (int64_t i = 0; i < key_dim; i++) {
        Vector key[VECTORS];
        UNROLL for (int n = 0; n < VECTORS; n++) {
            key[n] = load(keys + i * page_size + n * LANES);
            __builtin_prefetch(next + i * page_size + n * LANES);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            Vector query = all(queries[r][i]);
            UNROLL for (int n = 0; n < VECTORS; n++) sums[r][n] = fma(query, key[n], sums[r][n]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int n = 0; n < VECTORS; n++) store(scores + r * page_size + n * LANES, mul(sums[r][n], all(scale)));
}

// mixed[r, c] = mixed[r, c] * shrink[r] + sum over s of weights[r, s] * values[s, c], for VECTORS * LANES columns.
template <int ROWS, int VECTORS, class Number>
static void mix(const float *weights, const float *shrink, const Number *values, const Number *next, int64_t first, int64_t last, int64_t value_dim,
                int64_t page_size, float *mixed) {
    Vector sums[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int n = 0; n < VECTORS; n++) sums[r][n] = mul(load(mixed + r * value_dim + n * LANES), all(shrink[r]));
    for (int64_t s = first; s < last; s++) {
        Vector value[VECTORS];
        UNROLL for (int n = 0; n < VECTORS; n++) {
            value[n] = load(values + s * value_dim + n * LANES);
            __builtin_prefetch(next + s * value_dim + n * LANES);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            Vector weight = all(weights[r * page_size + s]);
            UNROLL for (int n = 0; n < VECTORS; n++) sums[r][n] = fma(weight, value[n], sums[r][n]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int n = 0; n < VECTORS; n++) store(mixed + r * value_dim + n * LANES, sums[r][n]);
}

// The state of the online softmax of up to TILE_ROWS rows.
struct Tile {
    const float *queries[TILE_ROWS];
    int64_t begin[TILE_ROWS], end[TILE_ROWS];  // Keys that each row sees, counted from the beginning of the span's first page.
    float greatest[TILE_ROWS], sum[TILE_ROWS];
    float *mixed;  // [TILE_ROWS, v]
    int num_rows;
};

// Weights of one row from its scores on a page, in place; how much what came before shrinks.
static float soften(Tile &tile, int r, float *scores, int64_t page_first, int64_t page_size) {
    int64_t first = std::max<int64_t>(0, tile.begin[r] - page_first), last = std::min(page_size, tile.end[r] - page_first);
    if (first >= last) {
        memset(scores, 0, page_size * sizeof(float));
        return 1.0f;
    }
    const float hidden = -std::numeric_limits<float>::infinity();
    const bool whole = first == 0 && last == page_size;
    if (!whole) {
        std::fill(scores, scores + first, hidden);
        std::fill(scores + last, scores + page_size, hidden);
    }
    Vector most = all(hidden);
    for (int64_t s = 0; s < page_size; s += LANES) most = max(load(scores + s), most);
    const float now = std::max(tile.greatest[r], greatest(most));
    Vector sums = all(0.0f);
    for (int64_t s = 0; s < page_size; s += LANES) {
        const Vector weight = exp_of_negative(sub(load(scores + s), all(now)));
        store(scores + s, weight);
        sums = add(sums, weight);
    }
    if (!whole) {
        // The exponential of what is hidden is e^-87 rather than 0.
        std::fill(scores, scores + first, 0.0f);
        std::fill(scores + last, scores + page_size, 0.0f);
        sums = all(0.0f);
        for (int64_t s = 0; s < page_size; s += LANES) sums = add(sums, load(scores + s));
    }
    float lanes[LANES];
    store(lanes, exp_of_negative(all(tile.greatest[r] - now)));
    float shrink = tile.sum[r] == 0.0f ? 0.0f : lanes[0];
    tile.sum[r] = tile.sum[r] * shrink + total(sums);
    tile.greatest[r] = now;
    return shrink;
}

template <int ROWS, class Number>
static void pass_page(const Step &step, Tile &tile, Page<Number> page, Page<Number> next, int64_t page_first, float *scores) {
    const int64_t size = step.page_size;
    int64_t s = 0;
    for (; s + TILE_VECTORS * LANES <= size; s += TILE_VECTORS * LANES)
        score<ROWS, TILE_VECTORS>(tile.queries, page.keys + s, next.keys + s, step.key_dim, size, step.scale, scores + s);
    for (; s < size; s += LANES) score<ROWS, 1>(tile.queries, page.keys + s, next.keys + s, step.key_dim, size, step.scale, scores + s);
    float shrink[ROWS];
    int64_t first = size, last = 0;
    for (int r = 0; r < ROWS; r++) {
        shrink[r] = soften(tile, r, scores + r * size, page_first, size);
        first = std::min(first, std::max<int64_t>(0, tile.begin[r] - page_first));
        last = std::max(last, std::min(size, tile.end[r] - page_first));
    }
    int64_t c = 0;
    for (; c + TILE_VECTORS * LANES <= step.value_dim; c += TILE_VECTORS * LANES)
        mix<ROWS, TILE_VECTORS>(scores, shrink, page.values + c, next.values + c, first, last, step.value_dim, size, tile.mixed + c);
    for (; c < step.value_dim; c += LANES)
        mix<ROWS, 1>(scores, shrink, page.values + c, next.values + c, first, last, step.value_dim, size, tile.mixed + c);
}

template <int ROWS = TILE_ROWS, class Number>
static void pass(const Step &step, Tile &tile, Page<Number> page, Page<Number> next, int64_t page_first, float *scores) {
    if (tile.num_rows == ROWS)
        pass_page<ROWS>(step, tile, page, next, page_first, scores);
    else if constexpr (ROWS > 1)
        pass<ROWS - 1>(step, tile, page, next, page_first, scores);
}

// [d, S] -> [S, v] of its first v columns.
template <class Number> static void transpose(const Number *keys, int64_t value_dim, int64_t page_size, Number *values) {
    for (int64_t first = 0; first < page_size; first += LANES)
        for (int64_t c = 0; c < value_dim; c++)
            for (int64_t s = first; s < first + LANES; s++) values[s * value_dim + c] = keys[c * page_size + s];
}

// Rows first_row .. last_row of a span, of its num_tokens * H: all of them pass a page while it is in the cache.
template <class Number> static void attend_rows(const Step &step, const Span &span, int64_t first_row, int64_t last_row) {
    const int64_t heads = step.num_heads, size = step.page_size;
    std::vector<Tile> tiles;
    std::vector<float> mixed((last_row - first_row + TILE_ROWS) * step.value_dim, 0.0f), scores(TILE_ROWS * size);
    std::vector<Number> made(step.values ? 0 : size * step.value_dim);
    int64_t begin = span.num_keys, end = 0;
    for (int64_t row = first_row; row < last_row; row += TILE_ROWS) {
        Tile &tile = tiles.emplace_back();
        tile.num_rows = int(std::min<int64_t>(TILE_ROWS, last_row - row));
        tile.mixed = mixed.data() + (row - first_row) * step.value_dim;
        for (int r = 0; r < tile.num_rows; r++) {
            int64_t token = (row + r) / heads, head = (row + r) % heads;
            tile.queries[r] = step.queries + (span.first_token + token) * step.query_stride + head * step.key_dim;
            tile.end[r] = span.num_keys - span.num_tokens + token + 1;
            tile.begin[r] = span.window ? std::max<int64_t>(0, tile.end[r] - span.window) : 0;
            tile.greatest[r] = -std::numeric_limits<float>::infinity();
            tile.sum[r] = 0.0f;
            begin = std::min(begin, tile.begin[r]);
            end = std::max(end, tile.end[r]);
        }
    }
    for (int64_t number = begin / size; number * size < end; number++) {
        Page<Number> pages[2];
        for (int i = 0; i < 2; i++) {
            const int64_t place = (number + i) * size < end ? number + i : number;
            const int64_t page = span.pages[place * span.page_stride + step.stack];
            pages[i].keys = (const Number *)step.keys + page * size * step.key_dim;
            pages[i].values = step.values ? (const Number *)step.values + page * size * step.value_dim : made.data();
        }
        if (!step.values) transpose(pages[0].keys, step.value_dim, size, made.data());
        for (Tile &tile : tiles)
            if (tile.begin[0] < (number + 1) * size && tile.end[tile.num_rows - 1] > number * size)
                pass(step, tile, pages[0], pages[1], number * size, scores.data());
    }
    float *out = step.outputs + (span.first_token * heads + first_row) * step.value_dim;
    for (Tile &tile : tiles)
        for (int r = 0; r < tile.num_rows; r++, out += step.value_dim)
            for (int64_t c = 0; c < step.value_dim; c += LANES)
                store(out + c, mul(load(tile.mixed + r * step.value_dim + c), all(1.0f / tile.sum[r])));
}

template <class Number> static void attend_spans(const Step *step, int64_t num_threads) {
    struct Part {
        const Span *span;
        int64_t first, last;
    };
    const int64_t num_rows = step->num_tokens * step->num_heads;
    // Few rows are shared out tile by tile, so that no thread is idle.
    int64_t share = std::max<int64_t>(TILE_ROWS, num_rows / (2 * num_threads) / TILE_ROWS * TILE_ROWS);
    int64_t most = std::min<int64_t>(MAX_ROWS / TILE_ROWS * TILE_ROWS, share);
    std::vector<Part> parts;
    for (int64_t i = 0; i < step->num_spans; i++) {
        const Span &span = step->spans[i];
        int64_t rows = span.num_tokens * step->num_heads;
        for (int64_t row = 0; row < rows; row += most) parts.push_back({&span, row, std::min(rows, row + most)});
    }
    const int64_t num_parts = int64_t(parts.size());
#pragma omp parallel num_threads(num_threads) if (num_parts > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < step->num_spans; i++) write<Number>(*step, step->spans[i]);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_parts; i++) attend_rows<Number>(*step, *parts[i].span, parts[i].first, parts[i].last);
    }
}

// Stores the step's keys and values, then o = softmax(q K^T * scale) V for every head of every token of the spans.
extern "C" void attend(const Step *step, int64_t num_threads) {
    switch (step->number_type) {
        case BFLOAT16: return attend_spans<Bfloat16>(step, num_threads);
        case FLOAT16: return attend_spans<Float16>(step, num_threads);
        default: return attend_spans<float>(step, num_threads);
    }
}
