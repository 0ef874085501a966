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

#include "attention.h"

#include <algorithm>

#include "pool.h"
#include "vector.h"

constexpr int MAX_ROWS = 96;  // Rows that pass a page together.

extern "C" const char *isa() { return ISA; }

// Stores a number. Returns by how much the sum of its page grows.
template <class Number> static int64_t put(float x, Number *place) {
    const int64_t before = whole(*place);
    narrow(x, place);
    return whole(*place) - before;
}

template <class Whole> static int64_t sum(const Whole *numbers, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += numbers[i];
    return total;
}

// The sum of the numbers of each of these pages, their bits as whole numbers. numbers [pages of the pool, count], of 4 or 2 bytes.
extern "C" void sum_pages(const char *numbers, int64_t size, int64_t count, const int64_t *pages, int64_t num_sums, int64_t *sums, int64_t num_threads) {
    compute_items(num_sums, num_threads, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const char *page = numbers + pages[i] * count * size;
            sums[i] = size == 4 ? sum((const int32_t *)page, count) : sum((const int16_t *)page, count);
        }
    });
}

template <class Number> static void write(const Attention &attention, int64_t begin, int64_t end) {
    const int64_t size = attention.page_size;
    const Span *last = attention.spans + attention.num_spans;
    for (int64_t token = begin; token < end; token++) {
        const Span &span = *(std::upper_bound(attention.spans, last, token, [](int64_t t, const Span &s) { return t < s.first_token; }) - 1);
        const int64_t place = span.num_keys - span.num_tokens + token - span.first_token;
        const int64_t page = span.pages[place / size * span.page_stride + attention.stack], offset = place % size;
        const float *new_key = attention.new_keys + token * attention.key_stride, *new_value = attention.new_values + token * attention.value_stride;
        Number *key = (Number *)attention.keys + page * attention.page_numbers + offset;
        int64_t growth = 0;
        for (int64_t i = 0; i < attention.key_dim; i++) growth += put(new_key[i], key + i * size);
        Number *value = (Number *)attention.values + page * attention.page_numbers + offset * attention.value_dim;
        for (int64_t i = 0; attention.values && i < attention.value_dim; i++) growth += put(new_value[i], value + i);
        if (attention.sums) __atomic_fetch_add(attention.sums + page, growth, __ATOMIC_RELAXED);
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
            __builtin_prefetch(next + i * page_size + n * LANES, 0, 2);
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
            __builtin_prefetch(next + s * value_dim + n * LANES, 0, 2);
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

// Weights of one row from its scores on the first `size` keys of a page, in place; how much what came before shrinks.
static float soften(Tile &tile, int r, float *scores, int64_t page_first, int64_t size) {
    int64_t first = std::max<int64_t>(0, tile.begin[r] - page_first), last = std::min(size, tile.end[r] - page_first);
    if (first >= last) {
        memset(scores, 0, size * sizeof(float));
        return 1.0f;
    }
    const float hidden = -std::numeric_limits<float>::infinity();
    const bool whole = first == 0 && last == size;
    if (!whole) {
        std::fill(scores, scores + first, hidden);
        std::fill(scores + last, scores + size, hidden);
    }
    Vector most = all(hidden);
    for (int64_t s = 0; s < size; s += LANES) most = max(load(scores + s), most);
    const float now = std::max(tile.greatest[r], greatest(most));
    float sum = total_of(size, [=](int64_t s, Vector sums) {
        const Vector weight = exp_of_negative(sub(load(scores + s), all(now)));
        store(scores + s, weight);
        return add(sums, weight);
    });
    if (!whole) {
        // The exponential of what is hidden is e^-87 rather than 0.
        std::fill(scores, scores + first, 0.0f);
        std::fill(scores + last, scores + size, 0.0f);
        sum = total_of(size, [=](int64_t s, Vector sums) { return add(sums, load(scores + s)); });
    }
    float lanes[LANES];
    store(lanes, exp_of_negative(all(tile.greatest[r] - now)));
    float shrink = tile.sum[r] == 0.0f ? 0.0f : lanes[0];
    tile.sum[r] = tile.sum[r] * shrink + sum;
    tile.greatest[r] = now;
    return shrink;
}

template <int ROWS, class Number>
static void pass_page(const Attention &attention, Tile &tile, Page<Number> page, Page<Number> next, int64_t page_first, float *scores) {
    const int64_t size = attention.page_size;
    int64_t first = size, last = 0;
    for (int r = 0; r < ROWS; r++) {
        first = std::min(first, std::max<int64_t>(0, tile.begin[r] - page_first));
        last = std::max(last, std::min(size, tile.end[r] - page_first));
    }
    const int64_t seen = (last + LANES - 1) / LANES * LANES;  // Keys after these are seen by no row of the tile.
    int64_t s = 0;
    for (; s + TILE_VECTORS * LANES <= seen; s += TILE_VECTORS * LANES)
        score<ROWS, TILE_VECTORS>(tile.queries, page.keys + s, next.keys + s, attention.key_dim, size, attention.scale, scores + s);
    for (; s < seen; s += LANES) score<ROWS, 1>(tile.queries, page.keys + s, next.keys + s, attention.key_dim, size, attention.scale, scores + s);
    float shrink[ROWS];
    for (int r = 0; r < ROWS; r++) shrink[r] = soften(tile, r, scores + r * size, page_first, seen);
    int64_t c = 0;
    for (; c + TILE_VECTORS * LANES <= attention.value_dim; c += TILE_VECTORS * LANES)
        mix<ROWS, TILE_VECTORS>(scores, shrink, page.values + c, next.values + c, first, last, attention.value_dim, size, tile.mixed + c);
    for (; c < attention.value_dim; c += LANES)
        mix<ROWS, 1>(scores, shrink, page.values + c, next.values + c, first, last, attention.value_dim, size, tile.mixed + c);
}

template <int ROWS = TILE_ROWS, class Number>
static void pass(const Attention &attention, Tile &tile, Page<Number> page, Page<Number> next, int64_t page_first, float *scores) {
    if (tile.num_rows == ROWS)
        pass_page<ROWS>(attention, tile, page, next, page_first, scores);
    else if constexpr (ROWS > 1)
        pass<ROWS - 1>(attention, tile, page, next, page_first, scores);
}

// [d, S] -> [S, v] of its first v columns.
template <class Number> static void transpose(const Number *keys, int64_t value_dim, int64_t page_size, Number *values) {
    for (int64_t first = 0; first < page_size; first += LANES)
        for (int64_t c = 0; c < value_dim; c++)
            for (int64_t s = first; s < first + LANES; s++) values[s * value_dim + c] = keys[c * page_size + s];
}

// The key after a token's own.
static int64_t next_of(const Span &span, int64_t token) { return span.num_keys - span.num_tokens + token + 1; }

static int64_t begin_of(const Span &span, int64_t token) { return span.window ? std::max<int64_t>(0, next_of(span, token) - span.window) : 0; }

static int64_t end_of(const Span &span, int64_t token) { return std::min(span.num_keys, next_of(span, token) + span.ahead); }

// Page `number` of a span.
template <class Number> static Page<Number> page_of(const Attention &attention, const Span &span, int64_t number) {
    const int64_t first = span.pages[number * span.page_stride + attention.stack] * attention.page_numbers;
    const Number *values = (const Number *)attention.values;
    return {(const Number *)attention.keys + first, values ? values + first : nullptr};
}

// The rows of a part: all of them pass a page while it is in the cache. After the last page they ask for the first one of the next part, if any.
template <class Number> static void attend_rows(const Attention &attention, const Part &part, const Part *next_part) {
    const Span &span = *part.span;
    const int64_t first_row = part.first, last_row = part.last;
    const int64_t heads = attention.num_heads, size = attention.page_size;
    std::vector<Tile> tiles;
    std::vector<float> mixed((last_row - first_row + TILE_ROWS) * attention.value_dim, 0.0f), scores(TILE_ROWS * size);
    std::vector<Number> made(attention.values ? 0 : size * attention.value_dim);
    int64_t begin = span.num_keys, end = 0;
    for (int64_t row = first_row; row < last_row; row += TILE_ROWS) {
        Tile &tile = tiles.emplace_back();
        tile.num_rows = int(std::min<int64_t>(TILE_ROWS, last_row - row));
        tile.mixed = mixed.data() + (row - first_row) * attention.value_dim;
        for (int r = 0; r < tile.num_rows; r++) {
            int64_t token = (row + r) / heads, head = (row + r) % heads;
            tile.queries[r] = attention.queries + (span.first_token + token) * attention.query_stride + head * attention.key_dim;
            tile.begin[r] = begin_of(span, token), tile.end[r] = end_of(span, token);
            tile.greatest[r] = -std::numeric_limits<float>::infinity();
            tile.sum[r] = 0.0f;
            begin = std::min(begin, tile.begin[r]);
            end = std::max(end, tile.end[r]);
        }
    }
    for (int64_t number = begin / size; number * size < end; number++) {
        Page<Number> page = page_of<Number>(attention, span, number), next = page;
        if ((number + 1) * size < end)
            next = page_of<Number>(attention, span, number + 1);
        else if (next_part)
            next = page_of<Number>(attention, *next_part->span, begin_of(*next_part->span, next_part->first / heads) / size);
        if (!attention.values) {
            transpose(page.keys, attention.value_dim, size, made.data());
            page.values = next.values = made.data();
        }
        for (Tile &tile : tiles)
            if (tile.begin[0] < (number + 1) * size && tile.end[tile.num_rows - 1] > number * size) {
                pass(attention, tile, page, next, number * size, scores.data());
            }
    }
    float *out = attention.outputs + (span.first_token * heads + first_row) * attention.value_dim;
    for (Tile &tile : tiles)
        for (int r = 0; r < tile.num_rows; r++, out += attention.value_dim)
            for (int64_t c = 0; c < attention.value_dim; c += LANES)
                store(out + c, mul(load(tile.mixed + r * attention.value_dim + c), all(1.0f / tile.sum[r])));
}

std::vector<Part> parts_of(const Attention &attention, int64_t num_threads) {
    const int64_t num_rows = attention.num_tokens * attention.num_heads;
    // Few rows are shared out tile by tile, so that no thread is idle.
    const int64_t share = std::max<int64_t>(TILE_ROWS, num_rows / (2 * num_threads) / TILE_ROWS * TILE_ROWS);
    const int64_t most = std::min<int64_t>(MAX_ROWS / TILE_ROWS * TILE_ROWS, share);
    std::vector<Part> parts;
    for (int64_t i = 0; i < attention.num_spans; i++) {
        const Span &span = attention.spans[i];
        const int64_t rows = span.num_tokens * attention.num_heads;
        for (int64_t row = 0; row < rows; row += most) parts.push_back({&span, row, std::min(rows, row + most)});
    }
    return parts;
}

void write_tokens(const Attention &attention, int64_t begin, int64_t end) {
    if (!attention.new_keys) return;
    switch (attention.number_type) {
        case BFLOAT16: return write<Bfloat16>(attention, begin, end);
        case FLOAT16: return write<Float16>(attention, begin, end);
        default: return write<float>(attention, begin, end);
    }
}

void attend_parts(const Attention &attention, const Part *begin, const Part *end) {
    for (const Part *part = begin; part != end; part++) {
        const Part *next = part + 1 == end ? nullptr : part + 1;
        switch (attention.number_type) {
            case BFLOAT16: attend_rows<Bfloat16>(attention, *part, next); break;
            case FLOAT16: attend_rows<Float16>(attention, *part, next); break;
            default: attend_rows<float>(attention, *part, next);
        }
    }
}

// Stores the step's keys and values, then o = softmax(q K^T * scale) V for every head of every token of the spans.
extern "C" void attend(const Attention *attention, int64_t num_threads) {
    const std::vector<Part> parts = parts_of(*attention, num_threads);
    compute_items(attention->num_tokens, num_threads, [=](int64_t begin, int64_t end) { write_tokens(*attention, begin, end); });
    compute_items(int64_t(parts.size()), num_threads, [&](int64_t begin, int64_t end) { attend_parts(*attention, parts.data() + begin, parts.data() + end); });
}
