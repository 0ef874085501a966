// Products with weights quantized in blocks of BLOCK inputs: y = f(norm(x) W^T + b). model/devices/blocks.py defines the arithmetic.
//
// W [N, K] lies in panels of PANEL output columns. A panel has for each block the columns' scales (and, in 4 bits, their minima) in float16,
// then the numbers: [BLOCK / 4, PANEL, 4] bytes in 8 bits, each 128 more than its number, so that none is negative; in 4 bits half as many,
// where byte j of a column holds inputs j and j + BLOCK / 2. So each thread reads one stream. Rows of x are quantized when they arrive.
//
// Invariant: sums within a block are integers and exact, and blocks are added in order of k, without fused operations; so an element of y
// depends on its row and column alone, and before the activation it is bit for bit the same for every width of vectors.
//
// Letters: M rows, K input and N output columns, k an input, b a block. The last panel is filled up with scales of zero, x with zeros.

#include "product.h"

constexpr int BLOCK = 32, STEPS = BLOCK / 4;
constexpr int BLOCK_ROWS = LANES == 16 ? 7 : 2;  // As many as registers can hold the sums of.

// What follows the [STEPS, rows, 4] bytes of a block of x: for each row a correction, then for each row the scale.
struct Int8 {
    static constexpr int HEAD = 2 * PANEL, BYTES = HEAD + BLOCK * PANEL, ROW_BYTES = 2 + BLOCK;
    static constexpr bool HAS_MINIMUM = false;
    using Correction = int32_t;
    static Correction correction(int32_t sum) { return -128 * sum; }
};

struct Int4 {
    static constexpr int HEAD = 4 * PANEL, BYTES = HEAD + BLOCK / 2 * PANEL, ROW_BYTES = 4 + BLOCK / 2;
    static constexpr bool HAS_MINIMUM = true;
    using Correction = float;
    static Correction correction(int32_t sum) { return float(sum); }
};

constexpr int64_t X_BYTES = BLOCK + 8;  // Of a row's block.

template <class Number> INLINE Number number_at(const char *p) {
    Number number;
    memcpy(&number, p, sizeof number);
    return number;
}

// One half of a panel: its scales and, in 4 bits, minima.
struct Head {
    Vector scale, minimum;
    template <class Format> INLINE static Head of(const char *block, int half) {
        const Float16 *numbers = (const Float16 *)block + half * LANES;
        return {load(numbers), Format::HAS_MINIMUM ? load(numbers + PANEL) : Vector()};
    }
};

// sum + (dots * scale + minimum * the sum of x's numbers) * x's scale
template <class Format> INLINE Vector scaled(Vector sum, Vector dots, const Head &head, const char *correction, const char *x_scale) {
    Vector value = mul(dots, head.scale);
    if constexpr (Format::HAS_MINIMUM) value = add(value, mul(head.minimum, all(number_at<float>(correction))));
    return add(sum, mul(value, all(number_at<float>(x_scale))));
}

#if defined(__AVX512VNNI__)

// The compiler's own intrinsic (gcc 12) copies each sum to another register and to memory and back.
INLINE void accumulate(__m512i &sum, const __m512i &weights, const __m512i &value) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(value));
}

// Integer sums of a block and float sums of a panel for COUNT rows, each in registers of its own. (gcc 12 keeps an array of them in memory.)
template <class Format, int COUNT> struct Sums {
    Sums<Format, COUNT - 1> before;
    __m512i left, right;
    Vector y_left = all(0.0f), y_right = all(0.0f);
    INLINE void begin(const char *corrections) {
        before.begin(corrections);
        left = right = _mm512_set1_epi32(Format::HAS_MINIMUM ? 0 : number_at<int32_t>(corrections + 4 * (COUNT - 1)));
    }
    INLINE void step(const char *x, const __m512i &w_left, const __m512i &w_right) {
        before.step(x, w_left, w_right);
        const __m512i value = _mm512_set1_epi32(number_at<int32_t>(x + 4 * (COUNT - 1)));
        accumulate(left, w_left, value);
        accumulate(right, w_right, value);
    }
    INLINE void end(const char *corrections, const char *scales, const Head &head_left, const Head &head_right) {
        before.end(corrections, scales, head_left, head_right);
        const char *correction = corrections + 4 * (COUNT - 1), *scale = scales + 4 * (COUNT - 1);
        y_left = scaled<Format>(y_left, _mm512_cvtepi32_ps(left), head_left, correction, scale);
        y_right = scaled<Format>(y_right, _mm512_cvtepi32_ps(right), head_right, correction, scale);
    }
    INLINE void put(float (*sums)[PANEL]) const {
        before.put(sums);
        store(sums[COUNT - 1], y_left);
        store(sums[COUNT - 1] + LANES, y_right);
    }
};

