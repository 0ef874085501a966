// Products with weights that were packed once: y = f(x W^T + b), in float32 and in int8 (model/quantization.py has the arithmetic).
//
// W [N, K] lies in panels of PANEL output columns: [N / PANEL, K, PANEL] floats, [N / PANEL, K / 4, PANEL, 4] bytes; so each thread reads one
// stream. Invariant: an element of y is one sum over k in order, however many rows there are and whichever thread has it.
//
// Letters: M rows, K input and N output columns. The last panel is filled up with zeros, and so are the last bytes of K.

#include <algorithm>
#include <vector>

#include "vector.h"

constexpr int PANEL = 2 * LANES, ROWS = LANES == 16 ? 12 : LANES == 8 ? 6 : 3;
constexpr int BYTE_ROWS = LANES == 16 ? 12 : 2;

extern "C" int64_t panel() { return PANEL; }

// Of the structs that come from Python, as model/native/__init__.py has it: raised with every change of either.
extern "C" int64_t interface() { return 2; }

enum Activation { NONE, GELU, GELU_TANH, RELU, SILU };

static Vector sigmoid(Vector x) {
    x = max(all(-87.0f), min(all(87.0f), x));
    return div(all(1.0f), add(all(1.0f), exponential(sub(all(0.0f), x))));
}

// The error function, to about 1e-7 (Abramowitz and Stegun 1964, 7.1.26).
static Vector erf(Vector x) {
    Vector size = max(x, sub(all(0.0f), x)), t = div(all(1.0f), fma(all(0.3275911f), size, all(1.0f)));
    Vector p = all(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, all(c));
    Vector tail = mul(mul(p, t), exp_of_negative(sub(all(0.0f), mul(x, x))));
    return with_sign_of(sub(all(1.0f), tail), x);
}

static Vector activated(Vector x, int activation) {
    switch (activation) {
        case GELU: return mul(mul(all(0.5f), x), add(all(1.0f), erf(mul(x, all(0.70710678f)))));
        case GELU_TANH: return mul(x, sigmoid(mul(all(1.59576912f), fma(mul(all(0.044715f), mul(x, x)), x, x))));
        case RELU: return max(all(0.0f), x);
        case SILU: return mul(x, sigmoid(x));
        default: return x;
    }
}

// One row's PANEL columns: bias, activation, and as many of them as there are.
static void finish(Vector *sums, const float *bias, int activation, float *y, int64_t columns) {
    float edge[PANEL];
    if (bias) {
        memset(edge, 0, sizeof edge);
        if (columns < PANEL) bias = (const float *)memcpy(edge, bias, columns * sizeof(float));
        for (int n = 0; n < 2; n++) sums[n] = add(sums[n], load(bias + n * LANES));
    }
    for (int n = 0; n < 2; n++) sums[n] = activated(sums[n], activation);
    float *out = columns < PANEL ? edge : y;
    for (int n = 0; n < 2; n++) store(out + n * LANES, sums[n]);
    if (columns < PANEL) memcpy(y, edge, columns * sizeof(float));
}

struct Product {
    const float *x;
    const void *weights;
    const float *bias;  // Or null.
    float *y;
    int64_t x_stride, rows, inputs, outputs, activation;
    const float *scales;      // Of the output columns; null in float32.
    const int32_t *row_sums;  // Of the quantized weights.
};

template <int COUNT> static void float_rows(const Product &p, int64_t m, const float *panel, int64_t column, int64_t columns) {
    Vector sums[COUNT][2];
    for (int r = 0; r < COUNT; r++) sums[r][0] = sums[r][1] = all(0.0f);
    const float *x = p.x + m * p.x_stride;
    for (int64_t k = 0; k < p.inputs; k++) {
        Vector left = load(panel + k * PANEL), right = load(panel + k * PANEL + LANES);
        for (int r = 0; r < COUNT; r++) {
            Vector value = all(x[r * p.x_stride + k]);
            sums[r][0] = fma(value, left, sums[r][0]);
            sums[r][1] = fma(value, right, sums[r][1]);
        }
    }
    for (int r = 0; r < COUNT; r++)
        finish(sums[r], p.bias ? p.bias + column : nullptr, int(p.activation), p.y + (m + r) * p.outputs + column, columns);
}

template <int COUNT = ROWS> static void float_tile(const Product &p, int count, int64_t m, const float *panel, int64_t column, int64_t columns) {
    if (count == COUNT)
        float_rows<COUNT>(p, m, panel, column, columns);
    else if constexpr (COUNT > 1)
        float_tile<COUNT - 1>(p, count, m, panel, column, columns);
}

// Tokens in bytes: x = scale * (byte - zero), from the least to the greatest value of each, 0 always among what is represented.
struct Bytes {
    std::vector<uint8_t> values;
    std::vector<float> scales;
    std::vector<int32_t> zeros;
    int64_t stride;
};

