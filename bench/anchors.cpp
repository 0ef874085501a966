// What two cores can do at most, for bench/step_shares.py: reading memory, products of 8-bit integers, and fused multiply-adds.
//
// Products run on registers alone, fourteen sums that do not depend on each other. The instructions are those of the kernels for this
// processor; -march=native says which.

#include <cstdint>
#include <immintrin.h>

// FOURTEEN(op) computes into registers 2 to 15 from registers 0 and 1. (An array of vectors, gcc keeps in memory.)
#define SIX(op, r) op(r, 2) op(r, 3) op(r, 4) op(r, 5) op(r, 6) op(r, 7)
#define FOURTEEN(op, r) SIX(op, r) op(r, 8) op(r, 9) op(r, 10) op(r, 11) op(r, 12) op(r, 13) op(r, 14) op(r, 15)
#define CHANGED \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15"
#define FMA(r, to) "vfmadd231ps %%" r "0, %%" r "1, %%" r #to "\n\t"

#if defined(__AVX512VNNI__)
#define REGISTERS "zmm"
#define DOT(r, to) "vpdpbusd %%" r "0, %%" r "1, %%" r #to "\n\t"
constexpr int BYTES = 64, NUMBERS = 64;
#else
#define REGISTERS "ymm"
#define DOT(r, to) "vpmaddwd %%" r "0, %%" r "1, %%" r #to "\n\t"  // Of 8-bit integers that were widened to 16.
constexpr int BYTES = 32, NUMBERS = 16;
#endif

extern "C" {
// How many products of two numbers one round of each of the functions below makes.
int64_t dots_per_round() { return 14 * NUMBERS; }
int64_t fmas_per_round() { return 14 * BYTES / 4; }

void dots(int64_t rounds) {
    for (int64_t i = 0; i < rounds; i++) asm volatile(FOURTEEN(DOT, REGISTERS)::: CHANGED);
}

void fmas(int64_t rounds) {
    asm volatile("vpxor %%xmm0, %%xmm0, %%xmm0\n\tvpxor %%xmm1, %%xmm1, %%xmm1" ::: CHANGED);
    for (int64_t i = 0; i < rounds; i++) asm volatile(FOURTEEN(FMA, REGISTERS)::: CHANGED);
}

// Loads every byte, in order, a few KiB after it was asked for.
void read_memory(const char *memory, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 128) {
        __builtin_prefetch(memory + i + 4096, 0, 2);
        __builtin_prefetch(memory + i + 4160, 0, 2);
        for (int j = 0; j < 128; j += 32) asm volatile("" ::"x"(_mm256_load_si256((const __m256i *)(memory + i + j))));
    }
}
}
