// Vectors of float32, in the widest registers that the compiler's flags allow. Everything else in this folder is written over them.
//
// Invariant: no operation mixes lanes but `total_of` and `greatest`, whose order does not depend on LANES, and each rounds once, as IEEE 754 has it;
// so all instruction sets give the same bits. The exception is a processor without fused operations, where `fma` rounds twice: exact ones, computed
// in float64, were tried there and took 20 times as long.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

// Loops over registers must be unrolled whole, or the compiler keeps what they hold in memory.
#define UNROLL _Pragma("GCC unroll 32")
#define INLINE __attribute__((always_inline)) inline

// Types of numbers in memory. `load` widens those of 16 bits to float32, which is exact.
enum NumberType { FLOAT, BFLOAT16, FLOAT16 };
struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline float of_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}
inline float widened(Bfloat16 x) { return of_bits(uint32_t(x.bits) << 16); }
// The product moves the exponent to float32's bias, and makes subnormal numbers normal.
inline float widened(Float16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
    const float size = rest < 0x0f800000 ? of_bits(rest) * 0x1p112f : of_bits(rest | 0x7f800000);  // Infinity and NaN have no exponent.
    return sign ? -size : size;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
// Rounded to the nearest number, and of two to the even one.
inline void narrow(float x, Bfloat16 *to) {
    const uint32_t bits = bits_of(x);
    to->bits = x == x ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
}
inline void narrow(float x, Float16 *to) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & 0x7fffffff;
    uint32_t rest = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
    if (size < 0x38800000) rest = bits_of(of_bits(size) + 0.5f) - 0x3f000000;  // Subnormal: their step is that of the numbers from 0.5 on.
    if (size >= 0x477ff000) rest = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    to->bits = uint16_t(sign | rest);
}
inline void narrow(float x, float *to) { *to = x; }

// A stored number's bits, as a whole number.
inline int32_t whole(float x) { return int32_t(bits_of(x)); }
inline int16_t whole(Bfloat16 x) { return int16_t(x.bits); }
inline int16_t whole(Float16 x) { return int16_t(x.bits); }

