// What is done to each row of a matrix by itself, without a product: normalisation, gates, and the normaliser of logits.

#include "pool.h"
#include "rows.h"

extern "C" void normalise_rows(const float *x, float *y, int64_t stride, int64_t rows, int64_t size, const Norm *norm, int64_t num_threads) {
    const auto compute = [=](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; m++) normalise(x + m * stride, y + m * size, size, *norm);
    };
    compute_items(rows, num_threads, compute, 8);
}

extern "C" void gate(const float *x, float *y, int64_t rows, int64_t size, int64_t activation, int64_t num_threads) {
    compute_items(rows, num_threads, [=](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; m++) gate_row(x + 2 * m * size, y + m * size, size, int(activation));
    });
}

extern "C" void cap_logits(const float *x, float *y, int64_t rows, int64_t size, const float *most, int64_t num_threads) {
    constexpr int64_t PIECE = 4096;  // Numbers that a thread takes of a row: a vocabulary is large, and rows may be few.
    const int64_t pieces = (size + PIECE - 1) / PIECE;
    compute_items(rows * pieces, num_threads, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t first = i % pieces * PIECE, place = i / pieces * size + first;
            cap_row(x + place, y + place, std::min(PIECE, size - first), *most);
        }
    });
}

// For each row the logarithm of the sum of its exponentials, the number of its greatest element (the first of several), and that element.
extern "C" void summarise_logits(const float *logits, float *normalisers, float *greatest_ones, int64_t *places, int64_t rows, int64_t size,
                                 int64_t num_threads) {
    const auto summarise = [=](int64_t m) {
        const float *row = logits + m * size;
        Vector most = all(-std::numeric_limits<float>::infinity());
        int64_t k = 0;
        for (; k + LANES <= size; k += LANES) most = max(load(row + k), most);
        float greatest_one = greatest(most);
        for (; k < size; k++) greatest_one = row[k] > greatest_one ? row[k] : greatest_one;
        const float sum = total_of(size, [=](int64_t k, Vector sums) {
            return add(sums, first_of(exp_of_negative(min(all(0.0f), sub(load_some(row + k, size - k), all(greatest_one)))), size - k));
        });
        // In float64: there differences of libraries almost never show in the rounded result.
        normalisers[m] = greatest_one + float(std::log(double(sum)));
        greatest_ones[m] = greatest_one;
        places[m] = std::find(row, row + size, greatest_one) - row;
        if (places[m] == size) places[m] = 0;  // Of numbers that are none.
    };
    compute_items(rows, num_threads, [=](int64_t begin, int64_t end) {
        for (int64_t m = begin; m < end; m++) summarise(m);
    });
}
