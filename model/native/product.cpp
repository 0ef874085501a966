// Products with weights that were packed once: y = f(norm(x) W^T + b), in float32 and in int8 (model/quantization.py has the arithmetic).
//
// W [N, K] lies in panels of PANEL output columns: [N / PANEL, K, PANEL] floats, [N / PANEL, K / 4, PANEL, 4] bytes; so each thread reads one
// stream. Invariant: an element of y is one sum over k in order, however many rows there are and whichever thread has it.
//
// Letters: M rows, K input and N output columns. The last panel is filled up with zeros, and so are the last bytes of K.

#include <omp.h>

#include "rows.h"

constexpr int PANEL = 2 * LANES, ROWS = LANES == 16 ? 14 : LANES == 8 ? 6 : 3;
constexpr int BYTE_ROWS = LANES == 16 ? 14 : 2;
constexpr int FEW_ROWS = 4, APART = 16;

extern "C" int64_t panel() { return PANEL; }

// Of the structs that come from Python, as model/native/__init__.py has it: raised with every change of either.
extern "C" int64_t interface() { return 4; }

struct Product {
    const float *x;
    float *y;
    int64_t x_stride, rows;
    const void *weights;
    const float *bias;  // Or null.
    int64_t inputs, outputs, activation;
    const float *scales;      // Of the output columns; null in float32.
    const int32_t *row_sums;  // Of the quantized weights.
    Norm norm;
};

// The rows as the sums take them: normalised, and in int8 quantized. They lie a little apart: at distances that are multiples of a page of
// memory, the rows of a tile would have the same places in the nearest cache.
struct Prepared {
    const float *floats;
    const uint8_t *bytes;
    const Quantized *quantized;
    int64_t stride;
};

// What all tiles of a panel share.
struct Panel {
    const char *weights;
    float bias[PANEL], scales[PANEL];
    int32_t row_sums[PANEL];
    int64_t column, columns;
};

static Panel panel_at(const Product &p, int64_t number, int64_t bytes) {
    Panel panel = {};
    panel.weights = (const char *)p.weights + number * bytes;
    panel.column = number * PANEL;
    panel.columns = std::min<int64_t>(PANEL, p.outputs - panel.column);
    if (p.bias) memcpy(panel.bias, p.bias + panel.column, panel.columns * sizeof(float));
    if (p.scales) {
        memcpy(panel.scales, p.scales + panel.column, panel.columns * sizeof(float));
        memcpy(panel.row_sums, p.row_sums + panel.column, panel.columns * sizeof(int32_t));
    }
    return panel;
}

// One row's PANEL columns: bias, activation, and as many of them as there are.
static inline void finish(const Product &p, const Panel &panel, Vector left, Vector right, int64_t row) {
    float *y = p.y + row * p.outputs + panel.column;
    if (p.bias) left = add(left, load(panel.bias)), right = add(right, load(panel.bias + LANES));
    if (p.activation) left = activated(left, int(p.activation)), right = activated(right, int(p.activation));
    store_some(y, left, panel.columns);
    if (panel.columns > LANES) store_some(y + LANES, right, panel.columns - LANES);
}

// Asks for a part of the next panel with every step over k, so that it is near when its turn comes.
struct Ahead {
    const char *next;
    int64_t stride;
    void step() {
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + 64, 0, 2);
        next += stride;
    }
};

template <int COUNT> static void float_rows(const Product &p, const Prepared &x, const Panel &panel, int64_t m, Ahead ahead) {
    Vector left[COUNT], right[COUNT];
    UNROLL for (int r = 0; r < COUNT; r++) left[r] = right[r] = all(0.0f);
    const float *row = x.floats + m * x.stride, *weights = (const float *)panel.weights;
    for (int64_t k = 0; k < p.inputs; k++, weights += PANEL) {
        const Vector w_left = load(weights), w_right = load(weights + LANES);
        ahead.step();
        UNROLL for (int r = 0; r < COUNT; r++) {
            const Vector value = all(row[r * x.stride + k]);
            left[r] = fma(value, w_left, left[r]);
            right[r] = fma(value, w_right, right[r]);
        }
    }
    UNROLL for (int r = 0; r < COUNT; r++) finish(p, panel, left[r], right[r], m + r);
}

