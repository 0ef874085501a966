// Rows of float32 -> rows of blocks in int8 and int4, with the bits of the definitions in model/devices/blocks.py. It knows nothing of panels.
//
// Letters: b a block, k one of its inputs, n a lane. In 4 bits lanes hold blocks, so that no operation mixes lanes.

#include "product.h"

static Float16 narrowed(float x) {
    Float16 narrow_x;
    narrow(x, &narrow_x);
    return narrow_x;
}

// Block number b of all rows together, filled up with zeros.
static void read_block(const float *rows, int64_t b, int64_t num_blocks, int64_t inputs, float *block) {
    const int64_t k = b % num_blocks * BLOCK, count = std::min<int64_t>(BLOCK, inputs - k);
    std::fill(std::copy_n(rows + b / num_blocks * inputs + k, count, block), block + BLOCK, 0.0f);
}

extern "C" void quantize_int8(const float *rows, char *out, int64_t count, int64_t inputs) {
    const int64_t num_blocks = (inputs + BLOCK - 1) / BLOCK;
    for (int64_t b = 0; b < count * num_blocks; b++) {
        float block[BLOCK];
        read_block(rows, b, num_blocks, inputs, block);
        uint32_t largest = 0;
        for (float x : block) largest = std::max(largest, bits_of(x) & 0x7fffffff);  // Sizes are ordered as their bits are, and NaN is largest.
        const Float16 scale = narrowed(of_bits(largest) / 127.0f);
        const Vector step = max(all(widened(scale)), all(std::numeric_limits<float>::min()));
        for (int k = 0; k < BLOCK; k += LANES) store(block + k, max(min(round_even(div(load(block + k), step)), all(127.0f)), all(-127.0f)));
        char *to = out + b * (2 + BLOCK);
        memcpy(to, &scale, 2);
        for (int k = 0; k < BLOCK; k++) to[2 + k] = char(int8_t(block[k]));
    }
}

constexpr double CLIPPING[] = {1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.7};

// LANES blocks of int4: w = scale * number + minimum.
struct Blocks {
    Vector weights[BLOCK], numbers[BLOCK];
    float total[LANES], scale[LANES], minimum[LANES];
    float best_gain[LANES], best_scale[LANES], best_minimum[LANES];

    void round() {
        float inverse[LANES];
        for (int n = 0; n < LANES; n++) {
            const float quotient = 1.0f / scale[n];  // Divided in every case, so that the compiler makes vectors of the loop; below, too.
            inverse[n] = scale[n] > 0 ? quotient : 0.0f;
        }
        const Vector least = load(minimum), factor = load(inverse);
        for (int k = 0; k < BLOCK; k++)
            numbers[k] = max(min(round_even(mul(sub(weights[k], least), factor)), all(15.0f)), all(0.0f));
    }
};

// The second half is added to the first until one is left.
static void put_total(Vector *parts, float *sums) {
    for (int width = BLOCK / 2; width; width /= 2)
        for (int k = 0; k < width; k++) parts[k] = add(parts[k], parts[k + width]);
    store(sums, parts[0]);
}

// Scale and minimum of the least squares for the numbers, where these leave less of the squared error than the best ones so far.
static void improve(Blocks &blocks) {
    float dots[LANES], sums[LANES], squares[LANES];
    Vector products[BLOCK], sum = all(0.0f), square = all(0.0f);
    for (int k = 0; k < BLOCK; k++) {
        const Vector number = blocks.numbers[k];
        products[k] = mul(number, blocks.weights[k]);
        sum = add(sum, number);  // Of whole numbers: exact, as their squares' is.
        square = add(square, mul(number, number));
    }
    put_total(products, dots);
    store(sums, sum);
    store(squares, square);
    for (int n = 0; n < LANES; n++) {
        const float spread = BLOCK * squares[n] - sums[n] * sums[n];
        const float quotient = (BLOCK * dots[n] - sums[n] * blocks.total[n]) / spread, scale = spread > 0 ? quotient : 0.0f;
        const float minimum = (blocks.total[n] - scale * sums[n]) / BLOCK, gain = scale * dots[n] + minimum * blocks.total[n];
        const bool is_better = gain > blocks.best_gain[n];
        blocks.best_gain[n] = is_better ? gain : blocks.best_gain[n];
        blocks.best_scale[n] = is_better ? scale : blocks.best_scale[n];
        blocks.best_minimum[n] = is_better ? minimum : blocks.best_minimum[n];
    }
}

static void quantize(Blocks &blocks) {
    Vector least = blocks.weights[0], most = least, weights[BLOCK];
    for (const Vector &weight : blocks.weights) least = min(least, weight), most = max(most, weight);
    std::copy_n(blocks.weights, BLOCK, weights);
    put_total(weights, blocks.total);
    float low[LANES], range[LANES];
    store(low, least);
    store(range, sub(most, least));
    std::fill_n(blocks.best_gain, LANES, -std::numeric_limits<float>::infinity());
    std::fill_n(blocks.best_scale, LANES, std::numeric_limits<float>::quiet_NaN());
    for (double share : CLIPPING) {
        const Vector span = load(range);
        store(blocks.scale, mul(span, all(float(share / 15))));
        store(blocks.minimum, add(load(low), mul(span, all(float((1 - share) / 2)))));
        blocks.round();
        improve(blocks);
    }
    for (int n = 0; n < LANES; n++) {
        blocks.scale[n] = widened(narrowed(blocks.best_scale[n]));
        blocks.minimum[n] = widened(narrowed(blocks.best_minimum[n]));
    }
    blocks.round();
}

extern "C" void quantize_int4(const float *rows, char *out, int64_t count, int64_t inputs) {
    const int64_t num_blocks = (inputs + BLOCK - 1) / BLOCK, all_blocks = count * num_blocks;
    for (int64_t first = 0; first < all_blocks; first += LANES) {
        float block[BLOCK], lanes[BLOCK][LANES] = {};
        for (int n = 0; n < std::min<int64_t>(LANES, all_blocks - first); n++) {
            read_block(rows, first + n, num_blocks, inputs, block);
            for (int k = 0; k < BLOCK; k++) lanes[k][n] = block[k];
        }
        Blocks blocks;
        for (int k = 0; k < BLOCK; k++) blocks.weights[k] = load(lanes[k]);
        quantize(blocks);
        for (int k = 0; k < BLOCK; k++) store(lanes[k], blocks.numbers[k]);
        for (int n = 0; n < std::min<int64_t>(LANES, all_blocks - first); n++) {
            char *to = out + (first + n) * (4 + BLOCK / 2);
            const Float16 head[] = {narrowed(blocks.scale[n]), narrowed(blocks.minimum[n])};
            memcpy(to, head, 4);
            for (int k = 0; k < BLOCK / 2; k++) to[4 + k] = char(int(lanes[k][n]) | int(lanes[k + BLOCK / 2][n]) << 4);
        }
    }
}