template <class Format> struct Sums<Format, 0> {
    INLINE void begin(const char *) {}
    INLINE void step(const char *, const __m512i &, const __m512i &) {}
    INLINE void end(const char *, const char *, const Head &, const Head &) {}
    INLINE void put(float (*)[PANEL]) const {}
};

template <int COUNT> INLINE void pass_block(Sums<Int8, COUNT> &rows, const char *x, const char *weights, Ahead &ahead) {
    UNROLL for (int k = 0; k < STEPS; k++) {
        ahead.step();
        rows.step(x + k * 4 * COUNT, _mm512_loadu_si512(weights + k * 128), _mm512_loadu_si512(weights + k * 128 + 64));
    }
}

template <int COUNT> INLINE void pass_block(Sums<Int4, COUNT> &rows, const char *x, const char *weights, Ahead &ahead) {
    const __m512i low = _mm512_set1_epi8(15);
    UNROLL for (int k = 0; k < STEPS / 2; k++) {
        const __m512i left = _mm512_loadu_si512(weights + k * 128), right = _mm512_loadu_si512(weights + k * 128 + 64);
        ahead.step();
        rows.step(x + k * 4 * COUNT, _mm512_and_si512(left, low), _mm512_and_si512(right, low));
        const __m512i high_left = _mm512_srli_epi16(left, 4), high_right = _mm512_srli_epi16(right, 4);
        ahead.step();
        rows.step(x + (k + STEPS / 2) * 4 * COUNT, _mm512_and_si512(high_left, low), _mm512_and_si512(high_right, low));
    }
}

template <class Format, int COUNT>
__attribute__((noinline)) static void sum_panel(const char *x, const char *panel, int64_t num_blocks, Ahead ahead, float (*sums)[PANEL]) {
    Sums<Format, COUNT> rows;
    for (int64_t b = 0; b < num_blocks; b++, panel += Format::BYTES, x += X_BYTES * COUNT) {
        const char *corrections = x + BLOCK * COUNT, *scales = corrections + 4 * COUNT;
        rows.begin(corrections);
        pass_block(rows, x, panel + Format::HEAD, ahead);
        rows.end(corrections, scales, Head::of<Format>(panel, 0), Head::of<Format>(panel, 1));
    }
    rows.put(sums);
}

#else

// The integer sums of a block: dots[r][c] is begun by the caller.
template <int COUNT> static void add_dots(Int8, const char *x, const char *weights, int32_t (*dots)[PANEL]) {
#if defined(__AVX2__)
    // Pairs of products of bytes do not fit into 16 bits: they are widened first. Two lanes a column.
    __m256i parts[COUNT][4];
    UNROLL for (int i = 0; i < COUNT * 4; i++) parts[i / 4][i % 4] = _mm256_setzero_si256();
    for (int k = 0; k < STEPS; k++, weights += 4 * PANEL, x += 4 * COUNT) {
        __m256i wide[4];
        UNROLL for (int n = 0; n < 4; n++) wide[n] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(weights + n * 16)));
        UNROLL for (int r = 0; r < COUNT; r++) {
            const __m256i value = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(number_at<int32_t>(x + 4 * r))));
            UNROLL for (int n = 0; n < 4; n++) parts[r][n] = _mm256_add_epi32(parts[r][n], _mm256_madd_epi16(value, wide[n]));
        }
    }
    for (int i = 0; i < COUNT * 4; i++) {
        int32_t lanes[8];
        _mm256_storeu_si256((__m256i *)lanes, parts[i / 4][i % 4]);
        for (int c = 0; c < 4; c++) dots[i / 4][i % 4 * 4 + c] += lanes[2 * c] + lanes[2 * c + 1];
    }
