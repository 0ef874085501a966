// What products of packed weights have in common: their arguments, panels of output columns, and tiles of rows.
//
// W [N, K] lies in panels of PANEL output columns, and a thread takes one panel for all rows, tile by tile. Invariant: how rows are cut into
// tiles and which thread has a panel changes no result. How weights and rows lie within a panel and a tile is each kernel's own matter.
#pragma once

#include "pool.h"
#include "rows.h"

constexpr int PANEL = 2 * LANES;
constexpr int BLOCK = 32;  // Inputs of a block of quantized weights.

// How weights are stored: as one of the NumberTypes, or in blocks.
enum WeightType { INT8_BLOCKS = FLOAT16 + 1, INT4_BLOCKS };

struct Product {
    const float *x;
    float *y;
    int64_t x_stride, y_stride, rows;
    const void *weights;
    const float *bias;  // Or null.
    int64_t inputs, outputs, activation, weight_type;
    Norm norm;
};

// A product in two parts: its rows are prepared (normalised, perhaps quantized, and put into tiles), then its panels computed.
struct ProductKernel {
    int64_t (*row_bytes)(const Product &p);  // Of a prepared row.
    void (*prepare)(const Product &p, char *tiles, int64_t begin, int64_t end);
    void (*panels)(const Product &p, const char *tiles, int64_t begin, int64_t end);
};

extern const ProductKernel FLOAT_KERNEL, INT8_KERNEL, INT4_KERNEL;

inline const ProductKernel &kernel_of(const Product &p) {
    return p.weight_type == INT8_BLOCKS ? INT8_KERNEL : p.weight_type == INT4_BLOCKS ? INT4_KERNEL : FLOAT_KERNEL;
}

inline int64_t num_panels(const Product &p) { return (p.outputs + PANEL - 1) / PANEL; }

// What all tiles of a panel share.
struct Panel {
    const char *weights;
    float bias[PANEL];
    int64_t column, columns;
};

inline Panel panel_at(const Product &p, int64_t number, int64_t bytes) {
    Panel panel = {};
    panel.weights = (const char *)p.weights + number * bytes;
    panel.column = number * PANEL;
    panel.columns = std::min<int64_t>(PANEL, p.outputs - panel.column);
    if (p.bias) memcpy(panel.bias, p.bias + panel.column, panel.columns * sizeof(float));
    return panel;
}

// One row's PANEL columns: bias, activation, and as many of them as there are.
inline void finish(const Product &p, const Panel &panel, Vector left, Vector right, int64_t row) {
    float *y = p.y + row * p.y_stride + panel.column;
    if (p.bias) left = add(left, load(panel.bias)), right = add(right, load(panel.bias + LANES));
    if (p.activation) left = activated(left, int(p.activation)), right = activated(right, int(p.activation));
    store_some(y, left, panel.columns);
    if (panel.columns > LANES) store_some(y + LANES, right, panel.columns - LANES);
}

// Asks for weights that are read later, two lines with every step over the inputs, so that they are near when their turn comes.
struct Ahead {
    const char *next;
    int64_t stride;
    INLINE void step() {
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + 64, 0, 2);
        next += stride;
    }
    // The last line of what `steps` steps ask for, where that has more than two lines for each.
    INLINE void last_line(int steps) const { __builtin_prefetch(next + steps * stride - 64, 0, 2); }
};

// For tile number i of so many, whose steps read `step_bytes` of weights and ask `num_asks` times. A single tile reads weights as fast as memory
// gives them: the processor follows that stream by itself, and asking far ahead of it, for a second one, makes both slower (with AVX2 a step of
// one row takes 4 to 6 % longer for 4 KiB than for 1.5). Of several tiles each asks for its part of the next panel.
inline Ahead ahead_of(const Panel &panel, int64_t num_rows, int64_t i, int64_t num_tiles, const char *next, int64_t bytes, int64_t step_bytes,
                      int64_t num_asks) {
    const int64_t distance = num_rows > 1 ? 8 << 10 : LANES == 8 ? 3 << 9 : 4 << 10;  // Measured.
    if (num_tiles == 1) return {panel.weights + distance, step_bytes / num_asks};
    return {next + i * bytes / num_tiles, step_bytes / num_asks / num_tiles};
}

// The rows are cut into tiles of nearly equal size: the first row of number i, which is the number of rows for i = num_tiles.
inline int64_t first_row(int64_t num_rows, int64_t num_tiles, int64_t i) { return i * num_rows / num_tiles; }

struct TileSpan {
    int64_t first, count;
};

inline TileSpan tile_of_row(int64_t num_rows, int64_t num_tiles, int64_t m) {
    int64_t i = m * num_tiles / num_rows;
    while (first_row(num_rows, num_tiles, i + 1) <= m) i++;
    const int64_t first = first_row(num_rows, num_tiles, i);
    return {first, first_row(num_rows, num_tiles, i + 1) - first};
}
