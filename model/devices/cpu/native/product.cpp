// Products with weights that were packed once: y = f(norm(x) W^T + b), in float32 and in int8 (model/devices/quantization.py has the arithmetic).
//
// W [N, K] lies in panels of PANEL output columns: [N / PANEL, K, PANEL] floats, [N / PANEL, K / 4, PANEL, 4] bytes; so each thread reads one
// stream. Floats of 16 bits are widened when they are loaded. Invariant: an element of y is one sum over k in order, however many rows there
// are, whichever thread has it, and in whichever type floats are stored.
//
// Letters: M rows, K input and N output columns. The last panel is filled up with zeros, and so are the last bytes of K.

#include <omp.h>

#include "rows.h"

constexpr int PANEL = 2 * LANES, ROWS = LANES == 16 ? 14 : LANES == 8 ? 6 : 3;
constexpr int BYTE_ROWS = LANES == 16 ? 14 : 2;

extern "C" int64_t panel() { return PANEL; }

// Of the structs that come from Python, as model/devices/cpu/native/__init__.py has it: raised with every change of either.
extern "C" int64_t interface() { return 6; }

constexpr int64_t WEIGHT_BYTES[] = {4, 2, 2, 1};  // By NumberType.

struct Product {
    const float *x;
    float *y;
    int64_t x_stride, rows;
    const void *weights;
    const float *bias;  // Or null.
    int64_t inputs, outputs, activation, weight_type;
    const float *scales;      // Of the output columns; null unless the weights are quantized.
    const int32_t *row_sums;  // Of the quantized weights.
    Norm norm;
};

// The rows as the sums take them: normalised, in int8 quantized, and tile by tile. A tile of n rows holds UNIT bytes of its first row, of
// its second, ... of its last, then the next UNIT bytes of each: one stream.
constexpr int64_t UNIT = 4;

struct Prepared {
    const char *tiles;
    const Quantized *quantized;
    int64_t row_bytes;
    int64_t num_tiles;
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
    INLINE void step() {
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + 64, 0, 2);
        next += stride;
    }
};

// The int8 weights of one column that one step takes.
struct Four {
    int8_t bytes[4];
};

template <class Register> INLINE Register repeated(const char *unit);

template <> INLINE Vector repeated<Vector>(const char *unit) {
    float value;
    memcpy(&value, unit, UNIT);
    return all(value);
}

INLINE void accumulate(Vector &sum, const Vector &value, const Vector &weights) { sum = fma(value, weights, sum); }

#if defined(__AVX512VNNI__)
INLINE __m512i load(const Four *p) { return _mm512_loadu_si512(p); }

template <> INLINE __m512i repeated<__m512i>(const char *unit) {
    int32_t four;
    memcpy(&four, unit, UNIT);
    return _mm512_set1_epi32(four);
}

// The compiler's own intrinsic (gcc 12) copies each sum to another register and to memory and back.
INLINE void accumulate(__m512i &sum, const __m512i &value, const __m512i &weights) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(value), "v"(weights));
}
#endif

// The sums of COUNT rows, each in registers of its own. (An array of them, within two loops, gcc 12 keeps in memory.)
template <class Register, int COUNT> struct Sums {
    Sums<Register, COUNT - 1> before;
    Register left, right;
    INLINE Sums() : left(Register()), right(Register()) {}
    INLINE void add(const char *x, const Register &w_left, const Register &w_right) {
        before.add(x, w_left, w_right);
        const Register value = repeated<Register>(x + (COUNT - 1) * UNIT);
        accumulate(left, value, w_left);
        accumulate(right, value, w_right);
    }
    template <class Number> INLINE void put(Number (*sums)[PANEL]) const {
        before.put(sums);
        memcpy(sums[COUNT - 1], &left, sizeof left);
        memcpy(sums[COUNT - 1] + LANES, &right, sizeof right);
    }
};

template <class Register> struct Sums<Register, 0> {
    INLINE void add(const char *, const Register &, const Register &) {}
    template <class Number> INLINE void put(Number (*)[PANEL]) const {}
};