#else
    for (int k = 0; k < STEPS; k++, weights += 4 * PANEL, x += 4 * COUNT)
        for (int r = 0; r < COUNT; r++)
            for (int c = 0; c < 4 * PANEL; c++) dots[r][c / 4] += uint8_t(weights[c]) * int8_t(x[4 * r + c % 4]);
#endif
}

template <int COUNT> static void add_dots(Int4, const char *x, const char *weights, int32_t (*dots)[PANEL]) {
#if defined(__AVX2__)
    // Sums of a whole block fit into 16 bits: 15 * 127 * BLOCK / 2.
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i parts[COUNT][2];
    UNROLL for (int i = 0; i < COUNT * 2; i++) parts[i / 2][i % 2] = _mm256_setzero_si256();
    for (int k = 0; k < STEPS; k++) {
        __m256i numbers[2];
        UNROLL for (int n = 0; n < 2; n++) {
            const __m256i both = _mm256_loadu_si256((const __m256i *)(weights + k % (STEPS / 2) * 4 * PANEL + n * 32));
            numbers[n] = _mm256_and_si256(k < STEPS / 2 ? both : _mm256_srli_epi16(both, 4), low);
        }
        UNROLL for (int r = 0; r < COUNT; r++) {
            const __m256i value = _mm256_set1_epi32(number_at<int32_t>(x + (k * COUNT + r) * 4));
            UNROLL for (int n = 0; n < 2; n++) parts[r][n] = _mm256_add_epi16(parts[r][n], _mm256_maddubs_epi16(numbers[n], value));
        }
    }
    for (int i = 0; i < COUNT * 2; i++) _mm256_storeu_si256((__m256i *)(dots[i / 2] + i % 2 * 8), _mm256_madd_epi16(parts[i / 2][i % 2], ones));
#else
    for (int k = 0; k < STEPS; k++)
        for (int r = 0; r < COUNT; r++)
            for (int c = 0; c < 4 * PANEL; c++) {
                const int both = uint8_t(weights[k % (STEPS / 2) * 4 * PANEL + c]);
                dots[r][c / 4] += (k < STEPS / 2 ? both & 15 : both >> 4) * int8_t(x[(k * COUNT + r) * 4 + c % 4]);
            }
#endif
}

template <class Format, int COUNT> static void sum_panel(const char *x, const char *panel, int64_t num_blocks, Ahead, float (*sums)[PANEL]) {
    memset(sums, 0, COUNT * sizeof sums[0]);
    for (int64_t b = 0; b < num_blocks; b++, panel += Format::BYTES, x += X_BYTES * COUNT) {
        const char *corrections = x + BLOCK * COUNT, *scales = corrections + 4 * COUNT;
        int32_t dots[COUNT][PANEL];
        for (int r = 0; r < COUNT; r++)
            std::fill_n(dots[r], PANEL, Format::HAS_MINIMUM ? 0 : number_at<int32_t>(corrections + 4 * r));
        add_dots<COUNT>(Format(), x, panel + Format::HEAD, dots);
        for (int half = 0; half < 2; half++) {
            const Head head = Head::of<Format>(panel, half);
            for (int r = 0; r < COUNT; r++) {
                float *sum = sums[r] + half * LANES;
                store(sum, scaled<Format>(load(sum), of_integers(dots[r] + half * LANES), head, corrections + 4 * r, scales + 4 * r));
            }
        }
    }
}

#endif

template <class Format, int COUNT>
static void tile(const Product &p, const char *x, const Panel &panel, int64_t num_blocks, int count, int64_t m, Ahead ahead) {
    if constexpr (COUNT > 0) {
        if (count < COUNT) return tile<Format, COUNT - 1>(p, x, panel, num_blocks, count, m, ahead);
        float sums[COUNT][PANEL];
        sum_panel<Format, COUNT>(x, panel.weights, num_blocks, ahead, sums);
        for (int r = 0; r < COUNT; r++) finish(p, panel, load(sums[r]), load(sums[r] + LANES), m + r);
    }
}

