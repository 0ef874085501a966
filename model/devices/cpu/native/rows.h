// What is done to one row of numbers: normalisation, activation, addition, rotation. Each depends on the row alone.
#pragma once

#include <algorithm>

#include "vector.h"

enum Activation { NONE, GELU, GELU_TANH, RELU, SILU };
enum NormKind { NO_NORM, LAYER_NORM, RMS_NORM };

// x -> (x - mean) / sqrt(variance + epsilon) * weight + bias, or for RMS_NORM x / sqrt(mean of squares + epsilon) * (weight + offset).
struct Norm {
    const float *weight, *bias;  // Either may be null: weights of 1, biases of 0.
    int64_t kind;
    float epsilon, offset;
};

inline Vector sigmoid(Vector x) {
    x = max(all(-87.0f), min(all(87.0f), x));
    return div(all(1.0f), add(all(1.0f), exponential(sub(all(0.0f), x))));
}

// The error function, to about 1e-7 (Abramowitz and Stegun 1964, 7.1.26).
inline Vector erf(Vector x) {
    Vector size = max(x, sub(all(0.0f), x)), t = div(all(1.0f), fma(all(0.3275911f), size, all(1.0f)));
    Vector p = all(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, all(c));
    Vector tail = mul(mul(p, t), exp_of_negative(sub(all(0.0f), mul(x, x))));
    return with_sign_of(sub(all(1.0f), tail), x);
}

inline Vector activated(Vector x, int activation) {
    switch (activation) {
        case GELU: return mul(mul(all(0.5f), x), add(all(1.0f), erf(mul(x, all(0.70710678f)))));
        case GELU_TANH: return mul(x, sigmoid(mul(all(1.59576912f), fma(mul(all(0.044715f), mul(x, x)), x, x))));
        case RELU: return max(all(0.0f), x);
        case SILU: return mul(x, sigmoid(x));
        default: return x;
    }
}

inline void normalise(const float *x, float *y, int64_t size, const Norm &norm) {
    float mean = 0.0f;
    if (norm.kind == LAYER_NORM)
        mean = total_of(size, [=](int64_t k, Vector sums) { return add(sums, load_some(x + k, size - k)); }) / float(size);
    const float square = total_of(size, [=](int64_t k, Vector squares) {
        const Vector value = first_of(sub(load_some(x + k, size - k), all(mean)), size - k);
        return fma(value, value, squares);
    });
    const float factor = 1.0f / std::sqrt(square / float(size) + norm.epsilon);
    for (int64_t k = 0; k < size; k += LANES) {
        Vector value = mul(sub(load_some(x + k, size - k), all(mean)), all(factor));
        const Vector weight = norm.weight ? add(load_some(norm.weight + k, size - k), all(norm.offset)) : all(1.0f);
        value = norm.bias ? fma(value, weight, load_some(norm.bias + k, size - k)) : mul(value, weight);
        store_some(y + k, value, size - k);
    }
}

// y = f(x[:size]) * x[size:], where the first half of a row is the gate.
inline void gate_row(const float *x, float *y, int64_t size, int activation) {
    // The last lanes are computed as all others are, whether there are numbers for all of them or not.
    for (int64_t k = 0; k < size; k += LANES)
        store_some(y + k, mul(activated(load_some(x + k, size - k), activation), load_some(x + size + k, size - k)), size - k);
}

// y = x + factor * z
inline void add_row(const float *x, const float *z, float *y, int64_t size, float factor) {
    for (int64_t k = 0; k < size; k += LANES)
        store_some(y + k, fma(all(factor), load_some(z + k, size - k), load_some(x + k, size - k)), size - k);
}

// y = x * z, or x * factor where there is no z.
inline void multiply_row(const float *x, const float *z, float *y, int64_t size, float factor) {
    for (int64_t k = 0; k < size; k += LANES)
        store_some(y + k, mul(load_some(x + k, size - k), z ? load_some(z + k, size - k) : all(factor)), size - k);
}

// y = most * tanh(x / most)
inline void cap_row(const float *x, float *y, int64_t size, float most) {
    for (int64_t k = 0; k < size; k += LANES) {
        // tanh(u) = 2 sigmoid(2 u) - 1; its error is that of 1, about 1e-7 * most.
        const Vector share = sigmoid(mul(load_some(x + k, size - k), all(2.0f / most)));
        store_some(y + k, mul(fma(all(2.0f), share, all(-1.0f)), all(most)), size - k);
    }
}

// Rotates pair i of a head's columns by angle i, whose cosine and sine are given. Interleaved pairs come out as halves.
inline void rotate_head(const float *x, float *y, int64_t pairs, const float *cosine, const float *sine, bool interleaved) {
    for (int64_t i = 0; i < pairs; i++) {
        const float a = interleaved ? x[2 * i] : x[i], b = interleaved ? x[2 * i + 1] : x[i + pairs];
        y[i] = a * cosine[i] - b * sine[i];
        y[i + pairs] = b * cosine[i] + a * sine[i];
    }
}
