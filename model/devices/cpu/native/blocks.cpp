// Products with weights quantized in blocks of BLOCK inputs: y = f(norm(x) W^T + b). model/devices/blocks.py defines the arithmetic.
//
// W [N, K] lies in panels of PANEL output columns. A panel has for each block the columns' scales (and, in 4 bits, their minima) in float16,
// then the numbers: [BLOCK / GROUP, PANEL, GROUP] bytes in 8 bits; in 4 bits half as many, where byte j of a column holds inputs j and
// j + BLOCK / 2. So each thread reads one stream. Rows of x are quantized when they arrive.
//
// Invariant: sums within a block are integers and exact, and blocks are added in order of k, without fused operations; so an element of y
// depends on its row and column alone.
//
// Letters: M rows, K input and N output columns, k an input, b a block. The last panel is filled up with scales of zero, x with zeros.

#include "product.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int ARM_GROUP = 8;  // smmla takes 8 of each of two rows.
#else
constexpr int ARM_GROUP = 4;
#endif

// GROUP: how many numbers of a column lie side by side, and are multiplied and added up by one instruction. It takes as many of x, STEPS times,
// each time UNIT bytes of a row. In 8 bits numbers are stored plus OFFSET, and sums begin at a correction that depends on x alone.
struct Int8 {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    static constexpr int GROUP = 4, OFFSET = 128;  // vpdpbusd takes weights without a sign.
    using Number = int8_t;                         // Of x.
#elif defined(__aarch64__)
    static constexpr int GROUP = ARM_GROUP, OFFSET = 0;
    using Number = int8_t;
#else
    static constexpr int GROUP = 2, OFFSET = 0;  // Pairs of products of bytes do not fit into 16 bits: both are widened to 16 first.
    using Number = int16_t;
#endif
    static constexpr int HEAD = 2 * PANEL, BYTES = HEAD + BLOCK * PANEL, ROW_BYTES = 2 + BLOCK;
    static constexpr int TILE = BLOCK_ROWS;
    static constexpr bool HAS_MINIMUM = false;
    using Correction = int32_t;
    static Correction correction(int32_t sum) { return -OFFSET * sum; }
};

struct Int4 {
#if defined(__AVX2__)
    static constexpr int GROUP = 4, OFFSET = 0;
    using Number = int8_t;
#elif defined(__aarch64__)
    static constexpr int GROUP = ARM_GROUP, OFFSET = 0;
    using Number = int8_t;
#else
    static constexpr int GROUP = 2, OFFSET = 0;
    using Number = int16_t;
#endif
    static constexpr int HEAD = 4 * PANEL, BYTES = HEAD + BLOCK / 2 * PANEL, ROW_BYTES = 4 + BLOCK / 2;
    static constexpr int TILE = BLOCK_ROWS;
    static constexpr bool HAS_MINIMUM = true;
    using Correction = float;
    static Correction correction(int32_t sum) { return float(sum); }
};

template <class Format> constexpr int STEPS = BLOCK / Format::GROUP;
template <class Format> constexpr int UNIT = Format::GROUP * int(sizeof(typename Format::Number));
// Of a row's block: [STEPS, UNIT] bytes, the correction and the scale. In a tile each of these is there for one row after the other.
template <class Format> constexpr int64_t X_BYTES = UNIT<Format> * STEPS<Format> + 8;

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

