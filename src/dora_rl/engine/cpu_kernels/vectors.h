// Vectors of floats as wide as the registers, through the compilers' vector extension, so that one source serves x86 and
// ARM. Only the fused multiply-add needs an intrinsic.
//
// Invariants of everything built on these:
// - the sequence of floating-point operations behind one row of a result depends on that row's own inputs alone, never
//   on the number of other rows or threads. That makes generation bitwise independent of the batch;
// - every rounding is in the source: `multiply_add` is written where a product and a sum may be rounded once, and the
//   compiler contracts nothing on its own (-ffp-contract=off), since it would do so in one loop and not in another. So g++
//   and clang++ compute the same bits for the same vector width, with a fused multiply-add or without.
#pragma once
#include <cstdint>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For a loop with a constant number of iterations, and for one whose body already fills the registers.
#if defined(__clang__)
#define UNROLL_FULLY _Pragma("clang loop unroll(full)")
#define UNROLL_NEVER _Pragma("clang loop unroll(disable)")
#else
#define UNROLL_FULLY _Pragma("GCC unroll 64")
#define UNROLL_NEVER _Pragma("GCC unroll 1")
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef float vec_at __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16)));

static inline vec load(const float* p) { return *reinterpret_cast<const vec_at*>(p); }
static inline void store(float* p, vec v) { *reinterpret_cast<vec_at*>(p) = v; }
static inline vec all(float s) { return s - vec{}; }  // not `+`: the compiler can't remove an addition to -0

// a * b + c: rounded once where the processor has an instruction for it, else twice, the same everywhere in the library.
// (A fused multiply-add in software would take a hundred times as long.)
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
constexpr bool FUSED = true;
#else
constexpr bool FUSED = false;
#endif
static inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    auto low = [](vec v) { return (float32x4_t)__builtin_shufflevector(v, v, 0, 1, 2, 3); };
    auto high = [](vec v) { return (float32x4_t)__builtin_shufflevector(v, v, 4, 5, 6, 7); };
    vec4 left = (vec4)vfmaq_f32(low(c), low(a), low(b)), right = (vec4)vfmaq_f32(high(c), high(a), high(b));
    return __builtin_shufflevector(left, right, 0, 1, 2, 3, 4, 5, 6, 7);
#else
    return a * b + c;
#endif
}
static inline float multiply_add(float a, float b, float c) {
    if constexpr (FUSED) return __builtin_fmaf(a, b, c);
    return a * b + c;
}

// The sums of four vectors, in one fixed order of additions.
#if defined(__AVX512F__)
static inline vec pair_sums(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}
static inline vec4 sums(vec a, vec b, vec c, vec d) {
    vec s = pair_sums(pair_sums(a, b), pair_sums(c, d));
    return (__builtin_shufflevector(s, s, 0, 1, 2, 3) + __builtin_shufflevector(s, s, 4, 5, 6, 7)) +
           (__builtin_shufflevector(s, s, 8, 9, 10, 11) + __builtin_shufflevector(s, s, 12, 13, 14, 15));
}
#else
static inline vec pair_sums(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
static inline vec4 sums(vec a, vec b, vec c, vec d) {
    vec s = pair_sums(pair_sums(a, b), pair_sums(c, d));
    return __builtin_shufflevector(s, s, 0, 1, 2, 3) + __builtin_shufflevector(s, s, 4, 5, 6, 7);
}
#endif
static inline float sum(vec a) { return sums(a, vec{}, vec{}, vec{})[0]; }

static inline vec max(vec a, vec b) { return a > b ? a : b; }
static inline float max(vec a) {
    float m = a[0];
    for (int i = 1; i < W; i++) m = a[i] > m ? a[i] : m;
    return m;
}

// exp for x <= 88, within 2 units in the last place; below -87 it is 0.
static inline vec exp(vec x) {
    const vec round = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    vec low = all(-87.0f);
    vec y = x < low ? low : x;  // written this way, NaN stays NaN
    vec rounded = multiply_add(y, all(1.44269504088896341f), round), n = rounded - round;
    vec r = multiply_add(n, all(2.12194440e-4f), multiply_add(n, all(-0.693359375f), y));
    vec p = multiply_add(r, all(1.9875691500e-4f), all(1.3981999507e-3f));
    p = multiply_add(p, r, all(8.3334519073e-3f));
    p = multiply_add(p, r, all(4.1665795894e-2f));
    p = multiply_add(p, r, all(1.6666665459e-1f));
    p = multiply_add(p, r, all(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    // From the low bits of `rounded`: a conversion of NaN to an integer is undefined.
    ivec bits = ((ivec)rounded - (0x4B400000 - 127)) << 23;
    vec result = p * (vec)bits;  // the bits of 2^n, read as floats
    return x < low ? vec{} : result;
}
static inline float exp(float x) { return exp(all(x))[0]; }

// tanh, within 2 units in the last place: near 0 an odd polynomial, elsewhere by exp of -2|x|.
static inline vec tanh(vec x) {
    vec z = x * x;
    vec p = multiply_add(z, all(-5.704986863e-3f), all(2.063908614e-2f));
    p = multiply_add(p, z, all(-5.373971537e-2f));
    p = multiply_add(p, z, all(1.333144158e-1f));
    p = multiply_add(p, z, all(-3.333328068e-1f));
    vec near = multiply_add(x * z, p, x);
    vec size = max(x, -x), e = exp(-2.0f * size);
    vec far = (1.0f - e) / (1.0f + e);
    return size < all(0.625f) ? near : x < vec{} ? -far : far;
}
