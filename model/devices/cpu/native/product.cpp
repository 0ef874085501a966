// Products with weights that were packed once, as floats: y = f(norm(x) W^T + b).
//
// W [N, K] lies in panels of PANEL output columns, [N / PANEL, K, PANEL]; so each thread reads one stream. Floats of 16 bits are widened when
// they are loaded. Invariant: an element of y is one sum over k in order, however many rows there are, whichever thread has it, and in
// whichever type floats are stored.
//
// Letters: M rows, K input and N output columns. The last panel is filled up with zeros.

#include "product.h"

constexpr int ROWS = PRODUCT_ROWS;
constexpr int64_t UNIT = sizeof(float);

extern "C" int64_t panel() { return PANEL; }

// As model/devices/cpu/native/__init__.py has it: raised with every change of the structs that come from Python, or of a result's bits.
extern "C" int64_t interface() { return 14; }

constexpr int64_t WEIGHT_BYTES[] = {4, 2, 2};  // By NumberType.

// The sums of COUNT rows, each in registers of its own. (An array of them, within two loops, gcc 12 keeps in memory.)
template <int COUNT> struct FloatSums {
    FloatSums<COUNT - 1> before;
    Vector left = all(0.0f), right = all(0.0f);
    INLINE void step(const char *x, const Vector &w_left, const Vector &w_right) {
        before.step(x, w_left, w_right);
        float number;
        memcpy(&number, x + (COUNT - 1) * UNIT, UNIT);
        const Vector value = all(number);
        left = fma(value, w_left, left);
        right = fma(value, w_right, right);
    }
    INLINE void put(float (*sums)[PANEL]) const {
        before.put(sums);
        store(sums[COUNT - 1], left);
        store(sums[COUNT - 1] + LANES, right);
    }
};

template <> struct FloatSums<0> {
    INLINE void step(const char *, const Vector &, const Vector &) {}
    INLINE void put(float (*)[PANEL]) const {}
};

// sums[r][c] over k of x W; each step takes a register's worth of weights for the left half of the panel, and one for the right.
template <class Weight, int COUNT>
__attribute__((noinline)) static void sum_panel(const char *x, const char *weights, int64_t num_steps, Ahead ahead, float (*sums)[PANEL]) {
    const Weight *panel = (const Weight *)weights;
    FloatSums<COUNT> rows;
    for (int64_t k = 0; k < num_steps; k++, x += COUNT * UNIT, panel += PANEL) {
        const Vector w_left = load(panel), w_right = load(panel + LANES);
        ahead.step();
        rows.step(x, w_left, w_right);
    }
    rows.put(sums);
}

template <int COUNT> static void tile(const Product &p, const char *x, const Panel &panel, int count, int64_t m, Ahead ahead) {
    if constexpr (COUNT > 0) {
        if (count < COUNT) return tile<COUNT - 1>(p, x, panel, count, m, ahead);
        float sums[COUNT][PANEL];
        const auto sum = p.weight_type == BFLOAT16  ? sum_panel<Bfloat16, COUNT>
                         : p.weight_type == FLOAT16 ? sum_panel<Float16, COUNT>
                                                    : sum_panel<float, COUNT>;
        sum(x, panel.weights, p.inputs, ahead, sums);
        for (int r = 0; r < COUNT; r++) finish(p, panel, load(sums[r]), load(sums[r] + LANES), m + r);
    }
}

static int64_t row_bytes(const Product &p) { return p.inputs * UNIT; }

static int64_t num_tiles(const Product &p) { return (p.rows + ROWS - 1) / ROWS; }

// Rows begin .. end, each to its place: a tile of n rows holds the first number of its first row, of its second, ... of its last, then the next
// number of each, one stream.
static void prepare(const Product &p, char *tiles, int64_t begin, int64_t end) {
    static thread_local Scratch memory;
    float *own = p.norm.kind ? memory.of<float>(p.inputs) : nullptr;
    for (int64_t m = begin; m < end; m++) {
        const TileSpan span = tile_of_row(p.rows, num_tiles(p), m);
        char *tile = tiles + span.first * row_bytes(p);
        const float *row = p.x + m * p.x_stride;
        if (p.norm.kind) {
            normalise(row, own, p.inputs, p.norm);
            row = own;
        }
        if (span.count == 1)
            memcpy(tile, row, p.inputs * UNIT);
        else
            for (int64_t k = 0; k < p.inputs; k++) memcpy(tile + (k * span.count + m - span.first) * UNIT, row + k, UNIT);
    }
}