// sums[r][c] over k of x W, in integers: exact.
template <int COUNT>
static void byte_sums(const uint8_t *x, int64_t stride, int64_t inputs, const int8_t *panel, Ahead ahead, int32_t (*sums)[PANEL]) {
#if defined(__AVX512VNNI__)
    __m512i left[COUNT], right[COUNT];
    UNROLL for (int r = 0; r < COUNT; r++) left[r] = right[r] = _mm512_setzero_si512();
    for (int64_t k = 0; k < inputs; k += 4, panel += 4 * PANEL) {
        const __m512i w_left = _mm512_loadu_si512(panel), w_right = _mm512_loadu_si512(panel + 64);
        ahead.step();
        UNROLL for (int r = 0; r < COUNT; r++) {
            int32_t four;
            memcpy(&four, x + r * stride + k, 4);
            const __m512i value = _mm512_set1_epi32(four);
            // The compiler's own intrinsic (gcc 12) copies each sum to another register and to memory and back.
            asm("vpdpbusd %2, %1, %0" : "+v"(left[r]) : "v"(value), "v"(w_left));
            asm("vpdpbusd %2, %1, %0" : "+v"(right[r]) : "v"(value), "v"(w_right));
        }
    }
    UNROLL for (int r = 0; r < COUNT; r++) {
        _mm512_storeu_si512(sums[r], left[r]);
        _mm512_storeu_si512(sums[r] + 16, right[r]);
    }
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // Products of bytes with signed bytes do not fit into 16 bits in pairs: they are widened first. Two lanes a column.
    __m256i parts[COUNT][4];
    UNROLL for (int i = 0; i < COUNT * 4; i++) parts[i / 4][i % 4] = _mm256_setzero_si256();
    for (int64_t k = 0; k < inputs; k += 4, panel += 4 * PANEL) {
        __m256i weights[4];
        UNROLL for (int n = 0; n < 4; n++) weights[n] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(panel + n * 16)));
        ahead.step();
        UNROLL for (int r = 0; r < COUNT; r++) {
            int32_t four;
            memcpy(&four, x + r * stride + k, 4);
            __m256i value = _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(four)));
            UNROLL for (int n = 0; n < 4; n++) parts[r][n] = _mm256_add_epi32(parts[r][n], _mm256_madd_epi16(value, weights[n]));
        }
    }
    for (int i = 0; i < COUNT * 4; i++) {
        int32_t lanes[8];
        _mm256_storeu_si256((__m256i *)lanes, parts[i / 4][i % 4]);
        for (int c = 0; c < 4; c++) sums[i / 4][i % 4 * 4 + c] = lanes[2 * c] + lanes[2 * c + 1];
    }
#else
    for (int r = 0; r < COUNT; r++) {
        memset(sums[r], 0, sizeof sums[r]);
        for (int64_t k = 0; k < inputs; k++)
            for (int c = 0; c < PANEL; c++) sums[r][c] += x[r * stride + k] * panel[(k & ~3) * PANEL + c * 4 + (k & 3)];
    }
#endif
}

template <int COUNT> static void byte_rows(const Product &p, const Prepared &x, const Panel &panel, int64_t m, Ahead ahead) {
    int32_t sums[COUNT][PANEL];
    byte_sums<COUNT>(x.bytes + m * x.stride, x.stride, (p.inputs + 3) / 4 * 4, (const int8_t *)panel.weights, ahead, sums);
    for (int r = 0; r < COUNT; r++) {
        const Quantized &row = x.quantized[m + r];
        for (int c = 0; c < PANEL; c++) sums[r][c] -= row.zero * panel.row_sums[c];
        Vector left = mul(mul(of_integers(sums[r]), all(row.scale)), load(panel.scales));
        Vector right = mul(mul(of_integers(sums[r] + LANES), all(row.scale)), load(panel.scales + LANES));
        finish(p, panel, left, right, m + r);
    }
}

template <int COUNT> static void tile(const Product &p, const Prepared &x, const Panel &panel, int count, int64_t m, Ahead ahead) {
    if constexpr (COUNT > 0) {
        if (count < COUNT)
            tile<COUNT - 1>(p, x, panel, count, m, ahead);
        else if (!p.scales)
            float_rows<COUNT>(p, x, panel, m, ahead);
        else if constexpr (COUNT <= BYTE_ROWS)
            byte_rows<COUNT>(p, x, panel, m, ahead);
    }
}

// All rows of a panel, in tiles of nearly equal size.
static void pass_panel(const Product &p, const Prepared &x, const Panel &panel, int64_t bytes, bool is_last) {
    const int most = p.scales ? BYTE_ROWS : ROWS;
    const int64_t num_tiles = (p.rows + most - 1) / most;
    Ahead ahead = {panel.weights + (is_last ? 0 : bytes), 128 / num_tiles};
    for (int64_t i = 0, m = 0; i < num_tiles; i++) {
        const int count = int((p.rows - m + num_tiles - i - 1) / (num_tiles - i));
        tile<ROWS>(p, x, panel, count, m, ahead);
        ahead.next += bytes / num_tiles;
        m += count;
    }
}