// sums[r][c] over k of x W; each step takes a register's worth of weights for the left half of the panel, and one for the right.
template <class Weight, int COUNT, class Number>
__attribute__((noinline)) static void sum_panel(const char *x, const char *weights, int64_t num_steps, Ahead ahead, Number (*sums)[PANEL]) {
    const Weight *panel = (const Weight *)weights;
    Sums<decltype(load(panel)), COUNT> rows;
    for (int64_t k = 0; k < num_steps; k++, x += COUNT * UNIT, panel += PANEL) {
        const auto w_left = load(panel), w_right = load(panel + LANES);
        ahead.step();
        rows.add(x, w_left, w_right);
    }
    rows.put(sums);
}

// The same in integers: exact.
template <int COUNT> static void byte_sums(const char *x, const char *panel, int64_t inputs, Ahead ahead, int32_t (*sums)[PANEL]) {
#if defined(__AVX512VNNI__)
    sum_panel<Four, COUNT>(x, panel, inputs / 4, ahead, sums);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // Products of bytes with signed bytes do not fit into 16 bits in pairs: they are widened first. Two lanes a column.
    __m256i parts[COUNT][4];
    UNROLL for (int i = 0; i < COUNT * 4; i++) parts[i / 4][i % 4] = _mm256_setzero_si256();
    for (int64_t k = 0; k < inputs; k += 4, panel += 4 * PANEL, x += COUNT * UNIT) {
        __m256i weights[4];
        UNROLL for (int n = 0; n < 4; n++) weights[n] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(panel + n * 16)));
        UNROLL for (int r = 0; r < COUNT; r++) {
            int32_t four;
            memcpy(&four, x + 4 * r, 4);
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
    memset(sums, 0, COUNT * sizeof sums[0]);
    for (int64_t k = 0; k < inputs; k += 4, panel += 4 * PANEL, x += COUNT * UNIT)
        for (int r = 0; r < COUNT; r++)
            for (int c = 0; c < 4 * PANEL; c++) sums[r][c / 4] += uint8_t(x[4 * r + c % 4]) * int8_t(panel[c]);
#endif
}

template <int COUNT> static void tile(const Product &p, const Prepared &x, const Panel &panel, int count, int64_t m, Ahead ahead) {
    if constexpr (COUNT > 0) {
        if (count < COUNT) return tile<COUNT - 1>(p, x, panel, count, m, ahead);
        const char *rows = x.tiles + m * x.row_bytes;
        if (!p.scales) {
            float sums[COUNT][PANEL];
            const auto sum = p.weight_type == BFLOAT16  ? sum_panel<Bfloat16, COUNT, float>
                             : p.weight_type == FLOAT16 ? sum_panel<Float16, COUNT, float>
                                                        : sum_panel<float, COUNT, float>;
            sum(rows, panel.weights, p.inputs, ahead, sums);
            for (int r = 0; r < COUNT; r++) finish(p, panel, load(sums[r]), load(sums[r] + LANES), m + r);
        } else if constexpr (COUNT <= BYTE_ROWS) {
            int32_t sums[COUNT][PANEL];
            byte_sums<COUNT>(rows, panel.weights, x.row_bytes, ahead, sums);
            for (int r = 0; r < COUNT; r++) {
                const Quantized &row = x.quantized[m + r];
                for (int c = 0; c < PANEL; c++) sums[r][c] -= row.zero * panel.row_sums[c];
                Vector left = mul(mul(of_integers(sums[r]), all(row.scale)), load(panel.scales));
                Vector right = mul(mul(of_integers(sums[r] + LANES), all(row.scale)), load(panel.scales + LANES));
                finish(p, panel, left, right, m + r);
            }
        }
    }
}

// The rows are cut into tiles of nearly equal size: the first row of number i, which is the number of rows for i = num_tiles.
static int64_t first_row(const Product &p, int64_t num_tiles, int64_t i) { return i * p.rows / num_tiles; }

static void pass_panel(const Product &p, const Prepared &x, const Panel &panel, int64_t bytes, bool is_last) {
    const char *next = panel.weights + (is_last ? 0 : bytes);
    const int64_t num_steps = x.row_bytes / UNIT;
    for (int64_t i = 0; i < x.num_tiles; i++) {
        const int64_t m = first_row(p, x.num_tiles, i);
        const int count = int(first_row(p, x.num_tiles, i + 1) - m);
        tile<ROWS>(p, x, panel, count, m, {next + i * bytes / x.num_tiles, bytes / num_steps / x.num_tiles});
    }
}