struct QuantizedBlock {
    int8_t numbers[BLOCK];
    int32_t sum;
    float scale;
};

// x = scale * number, symmetric around 0: the largest number is 127. If x is not finite, neither is the scale, and numbers are 0.
static inline QuantizedBlock quantize_block(const float *x) {
    QuantizedBlock block;
    uint32_t largest = 0, bits[BLOCK];
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < BLOCK; i++) largest = std::max(largest, bits[i] & 0x7fffffff);  // Sizes are ordered as their bits are.
    const bool is_finite = largest < 0x7f800000;
    block.scale = is_finite ? std::max(number_at<float>((const char *)&largest) / 127.0f, std::numeric_limits<float>::min())
                            : std::numeric_limits<float>::quiet_NaN();
    const float inverse = is_finite ? 1.0f / block.scale : 0.0f;
    // In this sum the lowest bits are x * inverse, rounded to the nearest integer, and of two the even one.
    float shifted[BLOCK];
    for (int i = 0; i < BLOCK; i++) shifted[i] = x[i] * inverse + 12582912.0f;
    memcpy(bits, shifted, sizeof bits);
    block.sum = 0;
    for (int i = 0; i < BLOCK; i++) block.sum += int32_t(bits[i] - 0x4b400000u);
    for (int i = 0; i < BLOCK; i++) block.numbers[i] = is_finite ? int8_t(bits[i]) : 0;
    if (!is_finite) block.sum = 0;
    return block;
}

// Row m of tile first .. first + count, to its place in it. `own` has room for a row of whole blocks.
template <class Format> static void prepare(const Product &p, int64_t m, int64_t first, int64_t count, int64_t num_blocks, float *own, char *tile) {
    const float *row = p.x + m * p.x_stride;
    if (p.norm.kind)
        normalise(row, own, p.inputs, p.norm);
    else if (p.inputs % BLOCK)
        memcpy(own, row, p.inputs * sizeof(float));
    if (p.inputs % BLOCK) std::fill(own + p.inputs, own + num_blocks * BLOCK, 0.0f);
    if (p.norm.kind || p.inputs % BLOCK) row = own;
    for (int64_t b = 0; b < num_blocks; b++, tile += X_BYTES * count) {
        const QuantizedBlock block = quantize_block(row + b * BLOCK);
        const typename Format::Correction correction = Format::correction(block.sum);
        char *to = tile + 4 * (m - first);
        for (int k = 0; k < STEPS; k++, to += 4 * count) memcpy(to, block.numbers + 4 * k, 4);
        memcpy(to, &correction, 4);
        memcpy(to + 4 * count, &block.scale, 4);
    }
}

template <class Format> static void block_product(const Product &p, int64_t num_threads) {
    static thread_local Scratch tile_memory, row_memory;
    const int64_t num_blocks = (p.inputs + BLOCK - 1) / BLOCK, panel_bytes = num_blocks * Format::BYTES, row_bytes = num_blocks * X_BYTES;
    const int64_t num_panels = (p.outputs + PANEL - 1) / PANEL, num_tiles = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    char *tiles = tile_memory.of<char>(p.rows * row_bytes);
    float *floats = row_memory.of<float>(num_threads * num_blocks * BLOCK);
#pragma omp parallel num_threads(num_threads)
    {
        float *own = floats + omp_get_thread_num() * num_blocks * BLOCK;
#pragma omp for schedule(static)
        for (int64_t m = 0; m < p.rows; m++) {
            const TileSpan span = tile_of_row(p.rows, num_tiles, m);
            prepare<Format>(p, m, span.first, span.count, num_blocks, own, tiles + span.first * row_bytes);
        }
#pragma omp for schedule(dynamic, panel_share(num_panels, num_threads))
        for (int64_t n = 0; n < num_panels; n++) {
            const Panel panel = panel_at(p, n, panel_bytes);
            const char *next = panel.weights + (n + 1 == num_panels ? 0 : panel_bytes);
            for (int64_t i = 0; i < num_tiles; i++) {
                const int64_t m = first_row(p.rows, num_tiles, i);
                const Ahead ahead = {next + i * panel_bytes / num_tiles, Format::BYTES / STEPS / num_tiles};
                tile<Format, BLOCK_ROWS>(p, tiles + m * row_bytes, panel, num_blocks, int(first_row(p.rows, num_tiles, i + 1) - m), m, ahead);
            }
        }
    }
}