static void quantize(const Product &p, Bytes &bytes, int64_t m) {
    const float *x = p.x + m * p.x_stride;
    Vector low = all(0.0f), high = all(0.0f), odd = all(0.0f);
    int64_t k = 0;
    for (; k + LANES <= p.inputs; k += LANES) {
        Vector value = load(x + k);
        low = min(value, low);
        high = max(value, high);
        odd = add(odd, sub(value, value));  // 0, or a NaN where a value is not finite.
    }
    float least = -greatest(sub(all(0.0f), low)), most = greatest(high), finite = total(odd);
    for (; k < p.inputs; k++) {
        least = x[k] < least ? x[k] : least;
        most = x[k] > most ? x[k] : most;
        finite += x[k] - x[k];
    }
    // A token that is not finite must stay so: its scale does, and its bytes are of no account.
    const bool fine = finite == 0.0f;
    const float scale = fine ? std::max((most - least) / 255.0f, std::numeric_limits<float>::min()) : 1.0f;
    const float zero = fine ? -std::nearbyint(least / scale) : 0.0f;
    uint8_t *out = bytes.values.data() + m * bytes.stride;
    for (k = 0; k + LANES <= p.inputs; k += LANES) {
        float rounded[LANES];
        store(rounded, max(min(add(round_even(div(load(x + k), all(scale))), all(zero)), all(255.0f)), all(0.0f)));
        for (int i = 0; i < LANES; i++) out[k + i] = uint8_t(int32_t(rounded[i]));
    }
    for (; k < p.inputs; k++) {
        float rounded = std::nearbyint(x[k] / scale) + zero;
        out[k] = uint8_t(rounded > 0.0f ? rounded < 255.0f ? rounded : 255.0f : 0.0f);
    }
    memset(out + p.inputs, 0, bytes.stride - p.inputs);
    bytes.scales[m] = fine ? scale : std::numeric_limits<float>::quiet_NaN();
    bytes.zeros[m] = int32_t(zero);
}

// sums[r][c] over k of x W, in integers: exact.
template <int COUNT> static void byte_sums(const uint8_t *x, int64_t stride, const int8_t *panel, int64_t inputs, int32_t (*sums)[PANEL]) {
#if defined(__AVX512VNNI__)
    __m512i parts[COUNT][2];
    for (int r = 0; r < COUNT; r++) parts[r][0] = parts[r][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < inputs; k += 4) {
        __m512i left = _mm512_loadu_si512(panel + k * PANEL), right = _mm512_loadu_si512(panel + k * PANEL + 64);
        for (int r = 0; r < COUNT; r++) {
            int32_t four;
            memcpy(&four, x + r * stride + k, 4);
            __m512i value = _mm512_set1_epi32(four);
            parts[r][0] = _mm512_dpbusd_epi32(parts[r][0], value, left);
            parts[r][1] = _mm512_dpbusd_epi32(parts[r][1], value, right);
        }
    }
    for (int r = 0; r < COUNT; r++)
        for (int n = 0; n < 2; n++) _mm512_storeu_si512(sums[r] + n * 16, parts[r][n]);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // Products of bytes with signed bytes do not fit into 16 bits in pairs: they are widened first. Two lanes a column.
    __m256i parts[COUNT][4];
    for (int r = 0; r < COUNT; r++)
        for (int n = 0; n < 4; n++) parts[r][n] = _mm256_setzero_si256();
    for (int64_t k = 0; k < inputs; k += 4) {
        __m256i weights[4];
        for (int n = 0; n < 4; n++) weights[n] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(panel + k * PANEL + n * 16)));
        for (int r = 0; r < COUNT; r++) {
            int32_t four;
            memcpy(&four, x + r * stride + k, 4);
            __m256i value = _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(four)));
            for (int n = 0; n < 4; n++) parts[r][n] = _mm256_add_epi32(parts[r][n], _mm256_madd_epi16(value, weights[n]));
        }
    }
    for (int r = 0; r < COUNT; r++)
        for (int n = 0; n < 4; n++) {
            int32_t lanes[8];
            _mm256_storeu_si256((__m256i *)lanes, parts[r][n]);
            for (int c = 0; c < 4; c++) sums[r][n * 4 + c] = lanes[2 * c] + lanes[2 * c + 1];
        }
#else
    for (int r = 0; r < COUNT; r++) {
        memset(sums[r], 0, sizeof sums[r]);
        for (int64_t k = 0; k < inputs; k++)
            for (int c = 0; c < PANEL; c++) sums[r][c] += x[r * stride + k] * panel[(k & ~3) * PANEL + c * 4 + (k & 3)];
    }
#endif
}