static void panels(const Product &p, const char *tiles, int64_t begin, int64_t end) {
    const int64_t bytes = p.inputs * WEIGHT_BYTES[p.weight_type] * PANEL, count = num_tiles(p);
    for (int64_t n = begin; n < end; n++) {
        const Panel panel = panel_at(p, n, bytes);
        const char *next = panel.weights + (n + 1 == end ? 0 : bytes);
        for (int64_t i = 0; i < count; i++) {
            const int64_t m = first_row(p.rows, count, i);
            const Ahead ahead = ahead_of(panel, p.rows, i, count, next, bytes, bytes / p.inputs, 1);
            tile<ROWS>(p, tiles + m * row_bytes(p), panel, int(first_row(p.rows, count, i + 1) - m), m, ahead);
        }
    }
}

const ProductKernel FLOAT_KERNEL = {row_bytes, prepare, panels};

struct ProductWork {
    const Product &product;
    const ProductKernel &kernel;
    char *tiles;
    static void prepare(const void *work, int64_t begin, int64_t end) {
        const ProductWork &w = *(const ProductWork *)work;
        w.kernel.prepare(w.product, w.tiles, begin, end);
    }
    static void panels(const void *work, int64_t begin, int64_t end) {
        const ProductWork &w = *(const ProductWork *)work;
        w.kernel.panels(w.product, w.tiles, begin, end);
    }
};

// Of a row when it is prepared.
extern "C" int64_t prepared_bytes(const Product *product) { return kernel_of(*product).row_bytes(*product); }

extern "C" void product(const Product *product, int64_t num_threads) {
    static thread_local Scratch memory;
    const Product &p = *product;
    const ProductKernel &kernel = kernel_of(p);
    const ProductWork work = {p, kernel, memory.of<char>(p.rows * kernel.row_bytes(p))};
    const int64_t panels = p.rows ? num_panels(p) : 0;
    const Phase phases[] = {{ProductWork::prepare, &work, p.rows}, {ProductWork::panels, &work, panels}};
    compute_phases(phases, 2, num_threads);
}

// Where column k of row `row` of W lies.
template <class Number> static Number *place(Number *packed, int64_t row, int64_t k, int64_t inputs) {
    return packed + ((row / PANEL) * inputs + k) * PANEL + row % PANEL;
}

// Puts rows first .. first + count of W into the panels, one panel after the other, so that memory is written in order.
template <class Number> static void pack(Number *packed, const Number *rows, int64_t first, int64_t count, int64_t inputs) {
    const int64_t last = first + count, num_panels = (last - 1) / PANEL - first / PANEL + 1;
    for (int64_t n = 0; n < num_panels; n++) {
        int64_t begin = std::max(first, (first / PANEL + n) * PANEL), end = std::min(last, (first / PANEL + n + 1) * PANEL);
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t row = begin; row < end; row++) *place(packed, row, k, inputs) = rows[(row - first) * inputs + k];
    }
}

template <class Number> static void take(const Number *packed, const int64_t *rows, int64_t count, int64_t inputs, Number *out) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < inputs; k++) out[i * inputs + k] = *place(packed, rows[i], k, inputs);
}

// Of numbers with so many bytes: 2 or 4.
extern "C" void pack(void *packed, const void *rows, int64_t first, int64_t count, int64_t inputs, int64_t bytes) {
    if (bytes == 4) pack((uint32_t *)packed, (const uint32_t *)rows, first, count, inputs);
    if (bytes == 2) pack((uint16_t *)packed, (const uint16_t *)rows, first, count, inputs);
}

extern "C" void take(const void *packed, const int64_t *rows, void *out, int64_t count, int64_t inputs, int64_t bytes) {
    if (bytes == 4) take((const uint32_t *)packed, rows, count, inputs, (uint32_t *)out);
    if (bytes == 2) take((const uint16_t *)packed, rows, count, inputs, (uint16_t *)out);
}