extern "C" void product_int8(const Product *product, int64_t num_threads) {
    if (product->rows) block_product<Int8>(*product, num_threads);
}

extern "C" void product_int4(const Product *product, int64_t num_threads) {
    if (product->rows) block_product<Int4>(*product, num_threads);
}

// Where the bytes of a row's block lie in its panel. Rows outside hold for each block a scale, in 4 bits a minimum, and the numbers in order.
template <class Format> static char *block_of(void *packed, int64_t row, int64_t b, int64_t num_blocks) {
    return (char *)packed + ((row / PANEL) * num_blocks + b) * Format::BYTES;
}

template <class Format> static void pack(void *packed, const char *rows, int64_t first, int64_t count, int64_t num_blocks) {
    constexpr int NUMBERS = Format::HAS_MINIMUM ? 4 : 2;  // Bytes before the numbers.
    constexpr char FLIPPED = Format::HAS_MINIMUM ? 0 : char(-128);
    const int64_t last = first + count, num_panels = (last - 1) / PANEL - first / PANEL + 1;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < num_panels; n++) {
        const int64_t begin = std::max(first, (first / PANEL + n) * PANEL), end = std::min(last, (first / PANEL + n + 1) * PANEL);
        for (int64_t b = 0; b < num_blocks; b++)
            for (int64_t row = begin; row < end; row++) {
                const char *from = rows + ((row - first) * num_blocks + b) * Format::ROW_BYTES;
                char *to = block_of<Format>(packed, row, b, num_blocks) + row % PANEL * 2;
                for (int i = 0; i < NUMBERS / 2; i++) memcpy(to + i * 2 * PANEL, from + 2 * i, 2);
                to += Format::HEAD + row % PANEL * 2;
                for (int k = 0; k < Format::ROW_BYTES - NUMBERS; k++) to[k / 4 * 4 * PANEL + k % 4] = from[NUMBERS + k] ^ FLIPPED;
            }
    }
}

template <class Format> static void take(void *packed, const int64_t *rows, float *out, int64_t count, int64_t inputs) {
    const int64_t num_blocks = (inputs + BLOCK - 1) / BLOCK;
    for (int64_t i = 0; i < count; i++)
        for (int64_t b = 0; b < num_blocks; b++) {
            const char *block = block_of<Format>(packed, rows[i], b, num_blocks), *head = block + rows[i] % PANEL * 2;
            const char *numbers = block + Format::HEAD + rows[i] % PANEL * 4;
            const float scale = widened(number_at<Float16>(head)), minimum = Format::HAS_MINIMUM ? widened(number_at<Float16>(head + 2 * PANEL)) : 0;
            for (int k = 0; k < std::min<int64_t>(BLOCK, inputs - b * BLOCK); k++) {
                const int j = Format::HAS_MINIMUM ? k % (BLOCK / 2) : k, byte = uint8_t(numbers[j / 4 * 4 * PANEL + j % 4]);
                const int number = !Format::HAS_MINIMUM ? byte - 128 : k < BLOCK / 2 ? byte & 15 : byte >> 4;
                out[i * inputs + b * BLOCK + k] = float(number) * scale + minimum;
            }
        }
}

extern "C" {
void pack_int8(void *packed, const char *rows, int64_t first, int64_t count, int64_t num_blocks) { pack<Int8>(packed, rows, first, count, num_blocks); }
void pack_int4(void *packed, const char *rows, int64_t first, int64_t count, int64_t num_blocks) { pack<Int4>(packed, rows, first, count, num_blocks); }
void take_int8(void *packed, const int64_t *rows, float *out, int64_t count, int64_t inputs) { take<Int8>(packed, rows, out, count, inputs); }
void take_int4(void *packed, const int64_t *rows, float *out, int64_t count, int64_t inputs) { take<Int4>(packed, rows, out, count, inputs); }
}