// Row m of tile first .. first + count, to its place in it. `floats` has room for one row.
static void prepare(const Product &p, int64_t m, int64_t first, int64_t count, float *floats, uint8_t *bytes, char *tile, Quantized *quantized) {
    const float *row = p.x + m * p.x_stride;
    if (p.norm.kind) {
        normalise(row, floats, p.inputs, p.norm);
        row = floats;
    }
    if (p.scales) *quantized = quantize(row, bytes, p.inputs);
    const char *from = p.scales ? (const char *)bytes : (const char *)row;
    const int64_t num_units = p.scales ? (p.inputs + 3) / 4 : p.inputs;
    if (count == 1)
        memcpy(tile, from, num_units * UNIT);
    else
        for (int64_t k = 0; k < num_units; k++) memcpy(tile + (k * count + m - first) * UNIT, from + k * UNIT, UNIT);
}

extern "C" void product(const Product *product, int64_t num_threads) {
    static thread_local Scratch tile_memory, quantized_memory, row_memory;
    const Product &p = *product;
    if (!p.rows) return;
    const int64_t num_panels = (p.outputs + PANEL - 1) / PANEL, padded = (p.inputs + 3) / 4 * 4, most = p.scales ? BYTE_ROWS : ROWS;
    const int64_t row_bytes = p.scales ? padded : p.inputs * int64_t(sizeof(float));
    const int64_t panel_bytes = (p.scales ? padded : p.inputs) * WEIGHT_BYTES[p.weight_type] * PANEL;
    const int64_t num_tiles = (p.rows + most - 1) / most;
    char *tiles = tile_memory.of<char>(p.rows * row_bytes);
    Quantized *quantized = quantized_memory.of<Quantized>(p.rows);
    float *floats = row_memory.of<float>(num_threads * 2 * padded);
    const Prepared x = {tiles, quantized, row_bytes, num_tiles};
    // A thread that has to wait for its processor, which others use too, does not hold up the others' share.
    const int share = int(std::max<int64_t>(1, num_panels / (8 * num_threads)));
#pragma omp parallel num_threads(num_threads)
    {
        float *own = floats + omp_get_thread_num() * 2 * padded;
#pragma omp for schedule(static)
        for (int64_t m = 0; m < p.rows; m++) {
            int64_t i = m * num_tiles / p.rows;
            while (first_row(p, num_tiles, i + 1) <= m) i++;
            const int64_t first = first_row(p, num_tiles, i), count = first_row(p, num_tiles, i + 1) - first;
            prepare(p, m, first, count, own, (uint8_t *)(own + padded), tiles + first * row_bytes, quantized + m);
        }
#pragma omp for schedule(dynamic, share)
        for (int64_t n = 0; n < num_panels; n++) pass_panel(p, x, panel_at(p, n, panel_bytes), panel_bytes, n + 1 == num_panels);
    }
}

// Where column k of row `row` of W lies. GROUP numbers of a row lie side by side: 1 float of 32 or 16 bits, or 4 bytes.
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

// Of numbers with so many bytes: 1 (int8, in groups of 4), 2 or 4.
extern "C" void pack(void *packed, const void *rows, int64_t first, int64_t count, int64_t inputs, int64_t bytes) {
    if (bytes == 4) pack<uint32_t, 1>((uint32_t *)packed, (const uint32_t *)rows, first, count, inputs);
    if (bytes == 2) pack<uint16_t, 1>((uint16_t *)packed, (const uint16_t *)rows, first, count, inputs);
    if (bytes == 1) pack<int8_t, 4>((int8_t *)packed, (const int8_t *)rows, first, count, inputs);
}

extern "C" void take(const void *packed, const int64_t *rows, void *out, int64_t count, int64_t inputs, int64_t bytes) {
    if (bytes == 4) take<uint32_t, 1>((const uint32_t *)packed, rows, count, inputs, (uint32_t *)out);
    if (bytes == 2) take<uint16_t, 1>((const uint16_t *)packed, rows, count, inputs, (uint16_t *)out);
    if (bytes == 1) take<int8_t, 4>((const int8_t *)packed, rows, count, inputs, (int8_t *)out);
}