#if defined(__AVX2__)
#define SUMS_IN_REGISTERS
#if defined(__AVX512F__)
using Integers = __m512i;
INLINE Integers repeated(const char *x) { return _mm512_set1_epi32(number_at<int32_t>(x)); }
INLINE Integers bytes_at(const char *weights) { return _mm512_loadu_si512(weights); }
INLINE Integers low(Integers both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
INLINE Integers high(Integers both) { return low(_mm512_srli_epi16(both, 4)); }
INLINE Integers widened_at(const char *weights) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)weights)); }
INLINE Integers pairs(Integers sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
INLINE Vector of_sums(Integers sum) { return _mm512_cvtepi32_ps(sum); }
#else
using Integers = __m256i;
INLINE Integers repeated(const char *x) { return _mm256_set1_epi32(number_at<int32_t>(x)); }
INLINE Integers bytes_at(const char *weights) { return _mm256_loadu_si256((const __m256i *)weights); }
INLINE Integers low(Integers both) { return _mm256_and_si256(both, _mm256_set1_epi8(15)); }
INLINE Integers high(Integers both) { return low(_mm256_srli_epi16(both, 4)); }
INLINE Integers widened_at(const char *weights) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)weights)); }
INLINE Integers pairs(Integers sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
INLINE Vector of_sums(Integers sum) { return _mm256_cvtepi32_ps(sum); }
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
INLINE Integers numbers_at(const char *weights) { return bytes_at(weights); }
// The compiler's own intrinsic (gcc 12) copies each sum to another register and to memory and back.
template <class Format> INLINE void accumulate(Integers &sum, const Integers &weights, const Integers &value) {
#if defined(__AVX512VNNI__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(value));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(value));
#endif
}
template <class Format> INLINE Vector floats(Integers sum) { return of_sums(sum); }
#else
INLINE Integers numbers_at(const char *weights) { return widened_at(weights); }
// In 4 bits sums of a whole block fit into 16 bits: 15 * 127 * BLOCK / 2. They are added in pairs when it ends.
template <class Format> INLINE void accumulate(Integers &sum, const Integers &weights, const Integers &value) {
    Integers products;
    if constexpr (Format::GROUP == 4)
        asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(weights), "v"(value));
    else
        asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+v"(sum), "=&v"(products) : "v"(weights), "v"(value));
}
template <class Format> INLINE Vector floats(Integers sum) { return of_sums(Format::GROUP == 4 ? pairs(sum) : sum); }
#endif
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define SUMS_IN_REGISTERS
// Of LANES columns: 8 numbers of each, or the sums of two rows; columns 0 and 1 in one register, 2 and 3 in the other.
struct Integers {
    int32x4_t first, last;
};
INLINE Integers numbers_at(const char *weights) { return {vld1q_s32((const int32_t *)weights), vld1q_s32((const int32_t *)(weights + 16))}; }
INLINE Integers bytes_at(const char *weights) { return numbers_at(weights); }
INLINE Integers low(Integers both) {
    const int32x4_t ones = vreinterpretq_s32_s8(vdupq_n_s8(15));
    return {vandq_s32(both.first, ones), vandq_s32(both.last, ones)};
}
INLINE int32x4_t upper(int32x4_t both) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(both), 4)); }
INLINE Integers high(Integers both) { return {upper(both.first), upper(both.last)}; }
INLINE void accumulate(Integers &sum, const Integers &weights, int8x16_t rows) {
    sum.first = vmmlaq_s32(sum.first, rows, vreinterpretq_s8_s32(weights.first));
    sum.last = vmmlaq_s32(sum.last, rows, vreinterpretq_s8_s32(weights.last));
}
// Of the first or the second of two rows.
INLINE Vector floats(const Integers &sum, int row) {
    const int64x2_t first = vreinterpretq_s64_s32(sum.first), last = vreinterpretq_s64_s32(sum.last);
    return vcvtq_f32_s32(vreinterpretq_s32_s64(row ? vtrn2q_s64(first, last) : vtrn1q_s64(first, last)));
}

// Integer sums of a block and float sums of a panel for COUNT rows, two together; the last one is by itself where COUNT is odd.
template <class Format, int COUNT> struct Sums {
    static constexpr int ROWS = 2 - COUNT % 2, FIRST = COUNT - ROWS;
    Sums<Format, FIRST> before;
    Integers left, right;
    Vector y_left[ROWS], y_right[ROWS];
    INLINE Sums() { UNROLL for (int r = 0; r < ROWS; r++) y_left[r] = y_right[r] = all(0.0f); }
    INLINE void begin(const char *corrections) {
        before.begin(corrections);
        left = right = {vdupq_n_s32(0), vdupq_n_s32(0)};
    }
    INLINE void step(const char *x, const Integers &w_left, const Integers &w_right) {
        before.step(x, w_left, w_right);
        const int8_t *own = (const int8_t *)x + UNIT<Format> * FIRST;
        const int8x16_t rows = ROWS == 2 ? vld1q_s8(own) : vcombine_s8(vld1_s8(own), vdup_n_s8(0));
        accumulate(left, w_left, rows);
        accumulate(right, w_right, rows);
    }
    INLINE void end(const char *corrections, const char *scales, const Head &head_left, const Head &head_right) {
        before.end(corrections, scales, head_left, head_right);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const char *correction = corrections + 4 * (FIRST + r), *scale = scales + 4 * (FIRST + r);
            y_left[r] = scaled<Format>(y_left[r], floats(left, r), head_left, correction, scale);
            y_right[r] = scaled<Format>(y_right[r], floats(right, r), head_right, correction, scale);
        }
    }
    INLINE void put(float (*sums)[PANEL]) const {
        before.put(sums);
        UNROLL for (int r = 0; r < ROWS; r++) {
            store(sums[FIRST + r], y_left[r]);
            store(sums[FIRST + r] + LANES, y_right[r]);
        }
    }
};
#elif defined(__aarch64__)
#define SUMS_IN_REGISTERS
using Integers = int32x4_t;
INLINE Integers repeated(const char *x) { return vdupq_n_s32(number_at<int32_t>(x)); }
INLINE Integers numbers_at(const char *weights) { return vld1q_s32((const int32_t *)weights); }
INLINE Integers bytes_at(const char *weights) { return vld1q_s32((const int32_t *)weights); }
INLINE Integers low(Integers both) { return vandq_s32(both, vreinterpretq_s32_s8(vdupq_n_s8(15))); }
INLINE Integers high(Integers both) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(both), 4)); }
template <class Format> INLINE void accumulate(Integers &sum, const Integers &weights, const Integers &value) {
    const int8x16_t w = vreinterpretq_s8_s32(weights), x = vreinterpretq_s8_s32(value);
#if defined(__ARM_FEATURE_DOTPROD)
    sum = vdotq_s32(sum, w, x);
#else
    // Two products of bytes fit into 16 bits together: x is at least -127.
    sum = vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x)));