#if defined(__AVX512F__)
#include <immintrin.h>
#if defined(__AVX512VNNI__)
#define ISA "avx512"
#else
#define ISA "avx512bw"
#endif
constexpr int LANES = 16, TILE_ROWS = 6, TILE_VECTORS = 4, PRODUCT_ROWS = 14, BLOCK_ROWS = 7;
using Vector = __m512;
inline Vector load(const float *p) { return _mm512_loadu_ps(p); }
inline Vector load(const Bfloat16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
inline Vector load(const Float16 *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
inline void store(float *p, Vector v) { _mm512_storeu_ps(p, v); }
inline Vector all(float x) { return _mm512_set1_ps(x); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector sub(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
inline Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
inline Vector with_sign_of(Vector a, Vector b) { return _mm512_or_ps(_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a), _mm512_and_ps(b, _mm512_set1_ps(-0.0f))); }
inline Vector round_even(Vector a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_two_to(Vector a, Vector n) { return _mm512_scalef_ps(a, n); }
inline Vector of_integers(const int32_t *p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#if defined(__AVXVNNI__)
#define ISA "avxvnni"
#else
#define ISA "avx2"
#endif
constexpr int LANES = 8, TILE_ROWS = 3, TILE_VECTORS = 4, PRODUCT_ROWS = 6, BLOCK_ROWS = 6;
using Vector = __m256;
inline Vector load(const float *p) { return _mm256_loadu_ps(p); }
inline Vector load(const Bfloat16 *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
inline Vector load(const Float16 *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
inline void store(float *p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector all(float x) { return _mm256_set1_ps(x); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector sub(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
inline Vector div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
inline Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
inline Vector with_sign_of(Vector a, Vector b) { return _mm256_or_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a), _mm256_and_ps(b, _mm256_set1_ps(-0.0f))); }
inline Vector round_even(Vector a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_two_to(Vector a, Vector n) {
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}
inline Vector of_integers(const int32_t *p) { return _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)p)); }
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define ISA "i8mm"
constexpr int BLOCK_ROWS = 8;
#else
#if defined(__ARM_FEATURE_DOTPROD)
#define ISA "dotprod"
#else
#define ISA "neon"
#endif
constexpr int BLOCK_ROWS = 7;
#endif
constexpr int LANES = 4, TILE_ROWS = 6, TILE_VECTORS = 4, PRODUCT_ROWS = 14;
using Vector = float32x4_t;
inline Vector load(const float *p) { return vld1q_f32(p); }
inline Vector load(const Bfloat16 *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p), 16)); }
inline Vector load(const Float16 *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p))); }
inline void store(float *p, Vector v) { vst1q_f32(p, v); }
inline Vector all(float x) { return vdupq_n_f32(x); }
inline Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
inline Vector add(Vector a, Vector b) { return vaddq_f32(a, b); }
inline Vector sub(Vector a, Vector b) { return vsubq_f32(a, b); }
inline Vector mul(Vector a, Vector b) { return vmulq_f32(a, b); }
inline Vector div(Vector a, Vector b) { return vdivq_f32(a, b); }
// As the others: b where one is not a number.
inline Vector max(Vector a, Vector b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Vector min(Vector a, Vector b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline Vector with_sign_of(Vector a, Vector b) { return vbslq_f32(vdupq_n_u32(0x80000000), b, a); }
inline Vector round_even(Vector a) { return vrndnq_f32(a); }
inline Vector times_two_to(Vector a, Vector n) {
    int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(a, vreinterpretq_f32_s32(exponent));
}
inline Vector of_integers(const int32_t *p) { return vcvtq_f32_s32(vld1q_s32(p)); }
#else
#ifdef __FP_FAST_FMAF
#define ISA "portable"
#else
#define ISA "unfused"
#endif
constexpr int LANES = 4, TILE_ROWS = 2, TILE_VECTORS = 4, PRODUCT_ROWS = 3, BLOCK_ROWS = 2;
struct Vector {
    float lane[LANES];
};
template <class F> inline Vector each(F f) {
    Vector v;
    for (int i = 0; i < LANES; i++) v.lane[i] = f(i);
    return v;
}
inline Vector load(const float *p) { return each([=](int i) { return p[i]; }); }
inline Vector load(const Bfloat16 *p) { return each([=](int i) { return widened(p[i]); }); }
inline Vector load(const Float16 *p) { return each([=](int i) { return widened(p[i]); }); }
inline void store(float *p, Vector v) { memcpy(p, v.lane, sizeof v.lane); }
inline Vector all(float x) { return each([=](int) { return x; }); }
#ifdef __FP_FAST_FMAF
inline Vector fma(Vector a, Vector b, Vector c) { return each([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); }); }
#else
inline Vector fma(Vector a, Vector b, Vector c) { return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; }); }
#endif
inline Vector add(Vector a, Vector b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
inline Vector sub(Vector a, Vector b) { return each([&](int i) { return a.lane[i] - b.lane[i]; }); }
inline Vector mul(Vector a, Vector b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
inline Vector div(Vector a, Vector b) { return each([&](int i) { return a.lane[i] / b.lane[i]; }); }
inline Vector max(Vector a, Vector b) { return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
inline Vector min(Vector a, Vector b) { return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
inline Vector with_sign_of(Vector a, Vector b) { return each([&](int i) { return std::copysign(a.lane[i], b.lane[i]); }); }
inline Vector round_even(Vector a) { return each([&](int i) { return std::nearbyint(a.lane[i]); }); }
inline Vector times_two_to(Vector a, Vector n) { return each([&](int i) { return std::isnan(n.lane[i]) ? n.lane[i] : std::ldexp(a.lane[i], int(n.lane[i])); }); }
inline Vector of_integers(const int32_t *p) { return each([=](int i) { return float(p[i]); }); }
#endif
// The first `count` numbers at p, and zeros.
inline Vector load_some(const float *p, int64_t count) {
    if (count >= LANES) return load(p);
    float lanes[LANES] = {};
    memcpy(lanes, p, count * sizeof(float));
    return load(lanes);
}

inline void store_some(float *p, Vector v, int64_t count) {
    if (count >= LANES) return store(p, v);
    float lanes[LANES];
    store(lanes, v);
    memcpy(p, lanes, count * sizeof(float));
}

// v, and zeros from lane number `count` on.
inline Vector first_of(Vector v, int64_t count) {
    if (count >= LANES) return v;
    float lanes[LANES] = {};
    store_some(lanes, v, count);
    return load(lanes);
}

// The sum of `size` numbers: add_to(k, sums) adds a Vector of those from number k on, with zeros after the last one, to `sums`. Number k goes to sum
// k % SUMS; in the end the upper half of the sums is added to the lower one until one is left.
constexpr int SUMS = 16;
template <class Add> INLINE float total_of(int64_t size, const Add &add_to) {
    constexpr int PARTS = SUMS / LANES;
    Vector parts[PARTS];
    UNROLL for (int n = 0; n < PARTS; n++) parts[n] = all(0.0f);
    int64_t k = 0;
    for (; k + SUMS <= size; k += SUMS)
        UNROLL for (int n = 0; n < PARTS; n++) parts[n] = add_to(k + n * LANES, parts[n]);
    UNROLL for (int n = 0; n < PARTS; n++)
        if (k + n * LANES < size) parts[n] = add_to(k + n * LANES, parts[n]);
    for (int half = PARTS / 2; half; half /= 2)
        for (int n = 0; n < half; n++) parts[n] = add(parts[n], parts[n + half]);
    float lanes[LANES];
    store(lanes, parts[0]);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

// Of lanes that are numbers.
inline float greatest(Vector v) {
    float lanes[LANES], most = -std::numeric_limits<float>::infinity();
    store(lanes, v);
    for (int i = 0; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

// e^x for |x| <= 87, to about 2 units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor series.
inline Vector exponential(Vector x) {
    Vector n = round_even(mul(x, all(1.44269504f)));
    Vector r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Vector p = all(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, all(c));
    return times_two_to(p, n);
}

// e^x for x <= 0, never below e^-87. In this order of max a NaN stays one.
inline Vector exp_of_negative(Vector x) { return exponential(max(all(-87.0f), x)); }

// Memory for a call's intermediate values, kept for the next one.
struct Scratch {
    std::unique_ptr<char[]> memory;
    int64_t size = 0;
    template <class Number> Number *of(int64_t count) {
        const int64_t needed = count * int64_t(sizeof(Number)) + 64;
        if (needed > size) {
            memory.reset();  // Before more is asked for, so that there need not be room for both.
            size = 0;
            memory.reset(new char[needed]);
            size = needed;
        }
        return (Number *)((uintptr_t(memory.get()) + 63) / 64 * 64);
    }
};