extern "C" void product(const Product *product, int64_t num_threads) {
    static thread_local Scratch floats, bytes, quantized;
    const Product &p = *product;
    if (!p.rows) return;
    const int64_t num_panels = (p.outputs + PANEL - 1) / PANEL, padded = (p.inputs + 3) / 4 * 4;
    const int64_t stride = (p.scales ? padded : p.inputs) + APART;
    const int64_t panel_bytes = p.scales ? padded * PANEL : p.inputs * PANEL * int64_t(sizeof(float));
    const bool copies = !p.scales && (p.norm.kind || p.rows > FEW_ROWS);
    float *copy = copies || p.norm.kind ? floats.of<float>((p.scales ? num_threads : p.rows) * (p.inputs + APART)) : nullptr;
    uint8_t *to_bytes = p.scales ? bytes.of<uint8_t>(p.rows * stride) : nullptr;
    Quantized *to_scales = p.scales ? quantized.of<Quantized>(p.rows) : nullptr;
    const Prepared x = {copies ? copy : p.x, to_bytes, to_scales, p.scales || copies ? stride : p.x_stride};
#pragma omp parallel num_threads(num_threads)
    {
        if (p.scales || copies) {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < p.rows; m++) {
                const float *row = p.x + m * p.x_stride;
                float *place = copy + (p.scales ? omp_get_thread_num() : m) * (p.inputs + APART);
                if (p.norm.kind) {
                    normalise(row, place, p.inputs, p.norm);
                    row = place;
                } else if (copies) {
                    memcpy(place, row, p.inputs * sizeof(float));
                }
                if (p.scales) to_scales[m] = quantize(row, to_bytes + m * stride, p.inputs);
            }
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < num_panels; n++) pass_panel(p, x, panel_at(p, n, panel_bytes), panel_bytes, n + 1 == num_panels);
    }
}

// Where column k of row `row` of W lies. GROUP numbers of a row lie side by side: 1 float, or 4 bytes.
template <class Number, int GROUP> static Number *place(Number *packed, int64_t row, int64_t k, int64_t inputs) {
    int64_t padded = (inputs + GROUP - 1) / GROUP * GROUP;
    return packed + (row / PANEL) * padded * PANEL + (k / GROUP) * PANEL * GROUP + (row % PANEL) * GROUP + k % GROUP;
}

// Puts rows first .. first + count of W into the panels, one panel after the other, so that memory is written in order.
template <class Number, int GROUP> static void pack(Number *packed, const Number *rows, int64_t first, int64_t count, int64_t inputs) {
    const int64_t last = first + count, num_panels = (last - 1) / PANEL - first / PANEL + 1;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < num_panels; n++) {
        int64_t begin = std::max(first, (first / PANEL + n) * PANEL), end = std::min(last, (first / PANEL + n + 1) * PANEL);
        for (int64_t k = 0; k < inputs; k += GROUP)
            for (int64_t row = begin; row < end; row++)
                for (int64_t i = k; i < std::min<int64_t>(k + GROUP, inputs); i++)
                    *place<Number, GROUP>(packed, row, i, inputs) = rows[(row - first) * inputs + i];
    }
}

template <class Number, int GROUP> static void take(const Number *packed, const int64_t *rows, int64_t count, int64_t inputs, Number *out) {
    for (int64_t i = 0; i < count; i++) {
        const Number *from = place<const Number, GROUP>(packed, rows[i], 0, inputs);
        for (int64_t k = 0; k < inputs; k += GROUP, from += PANEL * GROUP)
            for (int64_t j = 0; j < std::min<int64_t>(GROUP, inputs - k); j++) out[i * inputs + k + j] = from[j];
    }
}

extern "C" {
void pack_floats(float *packed, const float *rows, int64_t first, int64_t count, int64_t inputs) { pack<float, 1>(packed, rows, first, count, inputs); }
void pack_bytes(int8_t *packed, const int8_t *rows, int64_t first, int64_t count, int64_t inputs) { pack<int8_t, 4>(packed, rows, first, count, inputs); }
void take_floats(const float *packed, const int64_t *rows, int64_t count, int64_t inputs, float *out) { take<float, 1>(packed, rows, count, inputs, out); }
void take_bytes(const int8_t *packed, const int64_t *rows, int64_t count, int64_t inputs, int8_t *out) { take<int8_t, 4>(packed, rows, count, inputs, out); }
}