#endif
}
template <class Format> INLINE Vector floats(Integers sum) { return vcvtq_f32_s32(sum); }
#endif

#ifdef SUMS_IN_REGISTERS

#ifndef __ARM_FEATURE_MATMUL_INT8
// Integer sums of a block and float sums of a panel for COUNT rows, each in registers of its own. (gcc 12 keeps an array of them in memory.)
template <class Format, int COUNT> struct Sums {
    Sums<Format, COUNT - 1> before;
    Integers left, right;
    Vector y_left = all(0.0f), y_right = all(0.0f);
    INLINE void begin(const char *corrections) {
        before.begin(corrections);
        left = right = Format::OFFSET ? repeated(corrections + 4 * (COUNT - 1)) : Integers();
    }
    INLINE void step(const char *x, const Integers &w_left, const Integers &w_right) {
        before.step(x, w_left, w_right);
        const Integers value = repeated(x + 4 * (COUNT - 1));
        accumulate<Format>(left, w_left, value);
        accumulate<Format>(right, w_right, value);
    }
    INLINE void end(const char *corrections, const char *scales, const Head &head_left, const Head &head_right) {
        before.end(corrections, scales, head_left, head_right);
        const char *correction = corrections + 4 * (COUNT - 1), *scale = scales + 4 * (COUNT - 1);
        y_left = scaled<Format>(y_left, floats<Format>(left), head_left, correction, scale);
        y_right = scaled<Format>(y_right, floats<Format>(right), head_right, correction, scale);
    }
    INLINE void put(float (*sums)[PANEL]) const {
        before.put(sums);
        store(sums[COUNT - 1], y_left);
        store(sums[COUNT - 1] + LANES, y_right);
    }
};

#endif

template <class Format> struct Sums<Format, 0> {
    INLINE void begin(const char *) {}
    INLINE void step(const char *, const Integers &, const Integers &) {}
    INLINE void end(const char *, const char *, const Head &, const Head &) {}
    INLINE void put(float (*)[PANEL]) const {}
};

template <int COUNT> INLINE void pass_block(Sums<Int8, COUNT> &rows, const char *x, const char *weights, Ahead &ahead) {
    ahead.last_line(BLOCK / 4);
    UNROLL for (int k = 0; k < STEPS<Int8>; k++, x += UNIT<Int8> * COUNT, weights += Int8::GROUP * PANEL) {
        if (k * Int8::GROUP % 4 == 0) ahead.step();
        if (Int8::GROUP == 8) ahead.step();
        rows.step(x, numbers_at(weights), numbers_at(weights + Int8::GROUP * LANES));
    }
}

template <int COUNT> INLINE void pass_block(Sums<Int4, COUNT> &rows, const char *x, const char *weights, Ahead &ahead) {
    UNROLL for (int k = 0; k < STEPS<Int4> / 2; k++, x += UNIT<Int4> * COUNT, weights += Int4::GROUP * PANEL) {
        const Integers left = bytes_at(weights), right = bytes_at(weights + Int4::GROUP * LANES);
        UNROLL for (int i = 0; i < Int4::GROUP / 4; i++) ahead.step();
        rows.step(x, low(left), low(right));
        UNROLL for (int i = 0; i < Int4::GROUP / 4; i++) ahead.step();
        rows.step(x + STEPS<Int4> / 2 * UNIT<Int4> * COUNT, high(left), high(right));
    }
}