template <int COUNT>
static void byte_rows(const Product &p, const Bytes &bytes, int64_t m, const int8_t *panel, int64_t column, int64_t columns) {
    int32_t sums[COUNT][PANEL];
    byte_sums<COUNT>(bytes.values.data() + m * bytes.stride, bytes.stride, panel, bytes.stride, sums);
    float scales[PANEL] = {};
    int32_t row_sums[PANEL] = {};
    memcpy(scales, p.scales + column, columns * sizeof(float));
    memcpy(row_sums, p.row_sums + column, columns * sizeof(int32_t));
    for (int r = 0; r < COUNT; r++) {
        float row[PANEL];
        int32_t zero = bytes.zeros[m + r];
        float scale = bytes.scales[m + r];
        for (int c = 0; c < PANEL; c++) row[c] = float(sums[r][c] - zero * row_sums[c]) * scale * scales[c];
        Vector both[2] = {load(row), load(row + LANES)};
        finish(both, p.bias ? p.bias + column : nullptr, int(p.activation), p.y + (m + r) * p.outputs + column, columns);
    }
}

template <int COUNT = BYTE_ROWS>
static void byte_tile(const Product &p, const Bytes &bytes, int count, int64_t m, const int8_t *panel, int64_t column, int64_t columns) {
    if (count == COUNT)
        byte_rows<COUNT>(p, bytes, m, panel, column, columns);
    else if constexpr (COUNT > 1)
        byte_tile<COUNT - 1>(p, bytes, count, m, panel, column, columns);
}

// Calls tile(count, m) for tiles of nearly equal size that cover the rows.
template <class Tile> static void cover(int64_t rows, int most, Tile tile) {
    int64_t num_tiles = (rows + most - 1) / most;
    for (int64_t i = 0, m = 0; i < num_tiles; i++) {
        int count = int((rows - m + num_tiles - i - 1) / (num_tiles - i));
        tile(count, m);
        m += count;
    }
}

extern "C" void product(const Product *product, int64_t num_threads) {
    const Product &p = *product;
    const int64_t num_panels = (p.outputs + PANEL - 1) / PANEL, padded = (p.inputs + 3) / 4 * 4;
    Bytes bytes;
    if (p.scales) {
        bytes.stride = padded;
        bytes.values.resize(p.rows * padded);
        bytes.scales.resize(p.rows);
        bytes.zeros.resize(p.rows);
    }
#pragma omp parallel num_threads(num_threads)
    {
        if (p.scales) {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < p.rows; m++) quantize(p, bytes, m);
        }
#pragma omp for schedule(static)
        for (int64_t n = 0; n < num_panels; n++) {
            int64_t column = n * PANEL, columns = std::min<int64_t>(PANEL, p.outputs - column);
            if (p.scales) {
                const int8_t *panel = (const int8_t *)p.weights + n * padded * PANEL;
                cover(p.rows, BYTE_ROWS, [&](int count, int64_t m) { byte_tile(p, bytes, count, m, panel, column, columns); });
            } else {
                const float *panel = (const float *)p.weights + n * p.inputs * PANEL;
                cover(p.rows, ROWS, [&](int count, int64_t m) { float_tile(p, count, m, panel, column, columns); });
            }
        }
    }
}

// y = f(x[:, :size]) * x[:, size:], where the first half of each row is the gate.
extern "C" void gate(const float *x, float *y, int64_t rows, int64_t size, int64_t activation, int64_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows > 1)
    for (int64_t m = 0; m < rows; m++) {
        const float *row = x + 2 * m * size;
        for (int64_t k = 0; k < size; k += LANES) {
            // The last lanes are computed as all others are, whether there are numbers for all of them or not.
            const int64_t count = std::min<int64_t>(LANES, size - k);
            float gates[LANES] = {}, values[LANES] = {};
            memcpy(gates, row + k, count * sizeof(float));
            memcpy(values, row + size + k, count * sizeof(float));
            store(gates, mul(activated(load(gates), int(activation)), load(values)));
            memcpy(y + m * size + k, gates, count * sizeof(float));
        }
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
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < inputs; k++) out[i * inputs + k] = *place<const Number, GROUP>(packed, rows[i], k, inputs);
}

extern "C" {
void pack_floats(float *packed, const float *rows, int64_t first, int64_t count, int64_t inputs) { pack<float, 1>(packed, rows, first, count, inputs); }
void pack_bytes(int8_t *packed, const int8_t *rows, int64_t first, int64_t count, int64_t inputs) { pack<int8_t, 4>(packed, rows, first, count, inputs); }
void take_floats(const float *packed, const int64_t *rows, int64_t count, int64_t inputs, float *out) { take<float, 1>(packed, rows, count, inputs, out); }
void take_bytes(const int8_t *packed, const int64_t *rows, int64_t count, int64_t inputs, int8_t *out) { take<int8_t, 4>(packed, rows, count, inputs, out); }
}