template <class Format, int COUNT>
__attribute__((noinline)) static void sum_panel(const char *x, const char *panel, int64_t num_blocks, Ahead ahead, float (*sums)[PANEL]) {
    Sums<Format, COUNT> rows;
    for (int64_t b = 0; b < num_blocks; b++, panel += Format::BYTES, x += X_BYTES<Format> * COUNT) {
        const char *corrections = x + UNIT<Format> * STEPS<Format> * COUNT, *scales = corrections + 4 * COUNT;
        rows.begin(corrections);
        pass_block(rows, x, panel + Format::HEAD, ahead);
        rows.end(corrections, scales, Head::of<Format>(panel, 0), Head::of<Format>(panel, 1));
    }
    rows.put(sums);
}

#else

// The integer sums of a block.
template <class Format, int COUNT> static void add_dots(const char *x, const char *weights, int32_t (*dots)[PANEL]) {
    constexpr int HALF = Format::HAS_MINIMUM ? STEPS<Format> / 2 : STEPS<Format>;
    for (int k = 0; k < STEPS<Format>; k++) {
        int16_t numbers[2 * PANEL];
        for (int i = 0; i < 2 * PANEL; i++) {
            const int8_t byte = weights[k % HALF * 2 * PANEL + i];
            numbers[i] = !Format::HAS_MINIMUM ? byte : k < HALF ? byte & 15 : uint8_t(byte) >> 4;
        }
        for (int r = 0; r < COUNT; r++, x += 4) {
            const int first = number_at<int16_t>(x), second = number_at<int16_t>(x + 2);
            for (int c = 0; c < PANEL; c++) dots[r][c] += numbers[2 * c] * first + numbers[2 * c + 1] * second;
        }
    }
}

template <class Format, int COUNT> static void sum_panel(const char *x, const char *panel, int64_t num_blocks, Ahead, float (*sums)[PANEL]) {
    memset(sums, 0, COUNT * sizeof sums[0]);
    for (int64_t b = 0; b < num_blocks; b++, panel += Format::BYTES, x += X_BYTES<Format> * COUNT) {
        const char *corrections = x + UNIT<Format> * STEPS<Format> * COUNT, *scales = corrections + 4 * COUNT;
        int32_t dots[COUNT][PANEL] = {};
        add_dots<Format, COUNT>(x, panel + Format::HEAD, dots);
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

template <class Number> struct QuantizedBlock {
    Number numbers[BLOCK];
    int32_t sum;
    float scale;
};

// x = scale * number, symmetric around 0: the largest number is 127. If x is not finite, neither is the scale, and numbers are 0.
template <class Number> static inline QuantizedBlock<Number> quantize_block(const float *x) {
    QuantizedBlock<Number> block;
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
    for (int i = 0; i < BLOCK; i++) block.numbers[i] = is_finite ? Number(bits[i]) : 0;
    if (!is_finite) block.sum = 0;
    return block;
}

static int64_t num_blocks(const Product &p) { return (p.inputs + BLOCK - 1) / BLOCK; }

template <class Format> static int64_t row_bytes(const Product &p) { return num_blocks(p) * X_BYTES<Format>; }

template <class Format> static int64_t num_tiles(const Product &p) { return (p.rows + Format::TILE - 1) / Format::TILE; }

// Rows begin .. end, each to its place in its tile.
template <class Format> static void prepare(const Product &p, char *tiles, int64_t begin, int64_t end) {
    static thread_local Scratch memory;
    const int64_t whole = num_blocks(p) * BLOCK;
    const bool copies = p.norm.kind || p.inputs != whole;
    float *own = copies ? memory.of<float>(whole) : nullptr;
    for (int64_t m = begin; m < end; m++) {
        const TileSpan span = tile_of_row(p.rows, num_tiles<Format>(p), m);
        char *tile = tiles + span.first * row_bytes<Format>(p);
        const float *row = p.x + m * p.x_stride;
        if (copies) {
            if (p.norm.kind)
                normalise(row, own, p.inputs, p.norm);
            else
                memcpy(own, row, p.inputs * sizeof(float));
            std::fill(own + p.inputs, own + whole, 0.0f);
            row = own;
        }
        for (int64_t k = 0; k < whole; k += BLOCK, tile += X_BYTES<Format> * span.count) {
            const QuantizedBlock<typename Format::Number> block = quantize_block<typename Format::Number>(row + k);
            const typename Format::Correction correction = Format::correction(block.sum);
            constexpr int unit = UNIT<Format>;
            const int64_t row = m - span.first;
            for (int i = 0; i < STEPS<Format>; i++) memcpy(tile + (i * span.count + row) * unit, block.numbers + Format::GROUP * i, unit);
            char *rest = tile + STEPS<Format> * span.count * unit + 4 * row;
            memcpy(rest, &correction, 4);
            memcpy(rest + 4 * span.count, &block.scale, 4);
        }
    }
}

template <class Format> static void panels(const Product &p, const char *tiles, int64_t begin, int64_t end) {
    const int64_t bytes = num_blocks(p) * Format::BYTES, count = num_tiles<Format>(p);
    for (int64_t n = begin; n < end; n++) {
        const Panel panel = panel_at(p, n, bytes);
        const char *next = panel.weights + (n + 1 == end ? 0 : bytes);
        for (int64_t i = 0; i < count; i++) {
            const int64_t m = first_row(p.rows, count, i);
            const Ahead ahead = ahead_of(panel, p.rows, i, count, next, bytes, Format::BYTES, BLOCK / 4);
            const int rows = int(first_row(p.rows, count, i + 1) - m);
            tile<Format, Format::TILE>(p, tiles + m * row_bytes<Format>(p), panel, num_blocks(p), rows, m, ahead);
        }
    }
}

const ProductKernel INT8_KERNEL = {row_bytes<Int8>, prepare<Int8>, panels<Int8>};
const ProductKernel INT4_KERNEL = {row_bytes<Int4>, prepare<Int4>, panels<Int4>};

// Where the bytes of a row's block lie in its panel. Rows outside hold for each block a scale, in 4 bits a minimum, and the numbers in order.
template <class Format> static char *block_of(void *packed, int64_t row, int64_t b, int64_t num_blocks) {
    return (char *)packed + ((row / PANEL) * num_blocks + b) * Format::BYTES;
}

// Byte j of a column's numbers.
template <class Format, class Byte> static Byte *place(Byte *numbers, int j) { return numbers + j / Format::GROUP * Format::GROUP * PANEL + j % Format::GROUP; }

template <class Format> static void pack(void *packed, const char *rows, int64_t first, int64_t count, int64_t num_blocks) {
    constexpr int NUMBERS = Format::HAS_MINIMUM ? 4 : 2;  // Bytes before the numbers.
    const int64_t last = first + count, num_panels = (last - 1) / PANEL - first / PANEL + 1;
    for (int64_t n = 0; n < num_panels; n++) {
        const int64_t begin = std::max(first, (first / PANEL + n) * PANEL), end = std::min(last, (first / PANEL + n + 1) * PANEL);
        for (int64_t b = 0; b < num_blocks; b++)
            for (int64_t row = begin; row < end; row++) {
                const char *from = rows + ((row - first) * num_blocks + b) * Format::ROW_BYTES;
                char *to = block_of<Format>(packed, row, b, num_blocks) + row % PANEL * 2;
                for (int i = 0; i < NUMBERS / 2; i++) memcpy(to + i * 2 * PANEL, from + 2 * i, 2);
                to += Format::HEAD + row % PANEL * (Format::GROUP - 2);
                for (int k = 0; k < Format::ROW_BYTES - NUMBERS; k++) *place<Format>(to, k) = char(from[NUMBERS + k] + Format::OFFSET);
            }
    }
}

template <class Format> static void take(void *packed, const int64_t *rows, float *out, int64_t count, int64_t inputs) {
    const int64_t num_blocks = (inputs + BLOCK - 1) / BLOCK;
    for (int64_t i = 0; i < count; i++)
        for (int64_t b = 0; b < num_blocks; b++) {
            const char *block = block_of<Format>(packed, rows[i], b, num_blocks), *head = block + rows[i] % PANEL * 2;
            const char *numbers = block + Format::HEAD + rows[i] % PANEL * Format::GROUP;
            const float scale = widened(number_at<Float16>(head)), minimum = Format::HAS_MINIMUM ? widened(number_at<Float16>(head + 2 * PANEL)) : 0;
            for (int k = 0; k < std::min<int64_t>(BLOCK, inputs - b * BLOCK); k++) {
                const int j = Format::HAS_MINIMUM ? k % (BLOCK / 2) : k, byte = uint8_t(*place<Format>(numbers, j));
                const int number = !Format::HAS_MINIMUM ? int8_t(byte - Format::OFFSET) : k < BLOCK / 2 ? byte & 15 : byte >> 4;
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
